#!/bin/bash
# A TPU slice of 64 v5p chips by XPK (https://github.com/AI-Hypercomputer/xpk), which writes the JobSet:
#   recipes/launch/xpk.sh [more flags]
# Needs a cluster made by `xpk cluster create`, and an image made by recipes/launch/Dockerfile.
# Change: what is above the line. `python -m recipes.plan --devices=v5p:64 --size=8b` prints TYPE and a mesh.
set -euo pipefail

CLUSTER=${CLUSTER:-my-cluster} PROJECT=${PROJECT:-my-project} ZONE=${ZONE:-us-east5-a}
NAME=${NAME:-zoo} TYPE=${TYPE:-v5p-128} SLICES=${SLICES:-1}
IMAGE=${IMAGE:-my-registry/zoo}
WORKDIR=${WORKDIR:-gs://my-bucket/runs/mine}
MESH=${MESH:-64}  # for two slices, 2x64x1
# ---------------------------------------------------------------------------------------------------

xpk workload create --cluster="$CLUSTER" --project="$PROJECT" --zone="$ZONE" --workload="$NAME" \
  --tpu-type="$TYPE" --num-slices="$SLICES" --docker-image="$IMAGE" \
  --max-restarts=10 --termination-grace-period-seconds=120 \
  --command="python -m recipes.transformer --mesh=$MESH --workdir=$WORKDIR ${*:+$(printf '%q ' "$@")}"
