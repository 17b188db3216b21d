#!/usr/bin/env bash
# Makes the environment and passes the tests: bash tests/run.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/venv.sh
use_venv test
.venv/bin/ruff check .
.venv/bin/ruff format --check .
exec .venv/bin/python -m pytest -n "${TEST_PROCESSES:-2}" "$@"
