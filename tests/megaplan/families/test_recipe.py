"""The recipe of a new block family: its list of files is the tree's, and a toy family made from that list alone is planned to the end.

A copy of megaplan gets the toy's folder and the lines that the recipe asks for, and plans a model with its letter in its own process.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from copied import copy_of_megaplan, run

from megaplan.exporters.hosts import EXPORTERS

ROOT = Path(__file__).parents[3]
RECIPE = ROOT / "docs/recipes/family.md"
MOST_FILES, MOST_LINES = 9, 60

pytestmark = [pytest.mark.jobs, pytest.mark.skipif(not RECIPE.is_file(), reason="runs beside the sources")]

LINES: dict[str, list[tuple[str, str]]] = {
    "src/megaplan/families/registry.py": [
        ("from megaplan.families.recurrent import RECURRENT\n", "from megaplan.families.toy import TOY\n"),
        ("(ATTENTION, MAMBA, EXPERTS, RECURRENT, DENSE", ", TOY"),
    ],
    "src/megaplan/spec/architecture.py": [
        ("from megaplan.families.recurrent.section import MatrixRecurrence\n", "from megaplan.families.toy.section import Toy\n"),
        ("        mlp: Dimensions of D blocks.\n", "        toy: Dimensions of T blocks.\n"),
        ("    mlp: Mlp | None = None\n", "    toy: Toy | None = None\n"),
    ],
    "src/megaplan/devices.json": [
        ('"efficiency_percent": {\n', '      "T": {"value": 60, "basis": "modelled", "source": "as D, and narrower"},\n'),
    ],
}
"""Additions that let a copy of megaplan plan the toy: (text of the file, text put after it). The recipe's other files are for trainers
and readers."""

SPEC = """
format: megaplan.spec/1
name: toy
model: {pattern: TD, num_layers: 4, hidden_size: 64, vocab_size: 256, toy: {rank: 8}, mlp: {ffn_hidden_size: 96}}
batch: {micro_batch_size: 2, seq_length: 32}
recompute: {blocks: {T: selective}}
precision: {families: {T: fp32}}
"""


def outside_files() -> list[str]:
    """The recipe's list of files outside the family's own folders."""
    section = RECIPE.read_text(encoding="utf-8").partition("## Files outside")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)


@pytest.mark.skipif(not (ROOT / "src").is_dir(), reason="needs the sources")
def test_the_recipe_lists_files_of_the_tree() -> None:
    """At most 9, all there; the page stays short; nothing outside the list is needed to plan a family."""
    files = outside_files()
    assert len(files) == len(set(files)) <= MOST_FILES
    assert [file for file in files if not (ROOT / file).is_file()] == []
    assert set(LINES) <= set(files)
    assert len(RECIPE.read_text(encoding="utf-8").splitlines()) < MOST_LINES


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a megaplan with one more family."""
    folder = tmp_path_factory.mktemp("recipe")
    copy_of_megaplan(folder, LINES)
    shutil.copytree(Path(__file__).parent / "toy", folder / "src/megaplan/families/toy", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "toy.yaml").write_text(SPEC, encoding="utf-8")
    return folder


def estimate(copy: Path, *words: str) -> dict[str, Any]:
    """The copy's estimate of the toy model."""
    done = run(copy, "estimate", "toy.yaml", "--json", *words)
    assert not done.stderr, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_toy_family_is_planned_from_the_recipes_list(copy: Path) -> None:
    """Spec, inventory, ledger, cost, cuts, budget and plan: parameters are those that its folder states."""
    found = estimate(copy)
    hidden, rank, ffn, vocab = 64, 8, 96, 256
    toy = hidden + 2 * hidden * rank
    assert found["totals"]["parameters"] == 2 * toy + 2 * (hidden + 3 * hidden * ffn) + 2 * vocab * hidden + hidden
    assert found["fits"] is True
    large = ("--set", "batch.micro_batch_size=64")  # activations decide where the peak is
    ranks = [estimate(copy, *large, *words)["ranks"][0] for words in ((), ("--set", "model.toy.rank=16", "--set", "recompute.blocks={}"))]
    before, after = (rank["cells"]["forward_backward"]["activations_bytes"] for rank in ranks)
    assert after > before
    piped = ("--set", "mesh.pp=2", "--set", "schedule.num_microbatches=2")
    assert run(copy, "split", "toy.yaml", *piped, "-o", "plan.json").returncode == 0
    assert run(copy, "check", "plan.json").returncode == 0


def test_a_toy_familys_ledger_and_rules_are_its_own(copy: Path) -> None:
    """Selective recompute drops what its program says; what does not fit is refused at its key; the alphabet names the letter."""
    script = """if True:
        from megaplan.hosts.megarun.ledger import block_ledger
        from megaplan.inventory.build import build_inventory
        from megaplan.spec.load import load_spec
        for overrides in ((), ("recompute.blocks={}",)):
            spec = load_spec("toy.yaml", overrides).spec
            ledger = block_ledger(spec, "layers.0", build_inventory(spec).layers[0])
            print(",".join(tensor.name for tensor in ledger.saved))
    """
    assert run(copy, "-c", script).stdout.split() == ["cast_input,normed,rstd", "cast_input,normed,rstd,narrow"]
    assert "priced without toy" in run(copy, "estimate", "toy.yaml", "--set", "host.name=megatron").stderr
    exported = {host: run(copy, "export", "toy.yaml", "--to", host) for host in EXPORTERS}
    assert {host for host, done in exported.items() if done.returncode == 0} == {"torchtitan", "fsdp2", "deepspeed"}
    refusals = {host: done.stderr for host, done in exported.items() if done.returncode != 0}
    codes = {"verl": "MP851", "nemo-rl": "MP851"}  # loops of post-training, which this spec lacks
    assert all(codes.get(host, "MP921") in stderr for host, stderr in refusals.items()), refusals
    assert "2 · 64 · 8 = 1024" in run(copy, "explain", "toy_narrow").stdout
    refused = run(copy, "estimate", "toy.yaml", "--set", "model.toy.rank=65", "--set", "model.pattern=TX")
    assert "T (toy)" in refused.stderr
    assert "model.toy.rank" in run(copy, "estimate", "toy.yaml", "--set", "model.toy.rank=65").stderr


def test_another_family_changes_no_plan(copy: Path) -> None:
    """A plan that was made without the family is neither edited nor another in the eyes of a megaplan that has it."""
    shutil.copy(ROOT / "plans/tiny-hybrid.json", copy / "tiny.json")
    done = run(copy, "check", "tiny.json", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
