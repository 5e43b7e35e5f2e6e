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
if [ "${SS_THREADS:-0}" = 0 ]; then
  # As there are three workers, each of which may use two CPUs. Threads that have no CPU wait for one another: several times slower.
  threads=$(($(nproc) / 3))
  export SS_THREADS=$((threads < 1 ? 1 : threads > 2 ? 2 : threads))
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$SS_THREADS}"
exec python -P -m "services.$role"
