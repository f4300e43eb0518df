#!/usr/bin/env bash
# Prints the interpreter of the environment for storages on this machine: s3fs, moto's S3 server, FUSE, and torch and the rest from .venv.
# It is made when it is not there. fuse-python has a wheel, with its libfuse, for some interpreters only; without it there is no FUSE.
set -euo pipefail
cd "$(dirname "$0")/.."
env=.venv-s3
if [ ! -f "$env/ready" ] || [ "$0" -nt "$env/ready" ]; then
  .venv/bin/python -m venv "$env"
  "$env/bin/python" -m pip install -qq --disable-pip-version-check \
    s3fs==2026.9.0 fsspec==2026.9.0 aiobotocore==3.10.0 boto3==1.43.117 botocore==1.43.117 "moto[server]==5.2.5" pytest==9.2.0 mfusepy==3.1.1
  "$env/bin/python" -m pip install -qq --disable-pip-version-check --only-binary :all: fuse-python==1.0.9 || echo "no FUSE here" >&2
  folder='import sysconfig; print(sysconfig.get_path("purelib"))'
  .venv/bin/python -c "$folder" >"$("$env/bin/python" -c "$folder")/megarun.pth"
  touch "$env/ready"
fi
echo "$env/bin/python"
