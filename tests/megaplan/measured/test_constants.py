"""Measured constants follow from their measurement, and an operation that changes turns its own into modelled."""

import json
from math import exp, log, sqrt
from pathlib import Path

import pytest

import megaplan
from megakernels.ops.causal_conv1d.facts import CONVOLUTION
from megaplan.api.profiled import measured_constants
from megaplan.cli.main import run
from megaplan.cost import kinds
from megaplan.cost.replay import ReplayTimer
from megaplan.errors import MegaplanError
from megaplan.families.mamba import program
from megaplan.layout import profile
from megaplan.layout.changed import changes_of
from megaplan.layout.profile import text_of
from megaplan.layout.step_time import PlannedTime, planned_time
from megaplan.measured.constants import FOLDER, measured, of_document, profiled

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks/results/h200-2026-11-27b.json"
CHANGED = ROOT / "benchmarks/results/h200-changed-kernels.json"
SPEC = str(ROOT / "benchmarks/gpu/specs/hybrid-1b.yaml")


MAMBA = str(ROOT / "benchmarks/gpu/specs/mamba2-1b.yaml")
REPLAYED = "host.cuda_graphs=microbatch"
SCANS = {"m2rnn.backward", "mamba3"}


def time_of(*changes: str, spec: str = SPEC) -> PlannedTime:
    """The step of the 1.1 B hybrid, or of another spec."""
    job = megaplan.load(spec, *changes)
    found = planned_time(job.spec, job.spans, job.inventory)
    assert isinstance(found, PlannedTime)
    return found


@pytest.fixture
def counted_anew():
    """Clears the caches of counts before a change and after it."""
    kinds.changed_kinds.cache_clear()
    yield
    kinds.changed_kinds.cache_clear()


def test_nothing_has_changed_since_it_was_measured(counted_anew):
    assert kinds.changed_kinds("h200") == SCANS  # its kernels changed and were not measured again
    assert kinds.changed_kinds("h100-sxm") == frozenset()


def test_an_operation_that_counts_something_else_is_modelled(counted_anew, monkeypatch):
    """Half of a pass's bytes is half of its time by the share that was measured; the step says that it is no longer measured."""
    before = time_of(REPLAYED, spec=MAMBA)
    assert (str(before.basis), before.calibration) == ("measured", "h200, bf16, megarun, CUDA graphs, one rank")
    assert time_of(spec=MAMBA).calibration == "h200, bf16, megarun, eager, one rank"
    backward = CONVOLUTION.backward
    monkeypatch.setattr(program, "CONVOLUTION", CONVOLUTION._replace(backward=backward._replace(percent=2 * backward.percent)))
    kinds.changed_kinds.cache_clear()
    assert kinds.changed_kinds("h200") == {"convolution.backward"} | SCANS
    after = time_of(REPLAYED, spec=MAMBA)
    assert (str(after.basis), after.unmeasured) == ("modelled", "convolution.backward changed since measured")
    assert after.seconds > before.seconds
    assert after.high / after.seconds > before.high / before.seconds


def test_a_step_with_kernels_that_were_not_measured_again_is_modelled():
    found = time_of()
    assert (str(found.basis), found.unmeasured) == ("modelled", "m2rnn.backward changed since measured")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("mesh.dp_shard=2", "one rank was measured"),
        ("precision.params=fp16", "bf16, fp8_rowwise were measured"),
        ("device.launch_ns=5000", "the spec gives its own rates"),
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
    percent = measured("h200").percent["memory"]
    job, slower = megaplan.load(SPEC), megaplan.load(SPEC, f"device.efficiency_percent={{memory: {percent // 2}}}")
    timer, other = (ReplayTimer(each.inventory, each.spec) for each in (job, slower))
    for (_, part, before), (_, _, after) in zip(timer.kinds(job.spec), other.kinds(slower.spec), strict=True):
        launch = part.launches * timer.rates(job.spec).launch_ns
        if not part.flops and part.num_bytes > 1 << 20:
            assert after - launch == pytest.approx(percent / (percent // 2) * (before - launch), rel=1e-3)


@pytest.mark.slow
def test_the_committed_file_is_what_its_results_say():
    found = measured_constants(str(ROOT / "benchmarks/gpu/specs"), str(RESULTS), [], str(CHANGED))
    assert text_of(found) == (FOLDER / "h200.json").read_text()


def test_a_kernel_that_became_faster_changes_its_kind_and_no_profiled_step(one_run, tmp_path):
    """Half of the time of one kernel of two of a kind: measured as it runs it stays measured, as an experiment it is modelled."""
    specs, lines = one_run()
    before = measured_constants(specs, lines)
    times = {name: ms for name, _, ms in json.loads(Path(lines).read_text().splitlines()[1])["gpu"]["by_kernel"]}
    ssd = sum(ms for name, ms in times.items() if name.startswith("ssd_"))
    row = {"kernel": "ssd_value_kernel", "runs": ["hybrid-1b"], "us": [200.0, 100.0], "basis": "measured", "source": "a table"}
    (tmp_path / "changed").write_text(json.dumps({"kernels": [row]}))
    after = measured_constants(specs, lines, changed=str(tmp_path / "changed"))
    assert {key: after[key] for key in before} == before
    factor = 1 - times["ssd_value_kernel"] / ssd / 2
    assert after["changed"] == {"ssd": {"factor": round(factor, 4), "basis": "measured", "sources": ["a table"]}}
    then, now = of_document(before), of_document(after)
    assert now.shares["ssd"] == pytest.approx(then.shares["ssd"] / factor, abs=1)
    assert {kind for kind in now.shares if now.shares[kind] != then.shares[kind]} == {"ssd"}
    assert kinds.changed(now) - kinds.changed(then) == set()
    (tmp_path / "changed").write_text(json.dumps({"kernels": [row | {"basis": "modelled"}]}))
    assert kinds.changed(of_document(measured_constants(specs, lines, changed=str(tmp_path / "changed")))) == {"ssd"}
    other = {"run": "another", "gpu": {"by_kernel": [["ssd_value_kernel", 1, 1.0]]}}
    assert changes_of([row], [other]) == {}


@pytest.mark.parametrize("text", ["[]", "{}", '{"kernels": [{"kernel": "a", "runs": ["b"], "us": [1], "basis": "measured"}]}', "no json"])
def test_a_file_of_changed_kernels_that_says_nothing_is_refused(one_run, tmp_path, text):
    (tmp_path / "changed").write_text(text)
    with pytest.raises(MegaplanError, match="has no list of changed kernels"):
        measured_constants(*one_run(), changed=str(tmp_path / "changed"))


def test_profiled_steps_are_compared_with_the_kernels_that_ran():
    then, now = profiled("h200"), measured("h200")
    assert then.changes == {}
    assert now.changes.keys() == SCANS
    assert now.steps_ns["m2rnn.backward"] < then.steps_ns["m2rnn.backward"]
    assert now.shares["mamba3"] > then.shares["mamba3"]
    assert then._replace(shares={}, steps_ns={}) == now._replace(shares={}, steps_ns={}, changes={})


@pytest.fixture
def one_run(tmp_path):
    """The 1.1 B hybrid alone: its results as lines, facts and the run, and the folder of its spec."""
    results = json.loads(RESULTS.read_text())
    (tmp_path / "specs").mkdir()
    (tmp_path / "specs/hybrid-1b.yaml").write_text(Path(SPEC).read_text())

    def write(**changes):
        facts = {key: value for key, value in results.items() if not isinstance(value, (list, dict))} | changes.pop("facts", {})
        run = next(each for each in results["runs"] if each["run"] == "hybrid-1b") | changes
        (tmp_path / "lines").write_text("\n".join(json.dumps(line) for line in (facts, run)))
        return str(tmp_path / "specs"), str(tmp_path / "lines")

    return write


def test_lines_of_a_run_become_constants(one_run, capsys):
    specs, lines = one_run()
    assert run(["calibrate", specs, "--profile", lines, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["about"]["commit"] == "78570145"
    assert set(found["kinds"]) < set(measured("h200").counts)
    assert found["runs"]["hybrid-1b"]["modelled"] == pytest.approx(found["runs"]["hybrid-1b"]["measured"], rel=0.05)
    assert run(["calibrate", specs, "--profile", lines]) == 0
    assert "muon.symmetric" in capsys.readouterr().out


def test_results_that_are_held_out_count_for_the_interval_alone(one_run, tmp_path):
    """A run that took a fifth longer than the sum of its known parts."""
    specs, lines = one_run()
    before = measured_constants(specs, lines)
    other = tmp_path / "other"
    slower = json.loads(Path(lines).read_text().splitlines()[1])
    other.write_text(json.dumps({"date": "2030-01-02", "runs": [slower | {"step_s": 1.2 * slower["step_s"]}]}))
    after = measured_constants(specs, lines, [str(other)])
    assert after["kinds"] == before["kinds"]
    assert after["host"] == before["host"]
    assert after["runs"]["hybrid-1b 2030-01-02"]["measured"] == pytest.approx(1.2 * slower["step_s"], abs=1e-4)
    errors = [log(row["measured"] / row["without it"]) for row in after["runs"].values()]
    assert len(errors) == 2
    assert max(errors) > 0.15
    wide = profile.quantile(2) * sqrt(sum(error**2 for error in errors) / 2)
    assert after["interval"] == pytest.approx([exp(-wide), exp(wide)], abs=1e-4)


@pytest.mark.parametrize(("freedom", "quantile"), [(4, 1.533), (6, 1.440), (12, 1.356), (30, 1.310)])
def test_the_quantile_is_that_of_the_tables(freedom, quantile):
    assert profile.quantile(freedom) == pytest.approx(quantile, abs=0.006)


def test_a_slower_kernel_is_a_smaller_share_of_that_kind_alone(one_run):
    """One operation's time alone is doubled: half of the share, and every other constant of the device stays."""
    before = measured_constants(*one_run())
    kernels_of = next(each for each in json.loads(RESULTS.read_text())["runs"] if each["run"] == "hybrid-1b")["gpu"]
    slower = [[name, count, 2 * ms if name == "outer_kernel" else ms] for name, count, ms in kernels_of["by_kernel"]]
    after = measured_constants(*one_run(gpu=kernels_of | {"by_kernel": slower}))
    assert after["kinds"]["gated_experts.outer"]["share"] == pytest.approx(before["kinds"]["gated_experts.outer"]["share"] / 2, rel=0.01)
    others = {name for name in before["kinds"] if before["kinds"][name] != after["kinds"][name]}
    assert others == {"gated_experts.outer"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"gpu": None}, "no profiled run"), ({"step_s": 0}, "no profiled run"), ({"run": "other"}, "other.yaml")],
)
def test_results_that_say_nothing_are_refused(one_run, changes, words):
    with pytest.raises(MegaplanError, match=words):
        measured_constants(*one_run(**changes))


def test_results_without_their_versions_are_refused(one_run, tmp_path):
    specs, lines = one_run()
    Path(lines).write_text(Path(lines).read_text().replace('"triton"', '"other"'))
    with pytest.raises(MegaplanError, match="does not state triton"):
        measured_constants(specs, lines)
    Path(lines).write_text("no json")
    with pytest.raises(MegaplanError, match="is neither JSON nor JSON lines"):
        measured_constants(specs, lines)


def test_a_file_keeps_every_constant():
    text = (FOLDER / "h200.json").read_text()
    document = json.loads(text)
    assert text_of(document) == text
    found = of_document(document)
    assert found == measured("h200")
    assert {*found.shares, *found.steps_ns} == set(found.counts) == set(document["kinds"])
    assert all(counts != (0, 0, 0) for counts in found.counts.values())
    assert all(0 < share <= 10_000 for share in found.shares.values())
