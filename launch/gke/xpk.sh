#!/usr/bin/env bash
# Starts a run through xpk (pip install xpk), on a cluster that xpk has made.
#
#   launch/gke/xpk.sh --cluster=CLUSTER --name=NAME --type=v5p-256 --image=IMAGE [FLAG…] \
#     -- train --config=FILE --workdir=gs://BUCKET/NAME
#
# Flags:
#   --type=v5p-256              of TPU slice, as xpk names it
#   --image=IMAGE               made from launch/gke/Dockerfile
#   --slices=2                  several slices as one run
#   --storage=NAME              mounted storage that the cluster knows: xpk storage create …
#   --project=PROJECT --zone=ZONE
#   --max_restarts=100          xpk starts again what ends with 42 or 127 to 255, nothing else
#   --grace=120                 seconds between SIGTERM and SIGKILL
#   --dry_run                   prints the command and runs nothing
set -euo pipefail
cd "$(dirname "$0")/../.."
. launch/common.sh

# shellcheck disable=SC2034 # check reads some of them by name
cluster='' name='' type='' image='' slices=1 storage='' project='' zone='' max_restarts=100 grace=120

parse_flags "cluster name type image slices storage project zone max_restarts grace" "$@"
need cluster name type image
need_command
check xpk name type slices max_restarts grace >/dev/null
run xpk workload create --cluster="$cluster" --workload="$name" --tpu-type="$type" \
  --num-slices="$slices" --docker-image="$image" --max-restarts="$max_restarts" \
  --termination-grace-period-seconds="$grace" ${storage:+--storage="$storage"} \
  ${project:+--project="$project"} ${zone:+--zone="$zone"} \
  --command="python -m vit_jax $(show "${command[@]}")"
