#!/usr/bin/env bash
# Makes a virtual environment with everything the project needs, under constraints.txt.
#   scripts/install.sh DIR [EXTRAS]     EXTRAS: run,dev (default)
# torch: the CPU build where no GPU answers and such a build is to be had, else the registry's build of the same version.
set -euo pipefail
cd "$(dirname "$0")/.."
dir=${1:?usage: scripts/install.sh DIR [EXTRAS]}
extras=${2:-run,dev}
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: Python 3.11 or newer is needed; set PYTHON=/path/to/python3.11" >&2; exit 2; }
[ -x "$dir/bin/python" ] || "$python" -m venv "$dir"
pip() { "$dir/bin/python" -m pip install -qq --disable-pip-version-check "$@"; }
constraints=constraints.txt
registry_torch() { # that build asks for the Triton it was released with, which need not be the pinned one
  constraints="$dir/constraints.txt"
  grep -v '^triton==' constraints.txt >"$constraints"
  pip torch==2.13.0 -c "$constraints"
}
if [[ ",$extras," == *,run,* ]]; then
  if nvidia-smi >/dev/null 2>&1; then
    registry_torch
  else
    # A local CPU wheel first; then PyTorch's own index; the registry's build (with CUDA libraries) works too, it is only larger.
    pip "torch==2.13.0+cpu" 2>/dev/null ||
      pip "torch==2.13.0+cpu" --retries 0 --timeout 10 --index-url https://download.pytorch.org/whl/cpu --extra-index-url https://pypi.org/simple 2>/dev/null ||
      registry_torch
  fi
fi
pip --editable ".[$extras]" -c "$constraints"
"$dir/bin/python" -m compileall -q src kernels  # an editable install is not compiled by pip, and the planner is about start-up time
