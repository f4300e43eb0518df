#!/usr/bin/env bash
# Exports, read by the hosts' own code. The environment has torch and takes about 2 GB.
#   scripts/test_hosts.sh [PYTEST ARGUMENTS]
set -euo pipefail
cd "$(dirname "$0")/.."
env=.venv-hosts
if [ ! -f "$env/ready" ] || [ pyproject.toml -nt "$env/ready" ]; then
  "${PYTHON:-python3}" -m venv "$env"
  pip() { "$env/bin/python" -m pip install -qq --disable-pip-version-check -c constraints.txt "$@"; }
  pip "torch==2.13.0+cpu" 2>/dev/null || pip torch
  pip --editable ".[run]" pytest hypothesis
  # Without their own dependencies: those pull in CUDA builds, and the parsers need few of them.
  "$env/bin/python" -m pip install -qq --disable-pip-version-check --no-deps megatron-core==0.16.1 torchtitan==0.3.0 deepspeed==0.19.8 nanotron==0.4
  pip dacite hjson tyro docstring-parser psutil py-cpuinfo nvidia-ml-py einops packaging tqdm msgpack setuptools
  touch "$env/ready"
fi
exec "$env/bin/python" -m pytest tests/hosts "$@"
