"""The functions accept the command line's inputs and return its results."""

import io
import json
from pathlib import Path

import pytest
import yaml

import megaplan
from megaplan.api.load import override_texts
from megaplan.cli.main import run

PLANS = Path(__file__).parents[3] / "plans"
SPEC, PLAN = PLANS / "tiny-hybrid-pp2.yaml", PLANS / "tiny-hybrid-pp2.json"


def values() -> dict:
    return yaml.safe_load(SPEC.read_text())


def refused(call, *arguments, **keywords) -> megaplan.Diagnostic:
    with pytest.raises(megaplan.MegaplanError) as caught:
        call(*arguments, **keywords)
    return caught.value.diagnostics[0]


@pytest.mark.parametrize(
    "source", [SPEC, str(SPEC), values(), PLAN, json.loads(PLAN.read_text())], ids=["path", "text", "dict", "plan", "plan dict"]
)
def test_every_source_gives_the_same_estimate(source):
    expected = megaplan.estimate(SPEC)
    found = megaplan.estimate(source)
    assert found.budget == expected.budget
    assert (found.peak_bytes, found.where, found.columns) == (expected.peak_bytes, expected.where, expected.columns)
    assert megaplan.estimate(megaplan.load(source)).cells == expected.cells


def test_an_estimate_is_what_the_command_prints_as_json(capsys):
    assert run(["estimate", str(PLANS / "mixtral-8x7b.yaml"), "--set", "host={name: megatron}", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    found = megaplan.estimate(PLANS / "mixtral-8x7b.yaml", "host={name: megatron}")
    assert printed["largest_micro_batch"] == found.largest_micro_batch
    assert [rank["peak_bytes"] for rank in printed["ranks"]] == [rank.peak_bytes for rank in found.ranks]
    assert printed["ranks"][0]["device_bytes"] == found.device_bytes(found.worst)
    assert printed["time"]["step_seconds"] == round(found.step_seconds, 6)


def test_the_largest_micro_batch_is_the_largest_that_fits():
    found = megaplan.estimate(PLANS / "llama-3.1-8b.json")  # a spec would be cut again
    largest = found.largest_micro_batch
    assert megaplan.estimate(found.job, batch__micro_batch_size=largest).fits
    assert not megaplan.estimate(found.job, batch__micro_batch_size=largest + 1).fits


@pytest.mark.parametrize(
    ("keywords", "texts"),
    [
        ({"mesh__dp_shard": 2}, ("mesh.dp_shard=2",)),
        ({"host__name": "megatron"}, ("host.name=megatron",)),
        ({"name": "null"}, ('name="null"',)),
        ({"optimizer__matrix__weight_decay": 1e-05}, ("optimizer.matrix.weight_decay=1e-05",)),
        ({"sharding__reshard_after_forward": False}, ("sharding.reshard_after_forward=false",)),
        ({"split__spans": [[0, 4], (4, 9)]}, ("split.spans=[[0, 4], [4, 9]]",)),
        ({"serving": None}, ("serving=null",)),
    ],
)
def test_keywords_are_the_texts_of_set(keywords, texts):
    assert override_texts(keywords) == texts


def test_a_later_change_of_a_key_replaces_the_earlier_one():
    job = megaplan.load(SPEC, "batch.micro_batch_size=2", mesh__dp_shard=2)
    again = megaplan.load(job, batch__micro_batch_size=1)
    assert (again.spec.batch.micro_batch_size, again.spec.mesh.dp_shard) == (1, 2)
    assert again.changes == ("mesh.dp_shard=2", "batch.micro_batch_size=1")
    assert megaplan.load(job) is job


def test_a_plan_keeps_its_cuts_under_changes():
    plan = megaplan.load(PLAN).plan
    varied = megaplan.load(plan, mesh__dp_shard=2)
    assert (varied.spans, varied.spec.mesh.dp_shard) == (plan.spans, 2)
    assert varied.cuts is None


def test_a_split_is_the_plan_that_the_command_writes(tmp_path, capsys):
    target = tmp_path / "plan.json"
    assert run(["split", str(SPEC), "--mode", "equal", "-o", str(target)]) == 0
    capsys.readouterr()
    found = megaplan.split(SPEC, mode="equal")
    assert found.text == target.read_text()
    found.write(tmp_path / "same.json")
    assert megaplan.diff(found.plan, tmp_path / "same.json").same
    assert megaplan.check(found.plan).passes(strict=True)
    assert megaplan.split(values(), mode="equal", baseline=found.plan).plan.spans == found.plan.spans


def test_a_hugging_face_config_is_a_source_too():
    config = {"model_type": "recurrent_gemma"}
    assert refused(megaplan.load, config).location.file == "<dict>"
    path = Path(__file__).parents[2] / "support" / "doc_files" / "config.json"
    found = megaplan.split(path, mesh__pp=2, schedule__num_microbatches=2)
    assert found.plan.spec.model.pattern == "AD"
    assert megaplan.load(json.loads(path.read_text())).spec.model == found.plan.spec.model


def test_no_split_is_an_error_of_its_own():
    with pytest.raises(megaplan.InfeasibleError) as caught:
        megaplan.split(SPEC, split__forbid=list(range(1, 9)))
    assert {found.code for found in caught.value.diagnostics} <= {"MP330", "MP501"}


def test_what_is_wrong_is_said_with_its_place():
    wrong = {**values(), "mesh": {"tp": "x"}}
    assert refused(megaplan.load, wrong).location == megaplan.Location("<dict>", key="mesh.tp")
    assert refused(megaplan.load, SPEC, mesh__bogus=1).code == "MP141"
    assert refused(megaplan.split, PLAN).code == "MP115"
    assert refused(megaplan.split, megaplan.load(PLAN)).code == "MP115"
    assert refused(megaplan.load, PLAN, costs="costs.json").code == "MP481"
    assert refused(megaplan.schedule, "bogus", pp=2, num_microbatches=2).code == "MP310"
    assert refused(megaplan.diff, {"format": "other"}, PLAN).location.file == "<dict>"


def test_what_is_no_source_is_a_type_error():
    for call in (megaplan.load, megaplan.estimate, megaplan.split, megaplan.check):
        with pytest.raises(TypeError, match="not int"):
            call(5)
    with pytest.raises(TypeError, match="object"):
        megaplan.load(SPEC, name=object())


@pytest.mark.parametrize("wrong", [{"pp": 0}, {"num_microbatches": 0}, {"vpp": 0}, {"forward": -1}, {"p2p": -1}, {"hidden": 101}], ids=str)
def test_a_schedule_of_impossible_numbers_is_a_value_error(wrong):
    with pytest.raises(ValueError, match="="):
        megaplan.schedule("gpipe", **{"pp": 2, "num_microbatches": 2, **wrong})


@pytest.mark.requirement("R-21")
def test_a_split_minimises_the_step_unless_it_is_told_otherwise(capsys, monkeypatch):
    """The plan records it; a spec with a stated objective, without a pipeline, or for another host keeps its own."""
    open_values = values() | {"split": {"mode": "weighted"}}
    found = megaplan.split(open_values, "schedule.num_microbatches=8")
    assert (found.cuts.objective, found.plan.spec.split.objective) == ("step_time", "step_time")
    assert found.job.changes == ("schedule.num_microbatches=8",)
    stated = megaplan.split(open_values, "schedule.num_microbatches=8", "split.objective=step_time")
    assert (found.plan.digests, found.plan.spans) == (stated.plan.digests, stated.plan.spans)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(yaml.safe_dump(open_values).encode())))
    assert run(["split", "-", "--set", "schedule.num_microbatches=8", "-o", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["digests"] == json.loads(found.text)["digests"]
    assert megaplan.split(open_values, objective="bottleneck").cuts.objective == "bottleneck"
    assert megaplan.split(open_values | {"split": {"objective": "bottleneck"}}).cuts.objective == "bottleneck"
    assert megaplan.split(open_values, "mesh.pp=1").cuts.objective == "bottleneck"
    assert megaplan.split(open_values, mode="equal").cuts.objective is None
    other = megaplan.split(PLANS / "llama-3.1-8b.yaml", "host={name: megatron}", "split={mode: weighted}")
    assert other.cuts.objective == "bottleneck"
