"""The Triton kernels without a GPU: values in the interpreter, resources from the sm_90 compiler. Each in a process of its own."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
SHARED_MEMORY_LIMIT_BYTES = 232_448  # a block on sm_90; the compiler does not check it without a GPU
WORST_RATIO = {"torch.float32": 1e-5, "torch.bfloat16": 8e-3}  # the interpreter truncates bf16 stores instead of rounding

pytest.importorskip("triton")


def run_script(name: str, cache: Path) -> Any:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]), "TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run([sys.executable, HERE / name], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_script("triton_interpreted.py", tmp_path_factory.mktemp("triton"))


@pytest.mark.requirement("R-65")
def test_the_norm_kernels_match_the_fp64_reference(interpreted: Any) -> None:
    worst = interpreted["worst"]
    assert len(worst) == 8
    assert {key: ratio for key, ratio in worst.items() if key.split()[1] != "rstd" and ratio > WORST_RATIO[key.split()[0]]} == {}
    assert max(worst[f"{dtype} rstd"] for dtype in WORST_RATIO) < WORST_RATIO["torch.float32"]  # fp32 whatever the input


def test_the_order_of_programs_does_not_matter(interpreted: Any) -> None:
    assert interpreted["repeats"]


def test_the_backward_kernel_computes_only_wanted_gradients(interpreted: Any) -> None:
    assert interpreted["wanted"]


def test_rows_beyond_32_bit_offsets_are_addressed(interpreted: Any) -> None:
    assert interpreted["far_rows"] < WORST_RATIO["torch.bfloat16"]


def test_the_norm_kernels_fit_an_sm90(tmp_path: Path) -> None:
    report = run_script("triton_sm90.py", tmp_path)
    assert len(report) == 18
    assert {
        name: found for name, found in report.items() if found["stack_bytes"] or found["shared_bytes"] > SHARED_MEMORY_LIMIT_BYTES
    } == {}


def test_every_load_is_widened_before_arithmetic() -> None:
    """bf16 arithmetic is silently wrong in the interpreter, so a tile is converted where it is loaded; rstd is fp32 already."""
    kernels = sorted((Path(__file__).parents[2] / "kernels" / "megakernels").glob("*/kernel.py"))
    if not kernels:
        pytest.skip("megakernels is tested from an installed wheel")
    for path in kernels:
        calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
        loads = [call for call in calls if ast.unparse(call.func) == "tl.load"]
        conversions = [call for call in calls if isinstance(call.func, ast.Attribute) and ast.unparse(call).endswith(".to(tl.float32)")]
        widened = {id(call.func.value) for call in conversions if isinstance(call.func, ast.Attribute)}
        assert loads
        assert [text for load in loads if id(load) not in widened and not (text := ast.unparse(load)).startswith("tl.load(rstd")] == []
