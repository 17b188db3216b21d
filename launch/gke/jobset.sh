#!/usr/bin/env bash
# Starts a run on TPU slices of the GKE cluster that kubectl talks to (JobSet must be installed there).
#
#   launch/gke/jobset.sh --name=NAME --topology=v5p:4x4x8 --image=IMAGE --bucket=BUCKET [FLAG…] \
#     -- train --config=FILE --workdir=gs://BUCKET/NAME
#
# Flags:
#   --topology=KIND:SHAPE       as vit_jax plan names it: v4, v5e, v5p, v6e or tpu7x
#   --image=IMAGE               made from launch/gke/Dockerfile
#   --bucket=BUCKET             Cloud Storage, whose data can be read in /mnt/BUCKET
#   --slices=2                  several slices as one run
#   --chips=4                   chips of a host, as google.com/tpu of its node pool says
#   --spot                      on spot nodes
#   --service_account=NAME      of Kubernetes, may use the bucket; default: default
#   --max_restarts=100          how often all is started again
#   --grace=120                 seconds between SIGTERM and SIGKILL; GKE gives 15 when it takes spot nodes away
#   --queue=NAME                a Kueue LocalQueue, see launch/gke/kueue.yaml
#   --dry_run                   prints the manifest and the command and runs nothing
set -euo pipefail
cd "$(dirname "$0")/../.."
. launch/common.sh

# shellcheck disable=SC2034 # check reads some of them by name
name='' topology='' image='' bucket='' slices=1 chips=4 spot='' service_account=default
max_restarts=100 grace=120 queue=''
FLAGS="name topology image bucket slices chips spot? service_account max_restarts grace queue"

main() {
  parse_flags "$FLAGS" "$@"
  need name topology image bucket
  need_command
  local checked
  checked=$(check jobset name topology bucket slices chips spot service_account max_restarts grace queue)
  read -r accelerator shape hosts <<<"$checked"
  if [ -n "$dry_run" ]; then
    manifest
    echo "# kubectl apply --filename=- # with the manifest above"
  else
    manifest | kubectl apply --filename=-
  fi
}

manifest() {
  local text
  text=$(grep -v '^#' launch/gke/jobset.yaml)
  if [ -z "$spot" ]; then text=$(grep -v gke-spot: <<<"$text"); fi
  if [ -z "$queue" ]; then text=$(grep -v -e labels: -e queue-name: <<<"$text"); fi
  if ((slices == 1)); then text=$(sed '/env:/,/value: "8081"/d' <<<"$text"); fi
  fill name "$name"
  fill image "$image"
  fill bucket "$bucket"
  fill slices "$slices"
  fill hosts "$hosts"
  fill chips "$chips"
  fill accelerator "$accelerator"
  fill topology "$shape"
  fill spot true
  fill host_network "$( ((slices > 1)) && echo true || echo false)"
  fill service_account "$service_account"
  fill max_restarts "$max_restarts"
  fill grace "$grace"
  fill queue "$queue"
  fill command "$(json_list "${command[@]}")"
  echo "$text"
}

# fill NAME VALUE: puts a value where the template says @NAME@.
fill() { text=${text//"@$1@"/"$2"}; }

json_list() {
  local word list=''
  for word in "$@"; do
    word=${word//\\/\\\\}
    list+=", \"${word//\"/\\\"}\""
  done
  echo "[${list#, }]"
}

main "$@"
