"""The recipe of a new host: its list of files is the tree's, and a toy host made from that list alone is planned, compared and exported."""

import json
import re
import shutil
from pathlib import Path

import pytest
from copied import copy_of_megaplan, run

ROOT = Path(__file__).parents[3]
RECIPE = ROOT / "docs/recipes/host.md"
TOY = Path(__file__).parent / "toy"

pytestmark = [pytest.mark.jobs, pytest.mark.skipif(not RECIPE.is_file(), reason="runs beside the sources")]

OWN = {
    "__init__.py": "src/megaplan/hosts/toy/__init__.py",
    "limits.py": "src/megaplan/hosts/toy/limits.py",
    "budget.py": "src/megaplan/budget/toy.py",
    "exporter.py": "src/megaplan/exporters/toy.py",
    "import_command.py": "src/megaplan/cli/import_toy.py",
}
"""Folder of each file of the toy in the recipe."""
LINES: dict[str, list[tuple[str, str]]] = {
    "src/megaplan/hosts/registry.py": [
        ("from megaplan.hosts.torchtitan import HOST as TORCHTITAN\n", "from megaplan.hosts.toy import HOST as TOY\n"),
        ("(MEGARUN, MEGATRON, TORCHTITAN", ", TOY"),
    ],
    "src/megaplan/spec/host.py": [
        (
            "        compile_model: torch.compile of every transformer block.\n",
            "        copies: Whole copies of a stage that a rank holds.\n",
        ),
        ("    compile_model: StrictBool = False\n", "    copies: PositiveInt = 2\n"),
    ],
}
"""Lines that a copy of megaplan needs to plan the toy: (text of the file, what is put after it)."""

SPEC = """
format: megaplan.spec/1
name: toy
model: {pattern: D, num_layers: 4, hidden_size: 64, vocab_size: 256, mlp: {ffn_hidden_size: 96}}
batch: {micro_batch_size: 2, seq_length: 32}
host: {name: toy}
"""
LAYER, TABLE, NORM = 64 + 3 * 64 * 96, 256 * 64, 64


def table(heading: str) -> list[str]:
    """The files that a section of the recipe lists."""
    section = RECIPE.read_text(encoding="utf-8").partition(f"## {heading}")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)


@pytest.mark.skipif(not (ROOT / "src").is_dir(), reason="needs the sources")
def test_the_recipe_lists_what_the_toy_needs() -> None:
    """Files that change are in the tree, and no other file changes; the toy's own files are where the recipe puts them."""
    changed = table("Files that change")
    assert [file for file in changed if not (ROOT / file).is_file()] == []
    assert set(LINES) <= set(changed)
    places = {place.replace("<host>", "toy") for place in table("Its own files")}
    assert {str(Path(place).parent) if "hosts/" in place else place for place in OWN.values()} <= {place.rstrip("/") for place in places}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a megaplan with one more host."""
    folder = tmp_path_factory.mktemp("recipe")
    copy_of_megaplan(folder, LINES)
    for name, place in OWN.items():
        (folder / place).parent.mkdir(exist_ok=True)
        shutil.copy(TOY / name, folder / place)
    (folder / "toy.yaml").write_text(SPEC, encoding="utf-8")
    return folder


def test_a_toy_host_is_planned_from_the_recipes_list(copy: Path) -> None:
    """Budget, header, explanation, cuts and plan are the toy's own; a step has no time, and says so."""
    shown = run(copy, "estimate", "toy.yaml", "--explain")
    assert shown.returncode == 0, shown.stderr
    assert "host toy, 2 copies;" in shown.stdout
    assert "whole copies in fp32" in shown.stdout
    found = json.loads(run(copy, "estimate", "toy.yaml", "--json", "--set", "host.copies=3").stdout)
    assert found["ranks"][0]["peak_bytes"] == 3 * 4 * (4 * LAYER + 2 * TABLE + NORM)
    assert found["time"] == {"reason": "there are no fitted constants for steps of host toy"}
    piped = ("--set", "mesh.pp=2", "--set", "schedule.num_microbatches=2")
    split = run(copy, "split", "toy.yaml", *piped, "-o", "plan.json")
    assert split.returncode == 0, split.stderr
    assert run(copy, "check", "plan.json").returncode == 0
    ranks = json.loads(run(copy, "estimate", "plan.json", "--json").stdout)["ranks"]
    assert [rank["peak_bytes"] for rank in ranks] == [8 * (2 * LAYER + TABLE + NORM), 8 * (2 * LAYER + TABLE)]


def test_a_toy_hosts_keys_and_rules_are_its_own(copy: Path) -> None:
    """Keys of another host, and what it cannot run, are refused; it is not searched, for it has no bounds of memory."""
    for changes, said in (
        (("host.kernels=triton",), "host.kernels is a key of host megarun, and host.name = toy"),
        (("host={name: megarun, copies: 3}",), "host.copies is a key of host toy, and host.name = megarun"),
        (("mesh.tp=2",), "the toy host has whole tensors"),
    ):
        refused = run(copy, "estimate", "toy.yaml", *(word for change in changes for word in ("--set", change)))
        assert refused.returncode == 2
        assert said in refused.stderr
    assert "host.name = toy" in run(copy, "search", "toy.yaml").stderr
    assert run(copy, "schema", "spec").stdout.count('"toy"') == 1


def test_a_toy_host_is_compared_exported_and_imported(copy: Path) -> None:
    """Commands find it by its value."""
    for name, host in (("a", "toy"), ("b", "megarun")):
        assert run(copy, "split", "toy.yaml", "--set", f"host={{name: {host}}}", "-o", f"{name}.json").returncode == 0
    assert "toy: whole copies in fp32" in run(copy, "diff", "a.json", "b.json").stdout
    assert run(copy, "export", "toy.yaml", "--to", "toy").stdout == "toy --copies 2 --pattern DDDD\n"
    assert run(copy, "import", "toy", "7").stdout == "host: {name: toy, copies: 7}\n"


def test_another_host_changes_no_plan(copy: Path) -> None:
    """A plan that was made without the host is neither edited nor another in the eyes of a megaplan that has it."""
    shutil.copy(ROOT / "plans/tiny-hybrid.json", copy / "tiny.json")
    done = run(copy, "check", "tiny.json", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
