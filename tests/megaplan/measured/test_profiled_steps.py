"""Modelled steps and their parts compared with those that were measured on an H200."""

from collections import Counter
from pathlib import Path

import pytest
from gpu.groups import group_of
from gpu.measured.reserved import reserved_rows, reserved_table
from gpu.measured.results import FITTED, OTHERS, document
from gpu.measured.times import HOST, LEAST, rows, step_table, steps, table

from megaplan.api.profiled import label_of
from megaplan.columns import Phase
from megaplan.measured.kernels import FAMILIES, family_of

ROOT = Path(__file__).parents[3]
WITHIN_STEP, WITHIN_PART = 0.1, 0.15


@pytest.fixture(scope="module")
def parts(results):
    return rows(results)


WAITING = {"hybrid-1b", "nemotron-16l"}
"""Eager runs whose host was slower than modelled: they waited 102 and 28 ms of a step, 61 and 98 % more than the model has."""
GRAPHS = "host.cuda_graphs=microbatch"
RUNS = {"llama-16l", "llama-16l-fp8", "mamba2-1b", "hybrid-1b", "hybrid-2b", "nemotron-16l"}
RUNS |= {f"{name} {GRAPHS}" for name in ("nam56r", "mamba2-1b", "nemotron-16l")}
OFF = {"attn bwd dk,dv", HOST}
"""Parts that some runs have beyond the bound: the share of the key kernel is one for all widths and numbers of heads; see `WAITING`."""


def test_each_step_is_within_10_percent_and_in_its_interval(results):
    found = steps(results)
    assert {row.run for row in found} == RUNS
    assert {row.run for row in found if abs(row.modelled / row.measured - 1) > WITHIN_STEP} == WAITING
    assert all(row.low <= row.measured <= row.high for row in found)
    assert len(step_table(found)) == 2 + len(found)


def test_each_part_of_3_percent_of_a_step_is_within_15_percent(parts):
    large = [row for row in parts if row.share > LEAST and row.group != "other"]
    assert {row.group for row in large if abs(row.modelled_ms / row.measured_ms - 1) > WITHIN_PART} == OFF
    assert len(large) > 40


def test_earlier_runs_were_within_8_percent_at_their_operations():
    """The six steps of the first run, and its parts of 3 %, by the model of the time."""
    first = document(OTHERS[0])
    assert {row.run for row in steps(first)} == {"nam56r", "llama-16l", "llama-16l-fp8", "mamba2-1b", "hybrid-1b", "hybrid-2b"}
    assert all(row.modelled == pytest.approx(row.measured, rel=0.08) and row.low <= row.measured <= row.high for row in steps(first))
    large = [row for row in rows(first) if row.share > LEAST and row.group != "other"]
    assert all(abs(row.modelled_ms / row.measured_ms - 1) <= WITHIN_PART for row in large)
    assert len(large) > 40


def test_the_parts_of_a_run_add_up_to_its_step(results, parts):
    for run in results["runs"]:
        if run.get("gpu"):
            own = [row for row in parts if row.run == label_of(run)]
            assert sum(row.measured_ms for row in own) == pytest.approx(1e3 * run["step_s"], rel=1e-3)  # few kernels overlap
            assert [row.group for row in own].count(HOST) == 1
    assert table(parts)


def test_the_page_of_measurements_has_these_tables(results, parts):
    """Remedy: make measured."""
    page = (ROOT / "docs/reference/measured.md").read_text(encoding="utf-8")
    for lines in (table(parts), step_table(steps(results)), *(reserved_table(path).splitlines() for path in (*OTHERS, FITTED))):
        assert "\n".join(lines) in page


def test_reserved_bytes_are_within_6_percent_and_allocated_within_a_thousandth():
    """Reserved bytes of fp8 and of Nemotron's cut are more than the closed form; a replay of their allocations gives them."""
    found = list(reserved_rows(FITTED))
    last = [row for row in found if row.phase is Phase.OPTIMIZER]
    far = {row.run.split()[0] for row in last if abs(row.error) > 0.013}
    assert far == {"llama-16l-fp8", "nemotron-16l"}
    assert max(abs(row.error) for row in last) < 0.06
    assert max(abs(row.estimated_allocated / row.allocated - 1) for row in found) < 1e-3


def test_kernels_are_named_as_the_profiles_group_them(results):
    """The families of kernels are a finer cut of the harness's parts; those that no kind counts are of its rest, or of small parts."""
    uncounted = Counter[str]()
    for run in results["runs"]:
        for name, _, milliseconds in run.get("gpu", {}).get("by_kernel", ()):
            family = family_of(name)
            if family is None:
                uncounted[group_of(name)] += milliseconds / 1e3 / run["step_s"]
            elif family.group != "other":
                assert family.group == group_of(name)
    assert set(uncounted) <= {"other", "memset", "h2d/d2h"}
    assert {kind for family in FAMILIES for kind in family.kinds} >= {"product", "mamba3", "shard copy"}
