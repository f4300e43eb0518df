#!/usr/bin/env bash
# Tests from an installed wheel in a clean environment: megaplan's commands and files without torch; everything with `run`.
#   scripts/test_wheel.sh [run]
set -euo pipefail
cd "$(dirname "$0")/.."
part=${1:-planner}
env=.venv-wheel
rm -rf "$env" dist
.venv/bin/python -m build --wheel --no-isolation >/dev/null
wheel=$(echo dist/*.whl)
"${PYTHON:-python3}" -m venv "$env"
pip() { "$env/bin/python" -m pip install -qq --disable-pip-version-check "$@"; }
tests="$(mktemp -d)"
trap 'rm -rf "$tests"' EXIT
cp -r tests benchmarks pyproject.toml README.md plans docs "$tests"  # run outside the sources, never from them
if [ "$part" = run ]; then
  pip --require-hashes -r locks/torch-cpu.txt -r locks/torch-cpu-wheels.txt 2>/dev/null || pip --require-hashes -r locks/torch.txt
  pip --require-hashes -r locks/run.txt
  pip --no-deps "$wheel"
  cd "$tests" && "$OLDPWD/$env/bin/python" -m pytest tests -m "not slow" -n 2
else
  pip --require-hashes -r locks/wheel.txt
  pip --no-deps "$wheel"
  ! "$env/bin/python" -c "import torch" 2>/dev/null || { echo "error: torch is installed in the environment that must not have it" >&2; exit 1; }
  "$env/bin/python" - <<'EVERY' || { echo "error: a module of the wheel cannot be imported without torch" >&2; exit 1; }
import importlib, pkgutil, megaplan
for module in pkgutil.walk_packages(megaplan.__path__, "megaplan."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
EVERY
  # what reads the wheel's files, its commands and its public functions; formulas are the same code as in the planner's tests
  cd "$tests" && "$OLDPWD/$env/bin/python" -m pytest tests/megaplan/{api,devices,exporters,plan,report,spec} \
    tests/megaplan/cli/test_{golden,json,startup}.py tests/megaplan/importers/test_{command,megatron,models,torchtitan,towers}.py -m "not slow and not runtime" -n 2
fi
