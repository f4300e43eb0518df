"""Recipes: short pages whose files are the tree's; a schedule made from its recipe alone is planned with."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import megaplan
from megaplan.diagnostics.pages import PACKAGED

ROOT = Path(__file__).parents[3]
RECIPES = sorted((ROOT / "docs/recipes").glob("*.md"))
MOST_LINES = 60
NEEDED = ("family", "estimate", "column", "schedule", "device", "host", "kernel", "low-precision", "huggingface")

pytestmark = pytest.mark.skipif(not RECIPES, reason="runs beside the sources")

SCHEDULE = '''"""All forwards in order, all backwards in reverse."""

from megaplan.schedules.actions import Action, Kind
from megaplan.schedules.problems import one_chunk_a_rank


def problems(pp, vpp, num_microbatches):
    return [one_chunk_a_rank("reversed", vpp)] if vpp != 1 else []


def orders(pp, vpp, num_microbatches):
    forward = [(Kind.FORWARD, index) for index in range(num_microbatches)]
    backward = [(Kind.BACKWARD, index) for index in reversed(range(num_microbatches))]
    return tuple(tuple(Action(kind, slot, index) for kind, index in forward + backward) for slot in range(pp))
'''
ENTRY = [
    ("from megaplan.schedules import dualpipev, ", "reversed_order, "),
    ('    "gpipe": Schedule("single", gpipe.problems, gpipe.orders, "GPipe"),\n',
     '    "reversed": Schedule("single", reversed_order.problems, reversed_order.orders, "Reversed"),\n'),
]  # fmt: skip
"""What is put after which text of the registry."""


def test_there_is_a_recipe_for_every_kind_of_change() -> None:
    assert set(NEEDED) <= {page.stem for page in RECIPES}


@pytest.mark.skipif(not (ROOT / "src").is_dir(), reason="needs the sources")
@pytest.mark.parametrize("page", RECIPES, ids=lambda page: page.stem)
def test_a_recipe_is_short_and_names_files_of_the_tree(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(text.splitlines()) < MOST_LINES
    files = re.findall(r"`((?:src|tests|docs|benchmarks|scripts|kernels)/[^`<>*]+)`", text)
    assert files
    assert [file for file in files if not (ROOT / file).exists()] == []


def test_a_schedule_is_one_file_and_one_entry(tmp_path: Path) -> None:
    """It is known to rules, help, timelines, cuts and estimates from then on."""
    shutil.copytree(Path(megaplan.__file__).parent, tmp_path / "megaplan", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "docs/errors", tmp_path / "megaplan" / PACKAGED, dirs_exist_ok=True)
    registry = tmp_path / "megaplan/schedules/registry.py"
    text = registry.read_text(encoding="utf-8")
    for after, added in ENTRY:
        assert text.count(after) == 1
        text = text.replace(after, after + added)
    registry.write_text(text, encoding="utf-8")
    (tmp_path / "megaplan/schedules/reversed_order.py").write_text(SCHEDULE, encoding="utf-8")

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        path = {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "megaplan", *words]
        return subprocess.run(command, cwd=ROOT, env=path, capture_output=True, text=True, check=False)

    drawn = run("schedule", "--kind", "reversed", "--pp", "2", "--microbatches", "3")
    assert drawn.returncode == 0, drawn.stderr
    assert "reversed" in run("schema", "spec").stdout
    changed = ("--set", "schedule.kind=reversed", "--set", "mesh.vpp=1")
    estimated = run("estimate", "plans/tiny-hybrid.yaml", "--set", "mesh.pp=2", *changed)
    assert "reversed, " in estimated.stdout, estimated.stderr
    refused = run("estimate", "plans/tiny-hybrid.yaml", "--set", "mesh.pp=2", "--set", "mesh.vpp=2", "--set", "schedule.kind=reversed")
    assert "one chunk" in refused.stderr + refused.stdout or "vpp" in refused.stderr
    assert refused.returncode == 2
