#!/usr/bin/env bash
# Makes a virtual environment with everything the project needs: the versions of constraints.txt, each file checked against its hash in locks/.
#   scripts/install.sh DIR
# torch: the CPU build where no GPU answers and a build of a known hash is to be had, else the registry's build of the same version.
set -euo pipefail
cd "$(dirname "$0")/.."
dir=${1:?usage: scripts/install.sh DIR}
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: Python 3.11 or newer is needed; set PYTHON=/path/to/python3.11" >&2; exit 2; }
[ -x "$dir/bin/python" ] || "$python" -m venv "$dir"
pip() { "$dir/bin/python" -m pip install -qq --disable-pip-version-check --no-compile "$@"; }
cpu_torch() { pip --require-hashes -r locks/torch-cpu.txt -r locks/torch-cpu-wheels.txt "$@" 2>/dev/null; }
if nvidia-smi >/dev/null 2>&1; then
  pip --require-hashes -r locks/torch.txt
else
  # A local CPU wheel first; then PyTorch's own index; the registry's build (with CUDA libraries) works too, it is only larger.
  cpu_torch ||
    cpu_torch --retries 0 --timeout 10 --index-url https://download.pytorch.org/whl/cpu --extra-index-url https://pypi.org/simple ||
    pip --require-hashes -r locks/torch.txt
fi
pip --require-hashes -r locks/run.txt
pip --no-deps --no-build-isolation --editable .
# Compiled on all cores, where pip takes one. An environment may forbid that a first import does it (PYTHONDONTWRITEBYTECODE).
"$dir/bin/python" -m compileall -q src kernels
"$dir/bin/python" -m compileall -qq -j 0 "$dir"/lib/python*/site-packages || true  # torch has files for newer Pythons
