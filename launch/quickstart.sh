#!/usr/bin/env bash
# From an empty clone to a pre-trained and a fine-tuned ViT on real images, in minutes on a CPU:
#   bash launch/quickstart.sh [--seed=0] [--workdir=DIR]
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/venv.sh
use_venv
exec .venv/bin/python launch/quickstart.py "$@"
