#!/usr/bin/env bash
# Checkpoints in moto's S3 server on loopback, in its own environment (scripts/storage_env.sh).
#   scripts/test_s3.sh [PYTEST ARGUMENTS]
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=src:kernels PYTHONWARNINGS=ignore
"$(scripts/storage_env.sh)" -m pytest tests/storage -c /dev/null --rootdir . --confcutdir tests/storage -q -p no:cacheprovider --show-capture=no "$@"
