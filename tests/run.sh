#!/usr/bin/env bash
# Makes the environment and passes the tests: bash tests/run.sh [--quick | --changed [BASE]] [pytest arguments]
#   --quick: about two minutes of tests, see tests/quick.py
#   --changed [BASE]: those that the changes since the branch BASE reach (by default main), see tests/changed.py
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/venv.sh
use_venv test
# timm and lightly want a torchvision that matches torch; the models and losses compared with do without.
if .venv/bin/python -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("torch") or all(map(u.find_spec, ("timm", "lightly", "lightly_utils"))))'; then
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps ${lock:+"--constraint=$lock"} 'timm>=1.0.31,<1.1' 'lightly>=1.6,<1.7' 'lightly-utils>=0.0.2'
fi
if [ "${1:-}" = --quick ]; then
  shift
  chosen=$(.venv/bin/python -m tests.quick)
  # shellcheck disable=SC2086 # one word for each test
  set -- $chosen "$@"
elif [ "${1:-}" = --changed ]; then
  shift
  base=main
  if [ $# -gt 0 ] && [[ $1 != -* ]]; then
    base=$1
    shift
  fi
  reached=$(.venv/bin/python -m tests.changed "$base")
  # shellcheck disable=SC2086 # one word for each file
  set -- $reached "$@"
fi
.venv/bin/ruff check .
.venv/bin/ruff format --check .
exec .venv/bin/python -m pytest -n "${TEST_PROCESSES:-2}" --dist loadfile --no-loadscope-reorder --max-worker-restart=0 "$@"
