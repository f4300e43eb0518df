#!/usr/bin/env bash
# Checkpoints in moto's S3 server on loopback, in an environment of its own: s3fs and moto, and torch from .venv.
#   scripts/test_s3.sh [PYTEST ARGUMENTS]
set -euo pipefail
cd "$(dirname "$0")/.."
env=.venv-s3
if [ ! -f "$env/ready" ] || [ "$0" -nt "$env/ready" ]; then
  .venv/bin/python -m venv "$env"
  "$env/bin/python" -m pip install -qq --disable-pip-version-check \
    s3fs==2026.9.0 fsspec==2026.9.0 aiobotocore==3.10.0 boto3==1.43.117 botocore==1.43.117 "moto[server]==5.2.5" pytest==9.2.0
  folder='import sysconfig; print(sysconfig.get_path("purelib"))'
  .venv/bin/python -c "$folder" >"$("$env/bin/python" -c "$folder")/megarun.pth"  # torch and the rest
  touch "$env/ready"
fi
export PYTHONPATH=src:kernels PYTHONWARNINGS=ignore
"$env/bin/python" -m pytest tests/storage -c /dev/null --rootdir . --confcutdir tests/storage -q -p no:cacheprovider --show-capture=no "$@"
