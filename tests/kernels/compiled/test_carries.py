"""Every loop of every kernel carries the variables that it changes: Triton's frontend silently drops some that a loop only renames."""

import ast
import importlib
import inspect
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import triton
import triton.language as tl
from compile import source_of
from launches import Lost, first_ir, watched_loops
from triton.runtime.jit import JITFunction

from megakernels._common.hazards import hazards_of

pytestmark = pytest.mark.jobs

FOLDER = Path(__file__).parents[1] / "sm90"
OPERATIONS = sorted(path.stem for path in FOLDER.glob("*.csv"))
GROUPS = 4
HAZARD = "loop values that start as one value"


@triton.jit
def shifted_kernel(x, y, count, LANES: tl.constexpr, OWN: tl.constexpr):
    """Each row of x, two rows later; without OWN, as a kernel must not be written."""
    lane = tl.arange(0, LANES)
    one = tl.zeros([LANES], dtype=tl.float32)
    two = tl.zeros([LANES], dtype=tl.float32) if OWN else one
    for row in tl.range(0, count):
        tl.store(y + row * LANES + lane, two)
        two = one
        one = tl.load(x + row * LANES + lane)


def loops_of(configurations: list[Any]) -> tuple[set[Lost], set[tuple[str, int]]]:
    lost: set[Lost] = set()
    loops: set[tuple[str, int]] = set()
    with watched_loops(lost, loops):
        for function, types, constants, options in configurations:
            first_ir(source_of(function, types, constants), options)
    return lost, loops


def configurations_of(operation: str) -> list[Any]:
    return list(importlib.import_module(operation).CONFIGURATIONS.values())


@cache
def has_loop(function: JITFunction[Any]) -> bool:
    """True if a kernel, or a function that it calls, has a loop that the frontend does not unroll."""
    tree = ast.parse(inspect.getsource(function.fn))
    if any(
        isinstance(each, ast.While) or (isinstance(each, ast.For) and "static_range" not in ast.unparse(each.iter))
        for each in ast.walk(tree)
    ):
        return True
    names = {each.id for each in ast.walk(tree) if isinstance(each, ast.Name)}
    called = (function.fn.__globals__.get(name) for name in names)
    return any(has_loop(each) for each in called if isinstance(each, JITFunction) and each is not function)


def one_of_each(configurations: list[Any]) -> list[Any]:
    """One for each kernel with loops and choice of its branches."""
    found = {(each[0].__name__, *(value for value in each[2].values() if isinstance(value, bool))): each for each in configurations}
    return [each for each in found.values() if has_loop(each[0])]


@pytest.mark.parametrize("group", range(GROUPS))
def test_loops_carry_what_they_change(group: int) -> None:
    lost, loops = loops_of([each for operation in OPERATIONS[group::GROUPS] for each in one_of_each(configurations_of(operation))])
    assert lost == set()
    assert len(loops) > 8


@pytest.mark.slow
@pytest.mark.parametrize("operation", OPERATIONS)
def test_loops_of_all_configurations_carry_what_they_change(operation: str) -> None:
    assert loops_of(configurations_of(operation))[0] == set()


@pytest.mark.parametrize("own", [False, True])
def test_the_check_finds_what_a_loop_drops(own: bool) -> None:
    """In this Triton, if it has the hazard; a version without it belongs into `hazards`."""
    lost, loops = loops_of([(shifted_kernel, {"x": "*fp32", "y": "*fp32"}, {"LANES": 32, "OWN": own}, {})])
    has_it = HAZARD in [each.name for each in hazards_of("triton", triton.__version__)]
    assert {each.name for each in lost} == ({"two"} if has_it and not own else set())
    assert len(loops) == 1
