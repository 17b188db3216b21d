#!/usr/bin/env bash
# What `vit_jax launch tpu_vm` has each worker of a slice do; it can be run there by hand as well.
#
#   launch/tpu_worker.sh install [--bucket=BUCKET] [--version=VERSION] [--dry_run]
#   launch/tpu_worker.sh start [--slices=2 --slice=1 --coordinator=IP] [--dry_run] \
#     -- train --config=FILE --workdir=DIR
set -euo pipefail
cd "$(dirname "$0")/.."

bucket='' version='' slices=1 slice=0 coordinator='' dry_run=''
command=() # The command of vit_jax: what stands after --.
MEGASCALE_PORT=8081
apt=(sudo apt-get -o DPkg::Lock::Timeout=600 --quiet --yes) # A new VM may be updating itself.

main() {
  local action=${1:-}
  case $action in
    install | start) shift ;;
    *) fail "install or start?" ;;
  esac
  while [ $# -gt 0 ]; do
    case $1 in
      --) shift; command=("$@"); break ;;
      --dry_run) dry_run=yes ;;
      --bucket=* | --version=* | --slices=* | --slice=* | --coordinator=*)
        local flag=${1%%=*}
        printf -v "${flag#--}" %s "${1#*=}"
        ;;
      *) fail "there is no flag $1" ;;
    esac
    shift
  done
  "$action"
}

# The VM's own Python may be too old: uv brings one.
install() {
  local uv what=(--editable '.[tpu,gcs]')
  if [ -n "$version" ]; then what=("vit_jax[tpu,gcs]==$version"); fi
  uv=$(python3 -m site --user-base)/bin/uv
  run python3 -m pip install --quiet --user uv
  run "$uv" venv --quiet --allow-existing --python 3.12 .venv
  run "$uv" pip install --quiet --python .venv/bin/python "${what[@]}"
  if [ -n "$bucket" ]; then mount_bucket; fi
}

mount_bucket() {
  local there=/mnt/$bucket
  mountpoint -q "$there" && return
  if ! command -v gcsfuse >/dev/null; then
    local source
    source="deb https://packages.cloud.google.com/apt gcsfuse-$(. /etc/os-release; echo "$VERSION_CODENAME") main"
    run sudo sh -c "echo '$source' > /etc/apt/sources.list.d/gcsfuse.list"
    run "${apt[@]}" update
    run "${apt[@]}" install gcsfuse
  fi
  run sudo mkdir -p "$there"
  run sudo chown "$(id -un)" "$there"
  # To be read only: what a run writes goes to gs:// itself, where all workers see it at once.
  run gcsfuse --implicit-dirs -o ro "$bucket" "$there"
}

# launch/local.py starts again what ends too early, as long as there is progress, and systemd starts
# that again unless a restart would not help. The unit stays when it has ended, to show how.
start() {
  [ ${#command[@]} -gt 0 ] || fail "what is to run? … -- train --config=FILE --workdir=DIR"
  local megascale=()
  if [ "$slices" != 1 ]; then
    [ -n "$coordinator" ] || fail "--coordinator=… is needed"
    # A slice that was replaced may still have those of another one, and would wait for it forever.
    megascale=(
      --setenv=MEGASCALE_NUM_SLICES="$slices" --setenv=MEGASCALE_SLICE_ID="$slice"
      --setenv=MEGASCALE_COORDINATOR_ADDRESS="$coordinator"
      --setenv=MEGASCALE_PORT="$MEGASCALE_PORT"
    )
  fi
  if [ "$(systemctl show --property=LoadState --value vit_jax 2>/dev/null)" = loaded ]; then
    run sudo systemctl stop vit_jax
    run sudo systemctl reset-failed vit_jax || true # Not failed: nothing to reset.
  fi
  # A set of many files needs more descriptors than the 1,024 that systemd gives.
  run sudo systemd-run --quiet --unit=vit_jax --uid="$(id -u)" --working-directory="$PWD" \
    --setenv=HOME="$HOME" "${megascale[@]}" --property=RemainAfterExit=yes --property=Restart=on-failure \
    --property=RestartPreventExitStatus="1 2" --property=RestartSec=10 --property=LimitNOFILE=1048576 \
    --property=KillMode=mixed --property=TimeoutStopSec=600 \
    "$PWD/.venv/bin/python" launch/local.py --backoff=10 --log_dir="$HOME/vit_jax-logs" -- "${command[@]}"
}

fail() { echo "$(basename "$0"): $*" >&2; exit 2; }

# Shows a command, as one would type it, and runs it; with --dry_run shows it alone.
run() {
  local word quoted=()
  for word in "$@"; do
    case $word in
      '' | *[!A-Za-z0-9_./:=,@%+-]*) quoted+=("'${word//\'/\'\\\'\'}'") ;;
      *) quoted+=("$word") ;;
    esac
  done
  if [ -n "$dry_run" ]; then
    echo "${quoted[*]}"
  else
    echo "${quoted[*]}" >&2
    "$@"
  fi
}

main "$@"
