"""The page of a search: its data are those of `megaplan search --json`, and any other file is refused by name."""

import json
from pathlib import Path

import pytest

from megaplan import search
from megaplan.cli.main import run
from megaplan.errors import MegaplanError
from megaplan.report.page import report_html
from megaplan.report.search import is_search, search_report

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def result():
    found = search(str(ROOT / "plans/tiny-hybrid-pp2.yaml"), devices=2, top=3, vary=["schedule"], processes=1)
    return json.loads(json.dumps(found.to_dict()))


def data_of(text):
    start = text.index('id="data">') + len('id="data">')
    return json.loads(text[start : text.index("</script>", start)])


def test_the_page_has_the_result(result, tmp_path, capsys):
    source = tmp_path / "found.json"
    source.write_text(json.dumps(result), encoding="utf-8")
    assert run(["report", str(source), "-o", "-"]) == 0
    data = data_of(capsys.readouterr().out)
    assert (data["kind"], data["name"], data["source"]) == ("search", result["spec"], str(source))
    shown = data["search"]
    for row, expected in zip(shown["best"], result["best"], strict=True):
        assert {key: expected[key] for key in row} == row
    assert [lost["name"] for lost in shown["why_not"]] == [lost["class"] for lost in result["why_not"]]
    for key in ("devices", "candidates", "bound_seconds", "gap", "robustness", "complete", "basis"):
        assert shown[key] == result[key]


def test_foreign_text_adds_no_element(result):
    hostile = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    page = report_html(search_report(json.dumps({**result, "spec": hostile, "basis": hostile}), hostile))
    assert data_of(page)["name"] == hostile
    assert page.count("<script") == report_html(search_report(json.dumps(result), "found.json")).count("<script")


def test_half_of_a_surrogate_pair_is_an_escape_of_the_page(result):
    page = report_html(search_report(json.dumps({**result, "spec": "a\ud800"}), "found.json"))
    assert data_of(page)["name"] == "a\ud800"
    assert "\\ud800" in page


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"best": [{}]}, "best.0.step_seconds"),
        ({"devices": "8"}, "devices"),
        ({"why_not": None}, "NoneType"),
        ({"format": "megaplan.search/2"}, "format"),
        ({"bound_seconds": float("nan")}, "NaN"),
    ],
)
def test_what_is_no_result_is_refused(result, change, named):
    text = json.dumps({**result, **change})
    assert is_search(text)
    with pytest.raises(MegaplanError) as caught:
        search_report(text, "found.json")
    (found,) = caught.value.diagnostics
    assert found.code == "MP492"
    assert named in found.detail


def test_a_result_takes_no_changes(result, tmp_path, capsys):
    source = tmp_path / "found.json"
    source.write_text(json.dumps(result), encoding="utf-8")
    assert run(["report", str(source), "--set", "mesh.tp=2", "-o", "-"]) == 2
    assert "MP492" in capsys.readouterr().err
