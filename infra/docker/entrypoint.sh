#!/bin/sh
# Runs one service: `slipstream-service decode`. A container is named after its host name, so that replicas can be told apart.
set -eu
role=$1
id=$(hostname)
export SS_NAME="${SS_NAME:-$role-$(printf %.6s "$id")}"
export SS_READY_FILE="${SS_READY_FILE:-/tmp/ready}"
export SS_NATS_USER="${SS_NATS_USER:-$role}"
export SS_NATS_PASSWORD_FILE="${SS_NATS_PASSWORD_FILE:-/secrets/$role/password}"
export SS_CLUSTER_SECRET_FILE="${SS_CLUSTER_SECRET_FILE:-/secrets/$role/cluster}"
exec python -P -m "services.$role"
