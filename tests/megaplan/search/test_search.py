"""Results of `megaplan.search`: rows whose plans have the rows' numbers, whatever the number of processes, and one clear error."""

import json
from dataclasses import replace
from time import monotonic

import pytest

import megaplan
from megaplan.budget.evaluation import BlockMemo
from megaplan.budget.peaks import StagePeaks, build_budget
from megaplan.cli.search_text import search_lines
from megaplan.cost.rates import rates_of
from megaplan.cost.replay import ReplayTimer
from megaplan.exploration.engine import SearchTask, explore
from megaplan.exploration.floors import Floors
from megaplan.exploration.gap import loose_terms
from megaplan.exploration.robustness import robustness
from megaplan.exploration.space import Space
from megaplan.exploration.values import Outcome
from megaplan.inventory.build import build_inventory
from megaplan.layout.build import build_layout
from megaplan.partition.choose import choose_cuts
from megaplan.plan.read import read_plan
from megaplan.spec.load import load_spec

TINY = "plans/tiny-hybrid-pp2.yaml"


@pytest.fixture(scope="module")
def found():
    return megaplan.search(TINY, devices=4, top=4, vary=["schedule"], processes=1, seconds=None)


def test_a_rows_plan_is_estimated_as_the_row_says(found, tmp_path):
    for row, path in zip(found.rows, found.write(tmp_path), strict=True):
        estimated = megaplan.estimate(path)
        assert (estimated.peak_bytes, estimated.headroom_bytes) == (row.peak_bytes, row.headroom_bytes)
        assert tuple(estimated.job.spans) == row.exact.spans
        again = megaplan.estimate(found.job, *row.changes, *_cuts(row))
        assert again.budget == estimated.budget
        assert megaplan.check(read_plan(path)).passes(strict=True)


def _cuts(row):
    if len(row.exact.spans) == 1:
        return ()
    spans = json.dumps([list(span) for span in row.exact.spans])
    return ("split.mode=manual", f"split.spans={spans}", "split.reason=from a search")


def test_rows_are_sorted_and_within_the_bound(found):
    steps = [row.step_seconds for row in found.rows]
    assert steps == sorted(steps)
    assert found.complete
    assert 0 < found.bound_seconds <= steps[0]
    assert found.rows[0].pareto
    assert all(row.spec.global_batch_size == found.job.spec.global_batch_size for row in found.rows)
    assert all(row.spec.mesh.world_size == 4 for row in found.rows)


def test_a_large_gap_has_the_loose_bounds(found):
    assert found.gap is not None
    assert (found.gap_reason is None) == (found.gap <= 0.03)
    last = found._explored.rows[-1]
    outcomes = {
        last.layout: replace(found._explored.outcomes[last.layout], bound_ns=last.step_ns // 2),
        None: Outcome(last.layout, None, 1, 0, last.step_ns // 4, proven=False, over_bytes=3 << 30),
    }
    far = replace(found._explored, outcomes=outcomes)
    assert loose_terms(far).startswith("memory: 1 layout with a smaller bound")
    assert ", over by 3.00 GiB; without them the gap is 100.0 %; time: 1 layout" in loose_terms(far)


def test_every_value_that_lost_has_a_reason(found):
    names = {one.name for one in found.why_not}
    own = found.rows[0].exact.layout
    assert {f"mesh.tp={tp}" for tp in (1, 2) if tp != own.tp} <= names
    assert all(one.reason in ("illegal", "out of memory", "slower") and one.detail for one in found.why_not)
    assert any(one.reason == "illegal" and one.detail.startswith("MP") for one in found.why_not)


def test_the_result_does_not_depend_on_the_number_of_processes(monkeypatch):
    monkeypatch.setattr("megaplan.exploration.engine.ALONE", 0)
    space = Space(load_spec(TINY).spec, 4, {}, ("schedule",))
    one, two = (explore(SearchTask(space, "time", 0, 5), processes) for processes in (1, 2))
    assert one.rows == two.rows
    assert one.bounds == two.bounds
    assert one.outcomes == two.outcomes


@pytest.mark.parametrize(("count", "said"), [(2, "--set schedule.num_microbatches=4"), (4, "")])
def test_a_batch_without_a_sequence_for_every_device_is_noted(count, said):
    """The note disappears with the number of microbatches that it states."""
    found = megaplan.search(
        TINY, f"schedule.num_microbatches={count}", "batch.micro_batch_size=1", devices=4, vary=[], processes=1, seconds=None
    )
    text = " ".join(line.strip() for line, _ in search_lines(found, ()))
    assert ("the search keeps the global batch of 2 sequences, so at most 2 of 4 devices are data ranks" in text) == bool(said)
    assert said in text


def test_headroom_is_kept_and_can_be_the_objective():
    by_time = megaplan.search(TINY, devices=2, vary=["recompute"], processes=1, seconds=None)
    most = megaplan.search(TINY, devices=2, vary=["recompute"], objective="headroom", processes=1, seconds=None)
    assert most.rows[0].headroom_bytes >= max(row.headroom_bytes for row in by_time.rows)
    assert {one.reason for one in most.why_not} - {"illegal"} == {"less headroom"}
    asked = by_time.rows[0].headroom_bytes + 1
    more = megaplan.search(TINY, devices=2, vary=["recompute"], headroom_bytes=asked, processes=1, seconds=None)
    assert all(row.headroom_bytes >= asked for row in more.rows)


def test_what_is_fixed_stays():
    found = megaplan.search(TINY, devices=4, fix=["mesh.tp=2", "recompute.blocks.A=full"], processes=1, seconds=None, vary=["recompute"])
    assert {(row.spec.mesh.tp, row.spec.recompute.of("A")) for row in found.rows} == {(2, "full")}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"fix": ["model.hidden_size=64"]}, "model.hidden_size"),
        ({"fix": ["mesh.tp"]}, "KEY=VALUE"),
        ({"vary": ["depth"]}, "depth"),
        ({"objective": "cost"}, "cost"),
        ({"devices": 0}, "--devices 0"),
    ],
)
def test_a_wrong_question_has_one_clear_error(options, named):
    with pytest.raises(megaplan.MegaplanError) as caught:
        megaplan.search(TINY, **options)
    assert [item.code for item in caught.value.diagnostics] == ["MP489"]
    assert named in caught.value.diagnostics[0].detail


def test_an_interrupt_leaves_the_best_so_far(monkeypatch):
    space = Space(load_spec(TINY).spec, 2, {}, ("batch",))

    def interrupt(progress):
        raise KeyboardInterrupt

    found = explore(SearchTask(space, "time", 0, 3), 1, interrupt)
    assert not found.complete
    assert found.rows


def test_blocks_that_are_kept_change_no_byte():
    """Plans of other meshes, micro-batches, schedules and policies from one memo, and alone."""
    memo, base = BlockMemo(), "plans/nam56r-8xh200.yaml"
    for texts in (
        (),
        ("mesh.dp_shard=2", "mesh.tp=2"),
        ("mesh.dp_shard=2", "mesh.dp_replicate=2"),
        ("mesh.ep=4",),
        ("mesh.cp=2", "mesh.dp_shard=2"),
        ("schedule.kind=zbv",),
        ("recompute.default=selective", "sharding.reshard_after_forward=true"),
        ("batch.micro_batch_size=1", "host.kernels=triton"),
    ):
        spec = load_spec(base, texts).spec
        inventory = build_inventory(spec) if not texts else inventory  # noqa: F821 (one inventory, as a search has it)
        layout = build_layout(spec, inventory, ((0, 13), (13, 26), (26, 39), (39, 52)))
        peaks = StagePeaks(spec, inventory, memo).of(layout, range(2))
        assert max(peaks) == build_budget(spec, inventory, layout).worst.peak_bytes


def test_the_floor_of_memory_grows_with_the_micro_batch_and_is_never_above_the_peak():
    """The floor without a pipeline is what is stored and kept; with one, that of the rank that is forced to hold the most."""
    for changes in ((), ("mesh.pp=2",), ("mesh.pp=2", "schedule.kind=gpipe")):
        floors, last = [], 0
        for size in (1, 2, 4):
            spec = load_spec("plans/tiny-hybrid.yaml", (*changes, "schedule.num_microbatches=4", f"batch.micro_batch_size={size}")).spec
            inventory = build_inventory(spec)
            floors.append(Floors(inventory).peak_bytes(spec))
            cuts = choose_cuts(spec, inventory)
            assert floors[-1] <= build_budget(spec, inventory, build_layout(spec, inventory, cuts.spans)).worst.peak_bytes
            assert floors[-1] > last
            last = floors[-1]


def test_the_first_row_is_timed_again_with_every_efficiency_changed(found):
    robust = found.robustness
    names = [case.name for case in robust.cases]
    assert {"memory -10 %", "memory +10 %", "network -10 %", "launch +10 %", "A -10 %"} <= set(names)
    assert len(names) == len(set(names))
    assert robust.num_kept == sum(case.best == 0 for case in robust.cases)
    assert all(case.loss >= 0 and (case.loss == 0 or case.best > 0) for case in robust.cases)
    percent = rates_of(found.rows[0].spec).percent["memory"]
    variants = dict(found._evaluator.side(found.rows[0].spec).clock.variants([row.spec for row in found.rows]))
    for row in found.rows:
        slower = megaplan.estimate(found.job, *row.changes, *_cuts(row), f"device.efficiency_percent={{memory: {round(0.9 * percent)}}}")
        assert round(slower.step_seconds * 1e9) == variants["memory -10 %"](row.spec, row.exact.spans)


def test_changes_for_which_no_time_is_left_are_counted(found):
    left = robustness([row.exact for row in found.rows], found._evaluator, monotonic())
    assert (left.cases, left.num_untimed) == ((), len(found.robustness.cases))


@pytest.mark.parametrize("changes", [("precision.grads=bf16", "precision.reduce=bf16"), ("mesh.dp_shard=8", "device.per_node=4")])
def test_a_timer_of_one_spec_times_another_as_its_own_does(changes):
    """Values that are kept between specs: accumulated gradients of another dtype, and groups that leave a node."""
    first, second = (megaplan.load(TINY, "mesh.tp=2", "device.per_node=4", *each) for each in ((), changes))
    timer, own = ReplayTimer(first.inventory, first.spec), ReplayTimer(second.inventory, second.spec)
    before = timer.step_ns(first.spec, first.spans)
    assert timer.step_ns(second.spec, second.spans) == own.step_ns(second.spec, second.spans)
    assert timer.step_ns(first.spec, first.spans) == before


def test_the_committed_plan_of_nam56r_is_beaten():
    """Layouts without a pipeline beat it already, and a search of all layouts covers them."""
    committed = megaplan.estimate("plans/nam56r-8xh200.json")
    found = megaplan.search(
        "plans/nam56r-8xh200.yaml", devices=8, fix={"mesh.pp": 1, "mesh.tp": 1, "mesh.cp": 1, "mesh.ep": 1}, processes=1, seconds=None
    )
    assert found.best is not None
    assert found.best.step_seconds < committed.step_seconds


@pytest.mark.slow
def test_the_winner_for_nam56r_beats_the_committed_plan_as_estimate_says_it():
    found = megaplan.search("plans/nam56r-8xh200.yaml", devices=8, processes=1, seconds=None)
    after = megaplan.estimate("plans/nam56r-8xh200.yaml", *found.best.changes)
    assert after.fits
    assert after.step_seconds < megaplan.estimate("plans/nam56r-8xh200.json").step_seconds
    assert found.gap <= 0.03 or found.gap_reason
