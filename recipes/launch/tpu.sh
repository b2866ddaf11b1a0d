#!/bin/bash
# One or more TPU slices of Google Cloud, a process on each host: recipes/launch/tpu.sh WHAT
#   create   asks for the slices; they are there when `gcloud compute tpus tpu-vm list` says READY
#   install  clones and installs on all hosts
#   run      starts the run; the same again resumes it: recipes/launch/tpu.sh run [more flags]
#   delete   gives the slices back
# Change: what is above the line. The workdir is a bucket, as TPU hosts share no disk.
set -euo pipefail

PROJECT=${PROJECT:-my-project} ZONE=${ZONE:-us-east5-b}
NAME=${NAME:-zoo} TYPE=${TYPE:-v5litepod-16} SLICES=${SLICES:-2} SOFTWARE=${SOFTWARE:-v2-alpha-tpuv5-lite}
CLONE=${CLONE:-https://github.com/me/sharded-model-zoo}
WORKDIR=${WORKDIR:-gs://my-bucket/runs/mine}
MESH=${MESH:-${SLICES}x16x1}  # data across the slices, fsdp over the 16 chips of each
# ---------------------------------------------------------------------------------------------------

cloud=(--project="$PROJECT" --zone="$ZONE")
what=${1:?create, install, run or delete}
shift

everywhere() {  # a command, on all hosts of all slices; ends when one fails
  local processes=() code=0
  for ((i = 0; i < SLICES; i++)); do
    local slice=$NAME-$i
    [ "$SLICES" -gt 1 ] || slice=$NAME
    gcloud compute tpus tpu-vm ssh "$slice" "${cloud[@]}" --worker=all --command="$1" &
    processes+=($!)
  done
  for process in "${processes[@]}"; do
    wait "$process" || code=$?
  done
  return "$code"
}

case $what in
  create)
    several=()  # a slice alone has the node's own name, several have it with a number
    [ "$SLICES" -gt 1 ] && several=(--node-count="$SLICES" --node-prefix="$NAME")
    [ "$SLICES" -gt 1 ] || several=(--node-id="$NAME")
    gcloud compute tpus queued-resources create "$NAME" "${cloud[@]}" "${several[@]}" \
      --accelerator-type="$TYPE" --runtime-version="$SOFTWARE"
    ;;
  install)
    # By uv, which brings a Python: the hosts' own may be older than JAX needs.
    everywhere "git clone $CLONE zoo && cd zoo && pip3 install --user uv && uv=~/.local/bin/uv && \
      \$uv venv --python=3.12 .venv && \$uv pip install -e '.[gcs]' 'jax[tpu]'"
    ;;
  run)
    everywhere "cd zoo && . .venv/bin/activate && \
      python -m recipes.transformer --mesh=$MESH --workdir=$WORKDIR ${*:+$(printf '%q ' "$@")}"
    ;;
  delete)
    gcloud compute tpus queued-resources delete "$NAME" "${cloud[@]}" --force --quiet
    ;;
  *)
    echo "error: $what is not one of create, install, run and delete" >&2
    exit 2
    ;;
esac
