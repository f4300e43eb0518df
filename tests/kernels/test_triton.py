"""The Triton kernels without a GPU: values in the interpreter, resources from the sm_90 compiler, each in its own process; a lint.

One operation has `interpreted/check_NAME.py`, `sm90/NAME.py` with its configurations and `sm90/NAME.csv` with the committed resources.
"""

import ast
import csv
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megakernels.ops.selective_scan.facts import INSTRUCTIONS

HERE = Path(__file__).parent
SHARED_MEMORY_LIMIT_BYTES = 232_448  # a block on sm_90; the compiler does not check it without a GPU
EVERY = {
    **{"activation": 12, "attention": 56, "causal_conv1d": 8, "gated_conv1d": 5, "gated_delta": 72},
    **{"fp8_experts": 24, "fp8_linear": 4, "head_gated_norm": 8, "indexed_attention": 104},
    **{"m2rnn": 10, "mamba3": 104, "moe": 20, "newton_schulz": 9, "rms_norm": 20, "rope": 12, "selective_scan": 5, "side_embedding": 4},
    **{"ssd": 14},
}
"""Operations whose configurations take long to compile: CI compiles every n-th, the slow set all."""
SPILLS = {
    *(f"attention {kernel} 256/256 bf16, measured" for kernel in ("query", "key, k,", "key, v,")),
    *(f"mamba3 {kernel} 64x128 rank {rank}, 32 angles, bf16, plain, measured" for kernel in ("output", "pair", "value") for rank in (1, 4)),
    "mamba3 output, gradients 64x128 rank 1, 32 angles, bf16, plain, measured",
    *(f"ssd group, of B {sizes}, measured" for sizes in ("64x128 bf16", "64x128 bf16 packed, continued", "128x128 bf16")),
}
"""Options that spill, and were measured to be 6 to 53 % faster on an H200 than the default, which does not."""
OTHER_BLAS = ({"OPENBLAS_CORETYPE": "Haswell", "OPENBLAS_L2_SIZE": "512"}, {"OPENBLAS_CORETYPE": "Nehalem"})
"""OpenBLAS with the products of processors with and without fused multiply-add: one of them is not this machine's own."""
GROUPS = 4
"""Processes that CI's checks share: each imports torch and triton once."""

OPERATIONS = sorted(path.stem for path in (HERE / "sm90").glob("*.py") if path.stem not in ("compile", "issue", "overwritten"))
CHECKS = sorted(path.stem.removeprefix("check_") for path in (HERE / "interpreted").glob("check_*.py"))
LOADERS = ("load_part", "load_rows", "tile_at")
"""Functions that return what they load: their callers widen it."""
CARRIED = ("two_at", "four_at")
"""Functions whose rows a walk carries as stored and widens where it computes: their kernels are compared in bf16."""
MOVES = ("tl.where", "tl.reshape", "tl.trans")
"""Operations that move values and compute nothing."""
NO_ARITHMETIC = (
    *("rstd", "maxima", "scales", "starts", "classes", "labels", "bits"),
    *("words", "rows", "ends", "stops", "tile_ends", "indices", "positions", "step", "rate"),
)
"""Pointers whose values are fp32 or integers whatever the activations are."""

pytest.importorskip("triton")


def run_python(arguments: list[str], cache: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("TRITON_", "PYTEST_"))}
    environment |= {"PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]), "TRITON_CACHE_DIR": str(cache), **variables}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, check=False)


def groups_of(names: list[str]) -> list[list[str]]:
    return [names[first::GROUPS] for first in range(GROUPS)]


def interpret(names: list[str], marks: str, cache: Path, **variables: str) -> None:
    paths = [str(HERE / "interpreted" / f"check_{name}.py") for name in names]
    done = run_python(["-m", "pytest", *paths, "-q", "-p", "no:cacheprovider", "-m", marks], cache, TRITON_INTERPRET="1", **variables)
    assert done.returncode in (0, 5), done.stdout + done.stderr  # 5: nothing has these marks
    assert done.returncode == 0 or marks == "slow"


@pytest.mark.requirement("R-65")
@pytest.mark.parametrize("names", groups_of(CHECKS), ids="-".join)
def test_the_kernels_are_right_in_the_interpreter(names: list[str], tmp_path: Path) -> None:
    interpret(names, "not slow", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_the_kernels_are_right_at_more_sizes(name: str, tmp_path: Path) -> None:
    interpret([name], "slow", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("names", groups_of(CHECKS), ids="-".join)
@pytest.mark.parametrize("blas", OTHER_BLAS, ids=lambda blas: blas["OPENBLAS_CORETYPE"])
def test_the_kernels_are_right_whatever_adds_up_a_product(blas: dict[str, str], names: list[str], tmp_path: Path) -> None:
    """The interpreter multiplies tiles with numpy's BLAS, which adds up in another order on another processor."""
    interpret(names, "not slow", tmp_path, **blas)


@pytest.mark.jobs
@pytest.mark.parametrize("operations", groups_of(OPERATIONS), ids="-".join)
def test_the_kernels_fit_an_sm90(operations: list[str], tmp_path: Path) -> None:
    """They use the registers and memory of the committed table, under the table's version of triton."""
    check_resources({operation: EVERY.get(operation, 1) for operation in operations}, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("operation", EVERY)
def test_all_configurations_fit_an_sm90(operation: str, tmp_path: Path) -> None:
    check_resources({operation: 1}, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("operation", "most"), [("causal_conv1d", (13, 30)), ("gated_conv1d", (13, 35))])
def test_a_convolution_issues_fewer_instructions_than_memory_takes(operation: str, most: tuple[int, int], tmp_path: Path) -> None:
    """Forward moves 4 bytes per element, in the time of 26 instructions; backward 6 bytes, 38 instructions; with gates 8 and 14 bytes."""
    done = run_python([str(HERE / "sm90" / "issue.py"), operation], tmp_path)
    assert done.returncode == 0, done.stderr
    found = [float(line.split()[-3]) for line in done.stdout.splitlines() if line.endswith("an element")]
    assert len(found) == 2
    assert found[0] <= most[0]
    assert found[1] <= most[1]


@pytest.mark.slow
def test_the_cost_of_the_selective_scan_is_what_it_issues(tmp_path: Path) -> None:
    done = run_python([str(HERE / "sm90" / "issue.py"), "selective_scan"], tmp_path)
    assert done.returncode == 0, done.stderr
    found = [float(line.split()[-3]) for line in done.stdout.splitlines() if line.endswith("an element")]
    assert found == pytest.approx(INSTRUCTIONS, rel=0.05)


WIDE = re.compile(r"\.to\(tl\.(float32|u?int\d+(, bitcast=True)?)\)$")
"""Conversions to fp32, and of stored bytes to integers, which are exact."""


def check_resources(every: dict[str, int], cache: Path) -> None:
    """Compile every n-th configuration of each operation."""
    done = run_python([str(HERE / "sm90" / "compile.py"), *(f"{operation}:{step}" for operation, step in every.items())], cache)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.keys() == every.keys()
    for operation, rows in found.items():
        assert rows
        spilled = {row["kernel"] for row in rows if row["stack_bytes"]}
        assert spilled <= SPILLS, operation
        assert [row for row in rows if row["shared_bytes"] > SHARED_MEMORY_LIMIT_BYTES] == [], operation
        with (HERE / "sm90" / f"{operation}.csv").open(encoding="utf-8") as file:
            committed = [row for row in csv.DictReader(file) if row["triton"] == rows[0]["triton"]]
        if committed:
            assert [{key: str(value) for key, value in row.items()} for row in rows] == committed[:: every[operation]], operation


def test_every_operation_with_kernels_is_compiled() -> None:
    assert [path.parent.name for path in kernel_files() if path.name == "kernel.py"] == OPERATIONS


def kernel_files() -> Iterator[Path]:
    root = HERE.parents[1] / "kernels" / "megakernels"
    yield from sorted([*(root / "ops").glob("*/kernel*.py"), *(root / "_common" / name for name in ("tiles.py", "walks.py"))])


def careless(source: str) -> list[str]:
    """Lines of a file that may compute in bf16, which the interpreter silently does wrong.

    A loaded tile is widened where it is loaded, or used only by `dot`; a narrowed one is used only by `dot` or a store.
    Only the shared `dot` multiplies tiles.
    """
    tree = ast.parse(source)
    parents = {child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}
    found = []
    for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
        for call in [node for node in ast.walk(function) if isinstance(node, ast.Call)]:
            name = ast.unparse(call.func)
            if name == "tl.dot" and function.name != "dot":
                found.append(ast.unparse(call))
            loads = name in LOADERS or (name == "tl.load" and function.name not in (*LOADERS, *CARRIED))
            if loads and not widened(call, parents) and not ast.unparse(call.args[0]).startswith(NO_ARITHMETIC):
                found += [] if only_used_in(("dot", "store_tile"), call, function, parents) else [ast.unparse(call)]
            if name == "narrow" and not only_used_in(("dot", "tl.store", *MOVES), call, function, parents):
                found.append(ast.unparse(call))
    return found


def widened(call: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    parent = parents[call]
    if isinstance(parent, ast.Call) and ast.unparse(parent.func) == "widen":
        return True
    return isinstance(parent, ast.Attribute) and WIDE.search(ast.unparse(parents[parent])) is not None


def only_used_in(allowed: tuple[str, ...], value: ast.AST, function: ast.FunctionDef, parents: dict[ast.AST, ast.AST]) -> bool:
    parent = parents[value]
    if isinstance(parent, ast.Call):
        name = ast.unparse(parent.func)
        return name in allowed or (name == "tl.trans" and only_used_in(allowed, parent, function, parents))
    if isinstance(parent, ast.Assign) and isinstance(parent.targets[0], ast.Name):
        target = parent.targets[0].id
        uses = [node for node in ast.walk(function) if isinstance(node, ast.Name) and node.id == target and isinstance(node.ctx, ast.Load)]
        return all(only_used_in(allowed, use, function, parents) or widened(use, parents) for use in uses)
    return False


def test_no_kernel_computes_in_bf16() -> None:
    paths = list(kernel_files())
    if not paths[0].exists():
        pytest.skip("megakernels is tested from an installed wheel")
    assert {str(path): found for path in paths if (found := careless(path.read_text(encoding="utf-8")))} == {}


@pytest.mark.parametrize(
    ("body", "is_careless"),
    [
        ("a = tl.load(x) * 2", True),
        ("a = tl.load(x)\n    b = a + 1", True),
        ("a = tl.dot(b, c)", True),
        ("a = narrow(b, t) * 2", True),
        ("a = tl.load(x).to(tl.float32) * 2", False),
        ("a = tl.load(x)\n    b = dot(a, tl.trans(a)) + a.to(tl.float32)", False),
        ("tl.store(y, narrow(a, t))", False),
        ("a = tl.load(starts + i) + 1", False),
        ("a = widen(tl.load(x)) * 2", False),
        ("a = load_part(x, S=S) * 2", True),
        ("a = tl.load(x).to(tl.uint32) << 8", False),
        ("a = tl.load(x)\n    b = a.to(tl.int8, bitcast=True).to(tl.float32) * c", False),
        ("a = tl.load(x).to(tl.float16) * 2", True),
        ("a = widen(load_part(x, S=S)) * dot(load_part(x, S=S), b)", False),
    ],
)
def test_the_lint_finds_bf16_arithmetic(body: str, is_careless: bool) -> None:
    assert bool(careless(f"def kernel():\n    {body}\n")) == is_careless
