"""The folder that is carried to a GPU without a network: complete, small, and it runs under Python 3.12."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TRY = """
import pydantic, yaml, megaplan
assert pydantic.__file__.startswith({site!r}) and megaplan.__file__.startswith({folder!r})
print(megaplan.estimate({folder!r} + "/benchmarks/gpu/specs/nam56r.yaml").worst.parameters)
"""
PYTHONS = ("python3.12", *sorted(map(str, Path("/root/.pyenv/versions").glob("3.12*/bin/python3.12"))))


def made(out: Path, *options: str) -> float:
    """Size of the bundle in MiB."""
    command = [sys.executable, str(ROOT / "scripts/gpu_bundle.py"), "--out", str(out), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return sum(path.stat().st_size for path in out.rglob("*") if path.is_file()) / 2**20


@pytest.mark.jobs
def test_the_project_alone_has_what_its_jobs_read(tmp_path: Path) -> None:
    assert made(tmp_path / "gpu", "--no-wheels") < 20
    for name in ("benchmarks/gpu/run.py", "benchmarks/gpu/specs/nam56r.yaml", "plans/tiny-hybrid.json", "COMMIT", "run.sh"):
        assert (tmp_path / "gpu" / name).exists(), name
    done = subprocess.run([tmp_path / "gpu/run.sh", "--help"], capture_output=True, text=True, check=False, env={"PYTHON": sys.executable})
    assert "wheels" in done.stderr  # it asks for them, and for nothing else
    (tmp_path / "gpu/site").mkdir()
    listed = subprocess.run(
        [tmp_path / "gpu/run.sh", "--list", "--cpu", "--only", "times"],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHON": sys.executable, "PATH": "/usr/bin:/bin"},
    )
    assert listed.returncode == 0, listed.stderr
    assert "times/relu2 96" in listed.stdout


@pytest.mark.slow
def test_the_wheels_are_enough_for_python_3_12_without_a_network(tmp_path: Path) -> None:
    """Typer and rich, which only the command lines read, are the machine's own; so is torch, which no Python 3.12 here has."""
    folder = tmp_path / "gpu"
    assert made(folder) < 40
    python = next((found for found in map(shutil.which, PYTHONS) if found and works(found)), None)
    if python is None:
        pytest.skip("no Python 3.12 here")
    options = ["--no-index", "--no-deps", "--no-compile", "--disable-pip-version-check", "--target", str(folder / "site")]
    wheels = sorted(map(str, (folder / "wheels").glob("*.whl")))
    subprocess.run([python, "-m", "pip", "install", "-q", *options, *wheels], check=True)
    code = TRY.format(site=str(folder / "site"), folder=str(folder))
    path = f"{folder}/site:{folder}/src:{folder}/kernels"
    done = subprocess.run([python, "-S", "-c", code], capture_output=True, text=True, check=False, env={"PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 4e9


def works(python: str) -> bool:
    """A name may have no Python behind it, as pyenv's do."""
    return subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0
