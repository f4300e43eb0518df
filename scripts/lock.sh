#!/usr/bin/env bash
# Writes locks/: constraints.txt's versions with the hashes of their files, for every platform and Python; to be run when either changes.
#   scripts/lock.sh
# torch has its own files, because its two builds need different Tritons: torch-cpu.txt names the wheels whose hashes were recorded, torch.txt is
# the registry's build with what it depends on.
set -euo pipefail
cd "$(dirname "$0")/.."
env=.venv-lock
[ -x "$env/bin/uv" ] || { "${PYTHON:-python3}" -m venv "$env" && "$env/bin/python" -m pip install -qq --disable-pip-version-check uv==0.13.9; }
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" - "$work" <<'REQUIREMENTS'
import sys, tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
extras, out = project["optional-dependencies"], Path(sys.argv[1])
run = [each for each in extras["run"] if not each.startswith(("torch", "triton"))]
test = ["pytest", "hypothesis", "pytest-xdist", "pytest-timeout"]
build = ["hatchling", "editables"]
for name, requirements in {
    "run": [*project["dependencies"], *run, *extras["dev"], *build],
    "wheel": [*project["dependencies"], *test],
    "docs": [*project["dependencies"], *extras["docs"], *build],
    "browser": ["playwright", "pytest"],
    "torch": ["torch"],
    "torch-cpu": ["triton; sys_platform == 'linux'", "filelock", "typing-extensions", "setuptools", "sympy", "networkx", "jinja2", "fsspec"],
}.items():
    (out / f"{name}.in").write_text("\n".join(requirements) + "\n")
REQUIREMENTS
grep -v '^triton==' constraints.txt >"$work/without-triton.txt"
for file in "$work"/*.in; do
  name=$(basename "$file" .in)
  pins=constraints.txt
  [ "$name" = torch ] && pins="$work/without-triton.txt"
  "$env/bin/uv" pip compile "$file" -c "$pins" --universal --python-version 3.11.5 --generate-hashes --no-annotate --no-header -q -o "locks/$name.txt"
done
