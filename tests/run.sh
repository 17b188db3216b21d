#!/usr/bin/env bash
# Makes the environment and passes the tests: bash tests/run.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/venv.sh
use_venv test
# timm wants a torchvision that matches torch; its models do without.
if .venv/bin/python -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("torch") or bool(u.find_spec("timm")))'; then
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps 'timm>=1.0.31,<1.1'
fi
.venv/bin/ruff check .
.venv/bin/ruff format --check .
exec .venv/bin/python -m pytest -n "${TEST_PROCESSES:-2}" --dist loadfile "$@"
