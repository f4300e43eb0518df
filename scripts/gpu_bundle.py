"""Project and wheels in one folder, for a machine with a GPU, torch, triton and Python 3.12, and no network: dist/gpu.

python scripts/gpu_bundle.py [--out DIR] [--no-wheels]

There `DIR/run.sh [options of benchmarks/gpu/run.py]` installs the wheels into DIR/site and runs the benchmark. The wheels are what a
machine with torch, typer and rich may lack; versions are those of constraints.txt.
"""

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "dist/gpu"
CARRIED = (
    "src",
    "kernels",
    "benchmarks",
    "plans",
    "docs/errors",
    "tests/kernels",
    "tests/support",
    "tests/conftest.py",
    "pyproject.toml",
    "LICENSE",
    "NOTICE",
)
LEFT = (".png", ".svg", "benchmarks/results/accuracy.csv")
"""Ends of names of files that no job reads."""
WHEELS = ("pydantic", "pydantic-core", "annotated-types", "typing-inspection", "typing-extensions", "PyYAML")
WHEELS += ("pytest", "iniconfig", "pluggy", "packaging", "Pygments", "hypothesis", "sortedcontainers")
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
PYTHON = "3.12"
LIMIT_BYTES = 40 * 2**20
RUN = """#!/usr/bin/env bash
# Runs benchmarks/gpu/run.py from this folder, without a network, with the options given.
set -euo pipefail
cd "$(dirname "$0")"
python=${PYTHON:-python3}
[ -d site ] || "$python" -m pip install -q --no-index --no-deps --no-compile --disable-pip-version-check --target site wheels/*.whl
PYTHONPATH="$PWD/site:$PWD/src:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}" exec "$python" benchmarks/gpu/run.py "$@"
"""


def bundle(out: Path, *, wheels: bool = True) -> int:
    """Replace the folder; its size in bytes."""
    shutil.rmtree(out, ignore_errors=True)
    for name in carried():
        target = out / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, target)
    commit = subprocess.run(["git", "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    (out / "COMMIT").write_text(commit, encoding="utf-8")
    (out / "run.sh").write_text(RUN, encoding="utf-8")
    (out / "run.sh").chmod(0o755)
    if wheels:
        fetch(out / "wheels")
    return sum(path.stat().st_size for path in out.rglob("*") if path.is_file())


def carried() -> list[str]:
    """Tracked files that the jobs read."""
    listed = subprocess.run(["git", "ls-files", "--", *CARRIED], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    return [name for name in listed.splitlines() if not name.endswith(LEFT) and (ROOT / name).exists()]


def fetch(folder: Path) -> None:
    """Download the wheels for the machine, not for this one."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", PYTHON, "--implementation", "cp", *(f"--platform={platform}" for platform in PLATFORMS)]
    subprocess.run([*command, "-c", str(ROOT / "constraints.txt"), "-d", str(folder), *WHEELS], check=True)


def main(words: Sequence[str] | None = None) -> int:
    """Make it; 1 if it is too large."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--no-wheels", action="store_true", help="the project alone; needs no network")
    given = parser.parse_args(words)
    size = bundle(given.out, wheels=not given.no_wheels)
    print(f"{given.out}: {size / 2**20:.1f} MiB; there: ./run.sh --seconds 600 --out DIR")
    if size > LIMIT_BYTES:
        sys.stderr.write(f"more than {LIMIT_BYTES // 2**20} MiB\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
