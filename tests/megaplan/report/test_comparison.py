"""The page of two plans: its data are those of `megaplan diff --json`, and it takes no option that would change them."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from test_search_page import data_of

from megaplan import diff, split
from megaplan.cli.main import run
from megaplan.plan.make import write_plan
from megaplan.report import comparison

ROOT = Path(__file__).parents[3]


def two_plans(folder):
    paths = [folder / "one.json", folder / "other.json"]
    for path, changes in zip(paths, ((), ("batch.micro_batch_size=2", "mesh.dp_shard=2")), strict=True):
        write_plan(split(str(ROOT / "plans/tiny-hybrid-pp2.yaml"), *changes).plan, path)
    return list(map(str, paths))


def test_the_page_has_the_difference(tmp_path, capsys):
    before, after = two_plans(tmp_path)
    assert run(["report", before, after, "-o", "-"]) == 0
    data = data_of(capsys.readouterr().out)
    document = json.loads(json.dumps(diff(before, after).to_dict()))
    assert (data["kind"], data["files"]) == ("comparison", {"before": before, "after": after})
    shown = data["diff"]
    assert {key: shown[key] for key in document if key != "ranks"} == {key: document[key] for key in document if key != "ranks"}
    assert [(each["before"], each["after"]) for each in shown["ranks"]] == [(each["before"], each["after"]) for each in document["ranks"]]
    assert [each["first"] for each in shown["ranks"]] == [each["ranks"][0] for each in document["ranks"]]


def test_changes_that_are_left_out_are_counted(tmp_path, monkeypatch):
    before, after = two_plans(tmp_path)
    found = diff(before, after)
    assert len(found.changes.ranks) > 1
    monkeypatch.setattr(comparison, "MAX_RANKS", 1)
    page = comparison.comparison_report(found, before, after)
    assert (len(page["diff"]["ranks"]), page["left_out"]) == (1, {"ranks": len(found.changes.ranks) - 1})


def test_two_plans_take_no_changes(tmp_path, capsys):
    assert run(["report", *two_plans(tmp_path), "--set", "mesh.tp=2", "-o", "-"]) == 2
    assert "MP492" in capsys.readouterr().err


def test_an_equal_plan_changes_nothing(tmp_path, capsys):
    one, _ = two_plans(tmp_path)
    assert run(["report", one, one, "-o", "-"]) == 0
    assert data_of(capsys.readouterr().out)["diff"]["same"] is True
