#!/usr/bin/env bash
# The runtime's and the kernels' tests under the oldest torch that is supported, and the triton that comes with it.
#   scripts/test_torch_2_11.sh [PYTEST ARGUMENTS]     default: everything that is not slow; a later -m or -n replaces "not slow" and 2
# triton 3.6's interpreter needs numpy below 2.4. The environment takes about 5 GB: torch 2.11 has no separate CPU wheel on the registry.
set -euo pipefail
cd "$(dirname "$0")/.."
env=.venv-torch-2.11
if [ ! -f "$env/ready" ] || [ pyproject.toml -nt "$env/ready" ]; then
  "${PYTHON:-python3}" -m venv "$env"
  constraints=$(mktemp)
  trap 'rm -f "$constraints"' EXIT
  grep -vE '^(numpy|setuptools|torch|triton)==' constraints.txt >"$constraints"
  pip() { "$env/bin/python" -m pip install -qq --disable-pip-version-check -c "$constraints" "$@"; }
  pip "torch==2.11.0+cpu" 2>/dev/null || pip torch==2.11.0
  pip --editable ".[run]" "numpy<2.4" pytest hypothesis pytest-xdist pytest-timeout
  touch "$env/ready"
fi
[ $# -gt 0 ] || set -- tests/kernels tests/oracle tests/megarun
exec "$env/bin/python" -m pytest -m "not slow" -n 2 "$@"
