"""The report page without a browser: its numbers are those of `estimate --json`, it loads nothing, and foreign text stays text."""

import json
import re
from dataclasses import asdict
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import megaplan
from megaplan import estimate, load
from megaplan.api.estimate_json import estimate_document
from megaplan.cli.main import run
from megaplan.columns import Column, Phase
from megaplan.errors import MegaplanError
from megaplan.report import document as report_data
from megaplan.report import timeline
from megaplan.report.document import report_document
from megaplan.report.page import MAX_BYTES, SCRIPTS, escaped_json, report_html

ROOT = Path(__file__).parents[3]
PLANS = ["plans/nam56r-8xh200.json", "plans/llama-3.1-8b.yaml", "plans/tiny-hybrid.yaml"]
MEGATRON = ("host.name=megatron", "host.kernels=null")


class Page(HTMLParser):
    """Elements with their attributes, and the text of each script."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        if self.elements and self.elements[-1][0] == "script":
            self.scripts[-1] += data

    @property
    def data(self):
        return json.loads(self.scripts[0])


def page_of(source: str, *changes: str) -> tuple[str, dict]:
    found = estimate(str(ROOT / source), *changes)
    document = estimate_document(found, found.ranks)
    return report_html(report_document(found, document)), json.loads(json.dumps(document))


def expanded(data: dict) -> dict:
    """The estimate of a page with the sums and ranks of `estimate --json`."""
    ranks = []
    for rank in data["estimate"]["ranks"]:
        rows = [dict(zip((f"{name}_bytes" for name in data["columns"]), row, strict=True)) for row in rank["cells"]]
        cells = dict(zip(data["phases"], rows, strict=True))
        kept = {key: value for key, value in rank.items() if key not in ("label", "moments")}
        ranks.append(
            {
                **kept,
                "ranks": [rank for start, stop in rank["ranks"] for rank in range(start, stop)],
                "cells": cells,
                "columns": cells[rank["peak_phase"]],
                "phases": {phase: sum(row.values()) for phase, row in cells.items()},
            }
        )
    return {**data["estimate"], "ranks": ranks}


@pytest.mark.parametrize("source", PLANS)
def test_the_numbers_are_those_of_estimate_json(source):
    text, document = page_of(source)
    assert expanded(Page(text).data) == document


@pytest.mark.parametrize("source", PLANS)
def test_the_page_is_small_and_loads_nothing(source):
    text, _ = page_of(source)
    assert len(text.encode()) < MAX_BYTES
    page = Page(text)
    loaded = [
        (tag, name) for tag, attributes in page.elements for name in attributes if name in ("src", "srcset", "data", "action", "background")
    ]
    assert loaded == []
    assert {attributes["href"] for tag, attributes in page.elements if "href" in attributes} == {"#content"}
    own = re.sub(r'"(?:source|formula)":"[^"]*"', "", text)  # citations are text
    known = {"https://github.com/leeoniya/uPlot", "http://www.w3.org/2000/svg"}  # uPlot's licence, and a namespace, which nothing loads
    assert set(re.findall(r"\w+://[^\s\"']*", own)) == known
    assert not re.search(r"url\(|@import", text)


def test_the_policy_allows_the_pages_own_script_and_style_alone():
    text, _ = page_of("plans/tiny-hybrid.yaml")
    (policy,) = [attributes["content"] for tag, attributes in Page(text).elements if attributes.get("http-equiv")]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy


def test_the_timeline_is_the_replayed_step():
    job = load(str(ROOT / "plans/nam56r-8xh200.json"))
    found = estimate(job)
    packed = timeline.step_document(job, found.budget)
    step = timeline.planned_step(job.spec, job.inventory, job.spans)
    for rank, timed in zip(packed["ranks"], step.ranks, strict=True):
        flat, now, shown = iter(rank["actions"]), 0, []
        for shape in flat:
            parts, length = packed["shapes"][shape]
            start = now + next(flat)
            now = start + length
            shown += [(kind, slot, next(flat), start, now) for kind, slot in parts]
        expected = [(str(part.kind), part.slot, part.microbatch, item.start, item.stop) for item in timed for part in item.action.parts]
        assert shown == expected


@pytest.mark.parametrize("kind", ["1f1b", "zbv", "dualpipev"])
def test_memory_over_time_reaches_the_peak_of_forward_and_backward(kind):
    vpp = 1 if kind == "1f1b" else 2
    job = load(str(ROOT / "plans/tiny-hybrid-pp2.yaml"), f"schedule.kind={kind}", f"mesh.vpp={vpp}", "schedule.num_microbatches=6")
    found = estimate(job)
    packed = timeline.step_document(job, found.budget)["memory"]
    for pp_rank, curve in enumerate(packed["ranks"]):
        held = highest = curve["start"]
        for index in curve["changes"][1::2]:
            held += packed["steps"][index]
            highest = max(highest, held)
        peaks = [rank.phases[Phase.FORWARD_BACKWARD] for rank in found.ranks if rank.coordinate["pp"] == pp_rank]
        assert highest == max(peaks)
        assert held == curve["start"]


def test_every_column_and_every_host_has_an_explanation():
    for changes in ((), ("host.name=megatron",)):
        found = estimate(str(ROOT / "plans/llama-3.1-8b.yaml"), *changes)
        data = report_document(found, estimate_document(found, found.ranks))
        assert all(any(data["formulas"][str(column)].values()) for column in Column)
    assert data["estimate"]["time"]["terms"]


def test_a_step_with_too_many_actions_says_so():
    text, _ = page_of("plans/nam56r-8xh200.json", "schedule.num_microbatches=4096", "mesh.dp_shard=4")
    reason = Page(text).data["step"]["reason"]
    assert "24,000 actions" in reason
    assert "--set schedule.num_microbatches=" in reason


def test_ranks_that_are_left_out_are_counted(monkeypatch):
    monkeypatch.setattr(report_data, "MAX_RANKS", 1)
    text, document = page_of("plans/nam56r-8xh200.json")
    data = Page(text).data
    assert data["left_out"]["ranks"] == len(document["ranks"]) - 1 > 0
    assert expanded(data)["ranks"] == document["ranks"][:1]


def test_a_page_that_is_too_large_is_refused():
    found = estimate(str(ROOT / "plans/tiny-hybrid.yaml"))
    document = report_document(found, estimate_document(found, found.ranks))
    with pytest.raises(MegaplanError, match="1,000,000"):
        report_html({**document, "name": "x" * MAX_BYTES})


HOSTILE = "</script><script>alert(1)</script><!--<img src=x onerror=alert(2)>\u2028&lt;@@DATA@@"


@given(st.text() | st.sampled_from([HOSTILE, "]]>", "<!--<script>", "@@SCRIPT@@"]))
@settings(max_examples=60)
def test_foreign_text_stays_text(name):
    text = escaped_json({"name": name})
    assert not set(text) & set("<>&\u2028\u2029")
    assert json.loads(text) == {"name": name}


def test_hostile_names_add_no_element():
    found = estimate(str(ROOT / "plans/tiny-hybrid.yaml"))
    document = report_document(found, estimate_document(found, found.ranks))
    plain, hostile = report_html(document), report_html({**document, "name": HOSTILE, "source": HOSTILE, "changes": [HOSTILE]})
    assert Page(hostile).data["name"] == HOSTILE
    assert [tag for tag, _ in Page(hostile).elements] == [tag for tag, _ in Page(plain).elements]


def test_a_hostile_file_name_stays_text(tmp_path, capsys):
    source = tmp_path / "<img src=x onerror=alert(1)>.yaml"
    source.write_bytes((ROOT / "plans/tiny-hybrid.yaml").read_bytes())
    assert run(["report", str(source), "-o", "-"]) == 0
    page = Page(capsys.readouterr().out)
    assert page.data["source"] == str(source)
    assert "img" not in {tag for tag, _ in page.elements}


def test_the_scripts_make_no_markup_from_text():
    folder = files("megaplan.report") / "page"
    names = {path.name.removesuffix(".js") for path in folder.iterdir() if path.name.endswith(".js")}
    assert names == set(SCRIPTS)
    for name in SCRIPTS:
        found = re.findall(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\(|fetch\(|XMLHttp", (folder / f"{name}.js").read_text()
        )
        assert found == [], name


def test_the_licence_is_in_the_package_and_in_every_page():
    licence = (files("megaplan.report") / "vendor" / "uplot" / "LICENSE").read_text()
    text, _ = page_of("plans/tiny-hybrid.yaml")
    assert "Leon Sorokin" in licence
    assert licence.strip() in text


def test_the_whole_run_is_that_of_megaplan_run(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "megaplan.toml").write_text("price = 2.5\n")
    source = str(ROOT / "plans/llama-3.1-8b.yaml")
    assert run(["report", source, "--tokens", "1T", "-o", "-"]) == 0
    data = Page(capsys.readouterr().out).data
    expected = megaplan.run(source, tokens="1T", price=2.5)
    assert data["run"] == json.loads(json.dumps(asdict(expected)))
    assert Page(page_of("plans/llama-3.1-8b.yaml")[0]).data["run"] is None


def test_a_run_that_cannot_be_planned_has_its_reason():
    text, _ = page_of("plans/llama-3.1-8b.yaml", "run.tokens=1T", "run.mtbf=1s")
    assert "interruption" in Page(text).data["run"]["reason"]


def test_a_post_training_plan_is_that_of_megaplan_rl():
    text, _ = page_of("plans/llama-3.1-8b-rl.yaml")
    assert Page(text).data["post_training"] == json.loads(json.dumps(asdict(megaplan.rl(str(ROOT / "plans/llama-3.1-8b-rl.yaml")))))


def test_the_command_replaces_reports_only(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = str(ROOT / "plans/tiny-hybrid.yaml")
    assert run(["report", source]) == 0
    assert capsys.readouterr().out == "wrote report.html\n"
    assert run(["report", source]) == 0
    Path("notes.html").write_text("<p>mine</p>")
    assert run(["report", source, "-o", "notes.html"]) == 2
    assert "MP482" in capsys.readouterr().err
    assert Path("notes.html").read_text() == "<p>mine</p>"
