#!/bin/sh
# The images' sizes in MB, by part: the base image, the model, and everything else (Python packages and our own code).
set -eu
printf '  %-18s %6s   %6s %6s %9s\n' image 'total' 'base' 'model' 'the rest'
for image in slipstream-core slipstream-worker; do
  # Newest layer first: what comes after our first one is the base image.
  docker history --no-trunc --human=false --format '{{.Size}} {{.CreatedBy}}' "$image" | awk -v image="$image" '
    { total += $1 }
    is_base { base += $1 }
    /COPY \/(cache|words) / { model += $1 }
    /groupadd -g 10001/ { is_base = 1 }
    END { printf "  %-18s %6.0f = %6.0f %6.0f %9.0f\n", image, total / 1e6, base / 1e6, model / 1e6, (total - base - model) / 1e6 }'
done
