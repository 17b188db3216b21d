#!/usr/bin/env bash
# What launch/tpu_vm.sh has each worker of a slice do; it can be run there by hand as well.
#
#   launch/tpu_worker.sh install [--bucket=BUCKET] [--dry_run]
#   launch/tpu_worker.sh start [--slices=2 --slice=1 --coordinator=IP] [--dry_run] \
#     -- train --config=FILE --workdir=DIR
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/common.sh

bucket='' slices=1 slice=0 coordinator=''
MEGASCALE_PORT=8081
apt=(sudo apt-get -o DPkg::Lock::Timeout=600 --quiet --yes) # A new VM may be updating itself.

main() {
  local action=${1:-}
  case $action in
    install | start) shift ;;
    *) usage >&2; fail "install or start?" ;;
  esac
  parse_flags "bucket slices slice coordinator" "$@"
  "$action"
}

# The VM's own Python may be too old: uv brings one.
install() {
  local uv
  uv=$(python3 -m site --user-base)/bin/uv
  run python3 -m pip install --quiet --user uv
  run "$uv" python install --quiet 3.12
  if [ -z "$dry_run" ]; then
    PYTHON=$("$uv" python find 3.12)
    use_venv tpu,gcs
  fi
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
  need_command
  local megascale=()
  if [ "$slices" != 1 ]; then
    need coordinator
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
  run sudo systemd-run --quiet --unit=vit_jax --uid="$(id -u)" --working-directory="$PWD" \
    --setenv=HOME="$HOME" "${megascale[@]}" --property=RemainAfterExit=yes --property=Restart=on-failure \
    --property=RestartPreventExitStatus="1 2" --property=RestartSec=10 \
    --property=KillMode=mixed --property=TimeoutStopSec=600 \
    "$PWD/.venv/bin/python" launch/local.py --backoff=10 --log_dir="$HOME/vit_jax-logs" -- "${command[@]}"
}

main "$@"
