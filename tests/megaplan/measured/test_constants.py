"""Measured constants follow from their measurement, and an operation that changes turns its own into modelled."""

import json
from pathlib import Path

import pytest

import megaplan
from megaplan.cost import kernels, kinds
from megaplan.cost.replay import ReplayTimer
from megaplan.layout.profile import text_of
from megaplan.layout.step_time import PlannedTime, planned_time
from megaplan.measured.constants import FOLDER, measured, of_document

ROOT = Path(__file__).parents[3]
SPEC = str(ROOT / "benchmarks/gpu/specs/hybrid-1b.yaml")


def time_of(*changes: str) -> PlannedTime:
    """The step of the 1.1 B hybrid."""
    job = megaplan.load(SPEC, *changes)
    found = planned_time(job.spec, job.spans, job.inventory)
    assert isinstance(found, PlannedTime)
    return found


@pytest.fixture
def counted_anew():
    """What was counted is dropped before a change and after it."""
    kinds.changed_kinds.cache_clear()
    yield
    kinds.changed_kinds.cache_clear()


def test_nothing_has_changed_since_it_was_measured(counted_anew):
    assert kinds.changed_kinds("h200") == frozenset()
    assert kinds.changed_kinds("h100-sxm") == frozenset()


def test_an_operation_that_counts_something_else_is_modelled(counted_anew, monkeypatch):
    """Half of a pass's bytes is half of its time by the share that was measured; the step says that it is no longer measured."""
    before = time_of()
    assert (str(before.basis), before.calibration) == ("measured", "h200, bf16, megarun, eager, one rank")
    shares = kernels.SHARES["conv1d"]
    monkeypatch.setitem(kernels.SHARES, "conv1d", (shares[0], shares[1]._replace(percent=2 * shares[1].percent)))
    kinds.changed_kinds.cache_clear()
    assert kinds.changed_kinds("h200") == {"convolution.backward"}
    after = time_of()
    assert (str(after.basis), after.unmeasured) == ("modelled", "convolution.backward changed since measured")
    assert after.seconds > before.seconds
    assert after.high / after.seconds > before.high / before.seconds


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("mesh.dp_shard=2", "one rank was measured"),
        ("precision.params=fp16", "bf16, fp8_rowwise were measured"),
        ("device.launch_ns=5000", "the spec gives rates of its own"),
        ("model.mamba={kind: mamba1, state_dim: 16}", "selective_scan not measured"),
    ],
)
def test_a_step_that_was_not_measured_says_why(change, reason):
    found = time_of(change)
    assert str(found.basis) == "modelled"
    assert (found.calibration, found.unmeasured) == ("uncalibrated", reason)


def test_kernels_alone_have_measured_constants():
    plain, fused = (megaplan.load(SPEC, f"host.kernels={kernels}") for kernels in ("reference", "triton"))
    one = ReplayTimer(plain.inventory, plain.spec)
    assert one.rates(plain.spec).measured is None
    assert one.rates(fused.spec).measured is measured("h200")
    assert not one.kinds(plain.spec)


def test_terms_and_kinds_of_a_step_say_one_time():
    """One rank without a pipeline: kinds and the host make up the step."""
    job = megaplan.load(SPEC)
    timer = ReplayTimer(job.inventory, job.spec)
    terms, total = timer.terms(job.spec, job.spans), timer.step_ns(job.spec, job.spans)
    assert sum(terms.values()) == total
    assert sum(ns for _, _, ns in timer.kinds(job.spec)) + terms["host"] == total


def test_a_percentage_of_the_spec_changes_the_share_that_was_measured():
    job, slower = megaplan.load(SPEC), megaplan.load(SPEC, "device.efficiency_percent={memory: 44}")
    timer, other = (ReplayTimer(each.inventory, each.spec) for each in (job, slower))
    for (_, part, before), (_, _, after) in zip(timer.kinds(job.spec), other.kinds(slower.spec), strict=True):
        launch = part.launches * timer.rates(job.spec).launch_ns
        if not part.flops and part.num_bytes > 1 << 20:
            assert after - launch == pytest.approx(2 * (before - launch), rel=1e-3)


@pytest.fixture(scope="module")
def refitted(tmp_path_factory):
    """The file as the command writes it from the results."""
    from megaplan.api.profiled import measured_constants

    return measured_constants(str(ROOT / "benchmarks/gpu/specs"), str(ROOT / "benchmarks/results/h200-2026-11-26.json"))


@pytest.mark.slow
def test_the_committed_file_is_what_its_results_say(refitted):
    assert text_of(refitted) == (FOLDER / "h200.json").read_text()


def test_a_file_keeps_every_constant():
    text = (FOLDER / "h200.json").read_text()
    document = json.loads(text)
    assert text_of(document) == text
    found = of_document(document)
    assert found == measured("h200")
    assert {*found.shares, *found.steps_ns} == set(found.counts) == set(document["kinds"])
    assert all(counts != (0, 0, 0) for counts in found.counts.values())
    assert all(0 < share < 10_000 for share in found.shares.values())
