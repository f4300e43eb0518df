#!/usr/bin/env bash
# Kills of small runs in every layout, storage and phase, with an S3 server and a FUSE folder on this machine.
#   scripts/kills.sh [ARGUMENTS of scripts/kills.py]
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHONPATH=src:kernels PYTHONWARNINGS=ignore OMP_NUM_THREADS=1 exec "$(scripts/storage_env.sh)" scripts/kills.py "$@"
