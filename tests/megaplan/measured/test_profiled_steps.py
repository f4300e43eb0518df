"""Modelled steps and their parts beside those that were measured on an H200."""

from collections import Counter
from pathlib import Path

import pytest
from gpu.groups import group_of
from gpu.measured.reserved import reserved_rows, reserved_table
from gpu.measured.results import LATER, document
from gpu.measured.times import HOST, LEAST, rows, step_table, steps, table

from megaplan.columns import Phase
from megaplan.measured.kernels import FAMILIES, family_of

ROOT = Path(__file__).parents[3]
WITHIN_STEP, WITHIN_PART = 0.08, 0.15


@pytest.fixture(scope="module")
def parts(results):
    return rows(results)


def test_each_step_is_within_8_percent_and_in_its_interval(results):
    found = steps(results)
    assert {row.run for row in found} == {"nam56r", "llama-16l", "llama-16l-fp8", "mamba2-1b", "hybrid-1b", "hybrid-2b"}
    for row in found:
        assert row.modelled == pytest.approx(row.measured, rel=WITHIN_STEP), row.run
        assert row.low <= row.measured <= row.high, row.run
    assert [row.run for row in found if not row.profiled] == ["hybrid-2b"]
    assert len(step_table(found)) == 2 + len(found)


def test_a_run_without_which_the_constants_are_found_is_within_8_percent(results):
    for row in steps(results):
        assert row.without == pytest.approx(row.measured, rel=WITHIN_STEP), row.run


def test_each_part_of_3_percent_of_a_step_is_within_15_percent(parts):
    large = [row for row in parts if row.share > LEAST and row.group != "other"]
    off = {(row.run, row.group) for row in large if abs(row.modelled_ms / row.measured_ms - 1) > WITHIN_PART}
    assert off == set()
    assert len(large) > 40


def test_the_parts_of_a_run_add_up_to_its_step(results, parts):
    for run in results["runs"]:
        if run.get("gpu"):
            own = [row for row in parts if row.run == run["run"]]
            assert sum(row.measured_ms for row in own) == pytest.approx(1e3 * run["step_s"], rel=1e-9)
            assert [row.group for row in own].count(HOST) == 1
    assert table(parts)


def test_the_page_of_measurements_has_these_tables(results, parts):
    """Remedy: make measured."""
    page = (ROOT / "docs/reference/measured.md").read_text(encoding="utf-8")
    for lines in (table(parts), step_table(steps(results)), reserved_table().splitlines()):
        assert "\n".join(lines) in page


def test_the_second_run_is_predicted_but_for_one():
    """Nemotron's cut waits for its host five times as long as modelled: not understood yet."""
    later = document(LATER[0])
    found = steps(later)
    assert {row.run for row in found if not row.low <= row.measured <= row.high} == {"nemotron-16l"}
    assert len(found) == 6
    page = (ROOT / "docs/reference/measured.md").read_text(encoding="utf-8")
    assert reserved_table(LATER[0]).strip() in page


def test_reserved_bytes_of_todays_runtime_are_within_5_percent():
    found = list(reserved_rows(LATER[0]))
    assert len({row.run for row in found}) == 13
    last = [row for row in found if row.phase is Phase.OPTIMIZER]
    assert max(abs(row.error) for row in last) < 0.042
    assert sum(abs(row.error) < 0.013 for row in last) == 11
    assert max(abs(row.estimated_allocated / row.allocated - 1) for row in found) < 9e-4


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
