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
#   --grace=120                 seconds between SIGTERM and SIGKILL
#   --dry_run                   prints the manifest and the command and runs nothing
set -euo pipefail
cd "$(dirname "$0")/../.."
. launch/common.sh

name='' topology='' image='' bucket='' slices=1 chips=4 spot='' service_account=default
max_restarts=100 grace=120 accelerator='' hosts=''

main() {
  parse_flags "name topology image bucket slices chips spot service_account max_restarts grace" "$@"
  need name topology image bucket
  need_command
  accelerator=$(accelerator)
  hosts=$(hosts)
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
  fill name "$name"
  fill image "$image"
  fill bucket "$bucket"
  fill slices "$slices"
  fill hosts "$hosts"
  fill chips "$chips"
  fill accelerator "$accelerator"
  fill topology "${topology#*:}"
  fill spot true
  fill host_network "$( ((slices > 1)) && echo true || echo false)"
  fill service_account "$service_account"
  fill max_restarts "$max_restarts"
  fill grace "$grace"
  fill command "$(json_list "${command[@]}")"
  echo "$text"
}

# fill NAME VALUE: puts a value where the template says @NAME@.
fill() { text=${text//"@$1@"/"$2"}; }

# How GKE calls the chip.
accelerator() {
  case ${topology%%:*} in
    v4) echo tpu-v4-podslice ;;
    v5e) echo tpu-v5-lite-podslice ;;
    v5p) echo tpu-v5p-slice ;;
    v6e) echo tpu-v6e-slice ;;
    tpu7x) echo tpu7x ;;
    *) fail "--topology=$topology: known kinds are v4, v5e, v5p, v6e, tpu7x, as in v5e:8x8" ;;
  esac
}

# Hosts of a slice.
hosts() {
  local product=1 side sides
  IFS=x read -ra sides <<<"${topology#*:}"
  for side in "${sides[@]}"; do
    [[ $side =~ ^[0-9]+$ ]] || fail "--topology=$topology: say KIND:SHAPE, as in v5e:8x8 or v5p:4x4x8"
    product=$((product * side))
  done
  if ((product < chips)); then
    fail "--topology=$topology has $product chips: say --chips=$product"
  fi
  echo $((product / chips))
}

json_list() {
  local word list=''
  for word in "$@"; do
    word=${word//\\/\\\\}
    list+=", \"${word//\"/\\\"}\""
  done
  echo "[${list#, }]"
}

main "$@"
