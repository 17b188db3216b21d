#!/usr/bin/env bash
# A TPU slice (or several) from nothing to a running training, through pre-emptions, to nothing.
#
#   launch/tpu_vm.sh ACTION --name=NAME --zone=ZONE [FLAG…] [-- train --config=FILE --workdir=gs://BUCKET/NAME]
#
# Actions:
#   create    asks for the slice and waits for it
#   install   copies this project to all workers, installs it, mounts --bucket
#   start     starts vit_jax on all workers, as a systemd service that starts again what ends too early
#   keep      create, install, start; then looks every minute: a slice that was taken away is created
#             again and the run continues from its last checkpoint; ends when the run does, or when the
#             software cannot be installed
#   status    of the slice and of the service on each worker
#   logs      follows the output of one worker
#   stop      SIGTERM: the run saves and ends; start continues
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
#   --every=60                  seconds between two looks of keep; more after failures
#   --max_attempts=5            installations that may fail in a row on a slice, which costs, before
#                               keep gives up
#   --dry_run                   prints the commands and runs nothing
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/common.sh

# shellcheck disable=SC2034 # check reads some of them by name
project='' type='' version='' spot='' queued='' slices=1 bucket='' worker=0 slice=0 every=60 max_attempts=5 name='' zone=''
FLAGS="name zone project type version spot? queued? slices bucket worker slice every max_attempts"

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
  runtime=$(check tpu_vm name type version slices bucket worker slice every max_attempts)
  if [ "$slices" -gt 1 ]; then queued=yes; fi
  place=(--zone="$zone" ${project:+--project="$project"})
  resource=(tpu-vm) field=state
  if [ -n "$queued" ]; then resource=(queued-resources) field=state.state; fi
  "$action"
}

create() {
  need type
  local what=(--accelerator-type="$type" ${spot:+--spot})
  if [ -z "$queued" ]; then
    run gcloud compute tpus tpu-vm create "$name" "${place[@]}" "${what[@]}" --version="$runtime"
    return
  fi
  if [ "$slices" -gt 1 ]; then
    what+=(--node-count="$slices" --node-prefix="$name")
  else
    what+=(--node-id="$name")
  fi
  run gcloud compute tpus queued-resources create "$name" "${place[@]}" "${what[@]}" \
    --runtime-version="$runtime"
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
  local i coordinator flags=''
  if [ "$slices" -gt 1 ]; then coordinator=$(coordinator); fi
  for ((i = 0; i < slices; i++)); do
    if [ "$slices" -gt 1 ]; then flags=" --slices=$slices --slice=$i --coordinator=$coordinator"; fi
    on "$(node_of "$i")" all "vit_jax/launch/tpu_worker.sh start$flags -- $(show "${command[@]}")"
  done
}

# The address of the first worker of the first slice.
coordinator() {
  local query=(gcloud compute tpus tpu-vm describe "$(node_of 0)" "${place[@]}" "--format=value(networkEndpoints[0].ipAddress)")
  if [ -n "$dry_run" ]; then
    echo ADDRESS
    echo "# ADDRESS is what this prints: $(show "${query[@]}")" >&2
  else
    "${query[@]}"
  fi
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
  local failures=0 pause
  while true; do
    # What fails in here, as while workers come and go, is tried again.
    case $(state) in
      READY | ACTIVE) look_after && return ;;
      PREEMPTED | TERMINATED | STOPPED | SUSPENDED | FAILED) do_apart delete || true ;;
      '')
        if do_apart create; then
          failures=0
          set_up
        else # No capacity, perhaps; nothing costs.
          failures=$((failures + 1))
        fi
        ;;
      *) ;; # On its way.
    esac
    pause=$((every << (failures < 10 ? failures : 10)))
    sleep $((pause < 600 ? pause : every > 600 ? every : 600))
  done
}

# Installs and starts. The slice costs meanwhile: this is not tried without end.
set_up() {
  if do_apart install && do_apart start; then
    failures=0
    return
  fi
  failures=$((failures + 1))
  if ((failures >= max_attempts)); then
    give_up "$name: installing or starting has failed $failures times in a row, see above (--max_attempts). The slice is\
 still there and COSTS until: $(show launch/tpu_vm.sh delete "--name=$name" "${place[@]}" ${queued:+--queued})"
  fi
}

# Whether the run is done; starts it where it was not started, as on a worker that was replaced.
look_after() {
  local services
  services=$(services)
  case $services in
    exited) echo "$name: the run is done; the slice costs until: launch/tpu_vm.sh delete" ;;
    *failed*)
      on "$(node_of 0)" 0 'journalctl --unit=vit_jax --lines=50 --output=cat --no-pager'
      give_up "$name: the run has ended with an error that a restart will not cure. The slice is still\
 there and COSTS until: launch/tpu_vm.sh delete"
      ;;
    *dead*) set_up; return 1 ;;
    *) failures=0; return 1 ;;
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

main "$@"
