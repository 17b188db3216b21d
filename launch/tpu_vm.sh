#!/usr/bin/env bash
# A TPU slice (or several) from nothing to a running training, through pre-emptions, to nothing.
#
#   launch/tpu_vm.sh ACTION --name=NAME --zone=ZONE [FLAG…] [-- train --config=FILE --workdir=gs://BUCKET/NAME]
#
# Actions:
#   create    asks for the slice and waits for it
#   install   copies this project to all workers, installs it, mounts --bucket
#   start     starts vit_jax on all workers, as a systemd service that starts again what ends too early
#   keep      create, install, start; then looks every minute: a slice that was taken away is made anew
#             and the run goes on from its last checkpoint; ends when the run does
#   status    of the slice and of the service on each worker
#   logs      follows the output of one worker
#   stop      SIGTERM: the run saves and ends; start goes on
#   delete    the slice; the bucket stays
# Flags:
#   --project=PROJECT           default: gcloud's
#   --type=v5litepod-64         accelerator type, see: gcloud compute tpus accelerator-types list
#   --version=RUNTIME           default: the one for the type
#   --spot                      cheaper, and can be taken away at any time
#   --queued                    through the queue of requests: waits until there is capacity
#   --slices=2                  several slices as one run; these always queue
#   --bucket=BUCKET             Cloud Storage, whose data every worker can read in /mnt/BUCKET
#   --worker=0 --slice=0        whose output logs follows
#   --every=60                  seconds between two looks of keep
#   --dry_run                   prints the commands and runs nothing
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/common.sh

project='' type='' version='' spot='' queued='' slices=1 bucket='' worker=0 slice=0 every=60 name='' zone=''
FLAGS="name zone project type version spot queued slices bucket worker slice every"

main() {
  local action=${1:-}
  [ $# -gt 0 ] && shift
  case $action in
    create | install | start | keep | status | logs | stop | delete) ;;
    -h | --help) usage; exit 0 ;;
    *) usage >&2; fail "which action? ${action:+not $action}" ;;
  esac
  given=("$@")
  parse_flags "$FLAGS" "$@"
  need name zone
  if [ "$slices" -gt 1 ]; then queued=yes; fi
  place=(--zone="$zone" ${project:+--project="$project"})
  resource=(tpu-vm) field=state
  if [ -n "$queued" ]; then resource=(queued-resources) field=state.state; fi
  "$action"
}

create() {
  need type
  version=$(runtime)
  local what=(--accelerator-type="$type" ${spot:+--spot})
  if [ -z "$queued" ]; then
    run gcloud compute tpus tpu-vm create "$name" "${place[@]}" "${what[@]}" --version="$version"
    return
  fi
  if [ "$slices" -gt 1 ]; then
    what+=(--node-count="$slices" --node-prefix="$name")
  else
    what+=(--node-id="$name")
  fi
  run gcloud compute tpus queued-resources create "$name" "${place[@]}" "${what[@]}" \
    --runtime-version="$version"
  until [ -n "$dry_run" ] || [ "$(state)" = ACTIVE ]; do
    case $(state) in
      FAILED | SUSPENDED | '') fail "the request for $name has failed: launch/tpu_vm.sh status …" ;;
    esac
    sleep 30
  done
}

install() {
  local archive=/tmp/vit_jax-$name.tar.gz node
  run tar -czf "$archive" --exclude=./.git --exclude=./.venv --exclude=./runs .
  for node in $(nodes); do
    run gcloud compute tpus tpu-vm scp "$archive" "$node:vit_jax.tar.gz" "${place[@]}" --worker=all
    on "$node" all "mkdir -p vit_jax && tar -xzf vit_jax.tar.gz -C vit_jax &&\
 vit_jax/launch/tpu_worker.sh install ${bucket:+--bucket=$bucket}"
  done
  run rm "$archive"
}

start() {
  need_command
  local node
  for node in $(nodes); do
    on "$node" all "vit_jax/launch/tpu_worker.sh start -- $(show "${command[@]}")"
  done
}

keep() {
  need type
  need_command
  if [ -n "$dry_run" ]; then
    echo "# every minute:"
    run gcloud compute tpus "${resource[@]}" describe "$name" "${place[@]}" --format="value($field)"
    echo "# when it was taken away:"
    delete
    echo "# when there is none:"
    create
    install
    start
    return
  fi
  while true; do
    # What fails in here, as while workers come and go, is tried again.
    case $(state) in
      READY | ACTIVE) look_after && return ;;
      PREEMPTED | TERMINATED | STOPPED | SUSPENDED | FAILED) do_apart delete || true ;;
      '') do_apart create && do_apart install && do_apart start || true ;;
      *) ;; # On its way.
    esac
    sleep "$every"
  done
}

# Whether the run is done; starts it where it was not started, as on a worker that was made anew.
look_after() {
  local services
  services=$(services)
  case $services in
    exited) echo "$name: the run is done" ;;
    *failed*)
      on "$(node_of 0)" 0 'journalctl --unit=vit_jax --lines=50 --output=cat --no-pager'
      fail "$name: the run has ended with an error that a restart will not cure"
      ;;
    *dead*) do_apart install && do_apart start && return 1 ;;
    *) return 1 ;;
  esac
}

# An action in a process of its own, which ends at its first error.
do_apart() { launch/tpu_vm.sh "$1" "${given[@]}"; }

status() {
  run gcloud compute tpus "${resource[@]}" describe "$name" "${place[@]}"
  local node
  for node in $(nodes); do on "$node" all 'systemctl status --no-pager --lines=3 vit_jax || true'; done
}

logs() { on "$(node_of "$slice")" "$worker" 'journalctl --unit=vit_jax --follow --lines=100 --output=cat'; }

stop() {
  local node
  for node in $(nodes); do on "$node" all 'sudo systemctl stop vit_jax'; done
}

delete() {
  run gcloud compute tpus "${resource[@]}" delete "$name" "${place[@]}" --quiet ${queued:+--force}
}

# on NODE WORKER COMMAND: runs a line of shell on one or all workers of a slice.
on() { run gcloud compute tpus tpu-vm ssh "$1" "${place[@]}" --worker="$2" --command="$3"; }

nodes() {
  local i
  for ((i = 0; i < slices; i++)); do node_of "$i"; done
}

node_of() { if [ "$slices" -gt 1 ]; then echo "$name-$1"; else echo "$name"; fi; }

# READY (a slice) or ACTIVE (a request) when it can be used; empty when there is none.
state() {
  gcloud compute tpus "${resource[@]}" describe "$name" "${place[@]}" --format="value($field)" \
    2>/dev/null || true
}

# The states of the service on all workers, each once: running, exited (done), failed, dead (never
# started) and others; none when the workers cannot be reached.
services() {
  local node
  for node in $(nodes); do
    gcloud compute tpus tpu-vm ssh "$node" "${place[@]}" --worker=all \
      --command='systemctl show --property=SubState --value vit_jax' 2>/dev/null || true
  done | sort -u | paste -sd ' '
}

# The software of the VM that goes with the chip.
runtime() {
  if [ -n "$version" ]; then echo "$version"; return; fi
  case $type in
    v2-* | v3-* | v4-*) echo tpu-ubuntu2204-base ;;
    v5litepod-*) echo v2-alpha-tpuv5-lite ;;
    v5p-*) echo v2-alpha-tpuv5 ;;
    v6e-*) echo v2-alpha-tpuv6e ;;
    *) fail "no runtime is known for --type=$type: say --version=…, or use launch/gke (TPU7x)" ;;
  esac
}

main "$@"
