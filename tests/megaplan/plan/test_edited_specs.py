"""`check` finds a spec that was edited after its plan was made."""

import shutil

import pytest

import megaplan
from megaplan.plan.make import write_plan


@pytest.fixture
def folder(tmp_path):
    for ending in ("yaml", "json"):
        shutil.copy(f"plans/tiny-hybrid.{ending}", tmp_path / f"tiny.{ending}")
    return tmp_path


def _edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def codes(found):
    return [item.code for item in found.findings]


def test_a_plan_of_its_spec_is_up_to_date(folder):
    assert megaplan.check(folder / "tiny.json").findings == ()


def test_an_edited_spec_is_found_by_its_name_and_by_option(folder):
    _edit(folder / "tiny.yaml", "micro_batch_size: 4", "micro_batch_size: 64")
    found = megaplan.check(folder / "tiny.json")
    assert codes(found) == ["MP416"]
    assert "batch.micro_batch_size: 4 → 64" in found.findings[0].detail
    assert not found.passes(strict=False)
    (folder / "tiny.yaml").rename(folder / "other.yaml")
    assert codes(megaplan.check(folder / "tiny.json")) == []
    assert codes(megaplan.check(folder / "tiny.json", spec=folder / "other.yaml")) == ["MP416"]


def test_a_spec_of_another_name_is_not_the_plans(folder):
    _edit(folder / "tiny.yaml", "name: tiny-hybrid", "name: another")
    assert codes(megaplan.check(folder / "tiny.json")) == []
    assert codes(megaplan.check(folder / "tiny.json", spec=folder / "tiny.yaml")) == ["MP416"]


def test_recorded_overrides_are_no_edit(folder):
    job = megaplan.split(folder / "tiny.yaml", "batch.micro_batch_size=1")
    plan = folder / "tiny.json"

    write_plan(job.plan, plan)
    assert codes(megaplan.check(plan)) == []
