#!/bin/bash
# A process on each host, over plain ssh: HOSTS="host0 host1" recipes/launch/ssh.sh [more flags]
# Start it from the clone. Every host has the clone at the same path, and all share --workdir.
# Change: HOSTS, the port (free on host0, open to the others), and the command.
set -euo pipefail

read -ra hosts <<< "${HOSTS:-host0 host1}"
port=${PORT:-9876}
# data=2 runs across the hosts, fsdp=8 over the GPUs inside each.
run=(python -m recipes.transformer --mesh=2x8x1 --workdir=runs/mine "$@")

for i in "${!hosts[@]}"; do
  # -tt: when this script ends, so do its processes.
  ssh -tt "${hosts[i]}" "cd $(printf %q "$PWD") && . .venv/bin/activate && \
    JAX_COORDINATOR_ADDRESS=${hosts[0]}:$port JAX_NUM_PROCESSES=${#hosts[@]} JAX_PROCESS_ID=$i \
    $(printf '%q ' "${run[@]}")" < /dev/null &
done
code=0
for process in $(jobs -p); do
  wait "$process" || code=$?
done
exit "$code"
