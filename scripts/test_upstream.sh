#!/usr/bin/env bash
# Operations compared with other implementations, on a CPU: outputs and every gradient; and the parameters of imported models with those that
# transformers builds. The environment takes about 2 GB.
#   scripts/test_upstream.sh [PYTEST ARGUMENTS]
#   scripts/test_upstream.sh --defaults       writes the table of transformers' class defaults
#   scripts/test_upstream.sh --small-models   writes small models with transformers' count, for the planner's tests
set -euo pipefail
cd "$(dirname "$0")/.."
env=.venv-upstream
if [ ! -f "$env/ready" ] || [ pyproject.toml -nt "$env/ready" ] || [ "$0" -nt "$env/ready" ]; then
  "${PYTHON:-python3}" -m venv "$env"
  pip() { "$env/bin/python" -m pip install -qq --disable-pip-version-check -c constraints.txt "$@"; }
  pip "torch==2.13.0+cpu" 2>/dev/null || pip torch
  pip --editable ".[run]" pytest hypothesis einops==0.8.2 transformers==5.24.0 setuptools==84.2.1 wheel ninja
  # Without their own dependencies, which are CUDA builds; mamba-ssm without its extension, which belongs to Mamba-1.
  alone() { "$env/bin/python" -m pip install -qq --disable-pip-version-check --no-deps "$@"; }
  alone flash-linear-attention==0.6.0 fla-core==0.6.0
  MAMBA_FORCE_BUILD=TRUE MAMBA_SKIP_CUDA_BUILD=TRUE alone --no-build-isolation mamba-ssm==2.3.2.post1
  touch "$env/ready"
fi
case "${1:-}" in
  --defaults) exec "$env/bin/python" scripts/transformers_defaults.py ;;
  --small-models) exec "$env/bin/python" tests/upstream/small_models.py ;;
  *) exec "$env/bin/python" -m pytest tests/upstream "$@" ;;
esac
