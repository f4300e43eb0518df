"""The recipe of a new kernel: a toy operation, its folder and one line of `megakernels.api`, passes the checks of every operation.

A copy of megakernels gets the folder, and the toy's check file runs with it in Triton's interpreter, in its own process.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import megakernels

HERE = Path(__file__).parent
PACKAGE = Path(megakernels.__file__).parent
API = "from megakernels.ops.activation.op import geglu, gelu, relu2, relu2glu, swiglu, xielu\n"

pytest.importorskip("triton")


@pytest.mark.jobs
def test_a_toy_operation_is_a_folder_and_a_line(tmp_path: Path) -> None:
    copy = tmp_path / "megakernels"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(HERE / "toy", copy / "ops/toy", ignore=shutil.ignore_patterns("__pycache__", "check_*"))
    text = (copy / "api.py").read_text(encoding="utf-8")
    assert text.count(API) == 1
    (copy / "api.py").write_text(text.replace(API, API + "from megakernels.ops.toy.op import toy_square\n"), encoding="utf-8")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("TRITON_", "PYTEST_"))}
    environment |= {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]), "TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "pytest", str(HERE / "toy/check_toy.py"), "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    facts = "import sys, megakernels.ops.toy.facts as facts; assert facts.SQUARE_TILE == 128 and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", facts], env=environment, check=True)
