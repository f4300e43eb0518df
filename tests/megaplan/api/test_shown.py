"""Results as Python shows them, and sources that Python has: mappings, config objects and specs."""

import json
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

import megaplan
from megaplan.advice.faster import Advice, Faster
from megaplan.advice.pricing import Price
from megaplan.cli.main import run
from megaplan.results import Result, cell_text, html_table

CONFIG = {
    "model_type": "qwen3", "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "intermediate_size": 512, "vocab_size": 4096, "rope_theta": 1e6,
}  # fmt: skip
PLAN, SPEC, RL = "plans/tiny-hybrid-pp2.json", "plans/tiny-hybrid-pp2.yaml", "plans/llama-3.1-8b-rl.yaml"
RESULTS = {
    "estimate": (lambda: megaplan.estimate(SPEC), ["estimate", SPEC]),
    "split": (lambda: megaplan.split(SPEC), ["split", SPEC]),
    "plan": (lambda: megaplan.load(PLAN).plan, ["show", PLAN]),
    "diff": (lambda: megaplan.diff(PLAN, "plans/tiny-hybrid.json"), ["diff", PLAN, "plans/tiny-hybrid.json"]),
    "check": (lambda: megaplan.check(PLAN), ["check", PLAN]),
    "search": (
        lambda: megaplan.search(SPEC, devices=1, vary=(), top=2, processes=1, seconds=None),
        ["search", SPEC, "--devices", "1", "--vary", "", "--top", "2", "--processes", "1", "--exhaust"],
    ),
    "schedule": (
        lambda: megaplan.schedule("zbv", pp=2, num_microbatches=4),
        ["schedule", "--kind", "zbv", "--pp", "2", "--microbatches", "4"],
    ),
    "run": (lambda: megaplan.run(SPEC, tokens="1B", price=2), ["run", SPEC, "--tokens", "1B", "--price", "2"]),
    "rl": (lambda: megaplan.rl(RL), ["rl", RL]),
}
"""A result of every kind, and the command that prints it."""
PICTURES = {"estimate", "split", "plan", "search", "schedule"}


class Config:
    """A config object as transformers has them."""

    def to_dict(self) -> dict[str, object]:
        return dict(CONFIG)


@pytest.fixture(scope="module")
def results() -> dict[str, Result]:
    return {name: make() for name, (make, _) in RESULTS.items()}


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_is_a_few_lines_and_a_table(name: str, results: dict[str, Result]) -> None:
    found = results[name]
    lines = repr(found).splitlines()
    assert lines[0].startswith(f"{type(found).__name__}: ")
    assert 2 <= len(lines) <= 6
    assert max(map(len, lines)) < 160
    assert str(found) == repr(found)
    page = ElementTree.fromstring(f"<div>{found._repr_html_()}</div>")
    rows = list(page.iter("tr"))
    assert len({len(row) for row in rows}) <= 1
    assert bool(rows) is bool(found._rows())
    assert "style" not in found._repr_html_()


@pytest.mark.parametrize("name", RESULTS)
def test_the_dictionary_is_what_the_command_prints(name: str, results: dict[str, Result], capsys: pytest.CaptureFixture[str]) -> None:
    run([*RESULTS[name][1], "--json"])
    assert results[name].to_dict() == json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", RESULTS)
def test_a_frame_has_the_rows(name: str, results: dict[str, Result], monkeypatch: pytest.MonkeyPatch) -> None:
    found = results[name]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        found.to_frame()
    stub = ModuleType("pandas")
    stub.DataFrame = list  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pandas", stub)
    rows = found.to_frame()
    assert rows == list(found._rows())
    assert len({tuple(row) for row in rows}) <= 1


@pytest.mark.parametrize("name", RESULTS)
def test_a_picture_is_one_svg(name: str, results: dict[str, Result], tmp_path: Path) -> None:
    if name not in PICTURES:
        with pytest.raises(TypeError, match="has no picture; to_frame"):
            results[name].plot()
        return
    picture = results[name].plot()
    assert ElementTree.fromstring(picture._repr_svg_()).tag.endswith("svg")
    (tmp_path / "step.svg").write_text(picture)
    assert len(repr(picture)) < 100


def test_advice_is_a_result() -> None:
    change = Faster(("batch.micro_batch_size=8",), Price(((0, 4),), 2**30, -(2**20)), 1_500_000_000, 0.25)
    advice = Advice([change])
    assert repr(advice) == "Advice: 1 change for a faster step"
    assert advice._rows()[0]["change_share"] == -0.25
    assert "1.00 GiB" in advice._repr_html_()
    assert advice.to_dict()["advice"][0] | {"set": 0} == {
        "set": 0, "step_seconds": 1.5, "change": -0.25, "peak_bytes": 2**30, "headroom_bytes": 2**20,
    }  # fmt: skip
    assert megaplan.estimate("plans/tiny-hybrid-pp2.yaml", "device.reserve={cuda_context: 150000000000}").faster == Advice()


def test_rows_of_an_estimate_sum_to_its_peaks(results: dict[str, Result]) -> None:
    found = results["estimate"]
    assert isinstance(found, megaplan.Estimate)
    first = found._rows()[0]
    assert first["peak_bytes"] == found.peak_bytes == sum(first[column.key] for column in megaplan.Column)
    assert found.worst.ranks == (0,)
    assert "fits: peak" in repr(found)
    assert "on rank 0" in repr(found)


def test_cells_have_units_and_texts_are_escaped() -> None:
    assert [cell_text(name, value) for name, value in (("a_bytes", 2**30), ("b_seconds", 0.25), ("c_share", 0.405), ("fits", False))] == [
        "1.00 GiB",
        "0.25 s",
        "40.5 %",
        "NO",
    ]
    assert html_table([]) == ""
    assert "<script>" not in html_table([{"name": "<script>", "empty": None}])
    assert "empty" not in html_table([{"name": "a", "empty": None}])
    assert "and 6 more" in html_table([{"number": number} for number in range(30)])
    near = [{"ranks": f"rank {rank}", **{f"column{index}": 1 for index in range(8)}} for rank in (0, 1)]
    assert "<th>rank 0, rank 1</th>" in html_table(near)


def test_a_config_object_a_mapping_a_spec_and_a_size() -> None:
    of_object, of_mapping = megaplan.estimate(Config()), megaplan.estimate(CONFIG)
    assert of_object.parameters == of_mapping.parameters
    assert megaplan.estimate(of_object.job.spec).budget == of_object.budget
    found = megaplan.estimate(Config(), gpus=4, device="H100", global_batch=16, seq_length=1024)
    assert (found.job.spec.mesh.world_size, found.job.spec.device.name) == (4, "h100-sxm")
    assert found.job.spec.global_batch_tokens == 16 * 1024
    assert repr(megaplan.load(SPEC)) == f"LoadedJob(tiny-hybrid-pp2: spec {SPEC}, 2 x h200)"


def test_a_plan_stays_a_plan_and_a_result_is_no_source() -> None:
    plan = megaplan.load(PLAN).plan
    assert plan is not None
    assert megaplan.load(plan).name == "<plan>"
    with pytest.raises(TypeError, match="not Check"):
        megaplan.load(megaplan.check(PLAN))


def test_an_error_shows_its_hints() -> None:
    with pytest.raises(megaplan.MegaplanError) as caught:
        megaplan.estimate("plans/tiny-hybrid.yaml", device__name="h300")
    assert "hint: --set device.name=h200" in str(caught.value)


def test_names_of_the_package_are_the_public_ones() -> None:
    assert [name for name in dir(megaplan) if not name.startswith("__")] == megaplan.__all__
