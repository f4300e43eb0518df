"""The subset of the accuracy matrix that every change is held to: each distinct rank, traced at its real size."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from megarun.trace.run import choose_ranks, trace_ranks

pytestmark = pytest.mark.runtime
FOLDER = Path(__file__).parents[3] / "benchmarks" / "accuracy"
GIB = 2**30
AXES = ("pp", "dp_shard", "tp", "ep", "cp")


def load_module(name: str) -> Any:
    """A module in the folder of the matrix."""
    loader = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert loader is not None
    assert loader.loader is not None
    module = importlib.util.module_from_spec(loader)
    sys.modules[loader.name] = module  # its dataclasses look themselves up there
    loader.loader.exec_module(module)
    return module


MATRIX = load_module("matrix")
IN_CI = MATRIX.names(ci_only=True)


def test_matrix_covers_what_it_must() -> None:
    """At least 30 plans; the subset has every axis that megarun trains and both sets of kernels, in small plans."""
    assert len(MATRIX.names()) >= 30
    assert len(IN_CI) >= 6
    specs = [case.job.spec for case in MATRIX.cases(frozenset(IN_CI))]
    assert {axis for spec in specs for axis in AXES if getattr(spec.mesh, axis) > 1} == set(AXES)
    assert {spec.host.kernels for spec in specs} == {"reference", "triton"}


def test_plans_are_of_a_real_size() -> None:
    """A worst rank above 2 GiB, except for what random plans found: such a spec is as small as its failure lets it be."""
    small = [case.name for case in MATRIX.cases() if case.budget.worst.peak_bytes < 2 * GIB]
    assert small
    assert set(small) <= set(MATRIX.found())


def test_the_committed_table_has_every_plan_at_today_s_estimate() -> None:
    """A change of an estimate is traced where it is made: `make accuracy STALE=1`."""
    recorded = load_module("recorded")
    table = recorded.read(FOLDER.parent / "results" / "accuracy.csv")
    assert recorded.stale(list(MATRIX.cases()), table) == []
    assert set(table) == set(MATRIX.names())


def test_a_plan_is_stale_once_its_estimate_is_another() -> None:
    """`make accuracy STALE=1` traces what the committed table does not have at the estimate of today, and only that."""
    recorded = load_module("recorded")
    table = recorded.read(FOLDER.parent / "results" / "accuracy.csv")
    chosen = list(MATRIX.cases(frozenset(["attention"])))
    assert recorded.stale(chosen, table) == []
    cell, (estimate, trace) = next(iter(table["attention"][0].items()))
    table["attention"][0][cell] = estimate + 1, trace
    assert recorded.stale(chosen, table) == ["attention"]
    assert recorded.stale(chosen, {}) == ["attention"]


@pytest.mark.parametrize("name", IN_CI)
def test_estimate_is_what_the_runtime_allocates(name: str) -> None:
    """Peak and phases within 0.1%, columns within 1% of themselves or 0.2% of the peak."""
    (case,) = MATRIX.cases(frozenset([name]))
    ranks = choose_ranks(case.job, case.budget)
    for found in trace_ranks(case.job, case.budget, ranks):
        assert found.peak.trace > 0
        assert found.within, (found.trace.rank, found.phases, found.columns_past_tolerance)
