"""The exact text of refusals and warnings. `MEGAPLAN_WRITE_GOLDEN=1 pytest …` writes them anew, for review as a diff."""

import os
from pathlib import Path

import pytest
from spec_samples import REPOSITORY

from megaplan.errors import MegaplanError, render_diagnostic
from megaplan.spec.load import load_spec

GOLDEN = REPOSITORY / "tests" / "golden" / "errors"
NAMES = sorted(path.stem for path in GOLDEN.glob("*.yaml"))
EXPERT_DEGREE = """\
error[MP203]: expert degree does not divide the routed experts

  moe.num_experts = 16, mesh.ep = 6, and 16 % 6 = 4
  --> plans/nam56r.yaml:22: mesh.ep

hint: use 1, 2, 4, 8 or 16
hint: megaplan explain MP203"""


def report(path: str) -> str:
    try:
        found = load_spec(path).diagnostics
    except MegaplanError as error:
        found = error.diagnostics
    return "\n\n".join(render_diagnostic(item) for item in found)


def case(name: str) -> object:
    requirement = "-".join(name.split("-")[:2])
    return pytest.param(name, marks=pytest.mark.requirement(requirement)) if name.startswith("R-") else name


@pytest.mark.parametrize("name", [case(name) for name in NAMES])
def test_the_text_is_the_golden_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(GOLDEN)
    text, golden = report(f"{name}.yaml") + "\n", GOLDEN / f"{name}.txt"
    if os.environ.get("MEGAPLAN_WRITE_GOLDEN"):
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")


def test_each_golden_text_has_its_spec() -> None:
    assert sorted(path.stem for path in GOLDEN.glob("*.txt")) == NAMES
    assert {f"R-{number}" for number in (2, 3, 30, 31, 32, 33)} <= {"-".join(name.split("-")[:2]) for name in NAMES}


@pytest.mark.requirement("R-31")
def test_the_documented_example_to_the_letter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = (GOLDEN / "R-31-expert-degree.yaml").read_text(encoding="utf-8").splitlines()
    head, tail = lines[:9], [line for line in lines[9:] if not line.startswith("mesh")]
    padding = ["# a comment"] * (19 - len(head) - len(tail))
    (tmp_path / "plans").mkdir()
    text = "\n".join([*head, *tail, *padding, "mesh:", "  dp_shard: 6", "  ep: 6"])
    (tmp_path / "plans" / "nam56r.yaml").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert report("plans/nam56r.yaml") == EXPERT_DEGREE
