"""Recipes: short pages whose files are the tree's; a schedule made from its recipe alone is planned with."""

import json
import re
from pathlib import Path

import pytest
from copied import copy_of_megaplan, run

ROOT = Path(__file__).parents[3]
RECIPES = sorted((ROOT / "docs/recipes").glob("*.md"))
MOST_LINES = 60
TINY, LLAMA = (str(ROOT / "plans" / name) for name in ("tiny-hybrid.yaml", "llama-3.1-8b.yaml"))
NEEDED = ("family", "estimate", "column", "schedule", "device", "host", "kernel", "low-precision", "huggingface")

pytestmark = [pytest.mark.jobs, pytest.mark.skipif(not RECIPES, reason="runs beside the sources")]

SCHEDULE = '''"""All forwards in order, all backwards in reverse."""

from megaplan.schedules.actions import Action, ActionKind
from megaplan.schedules.problems import one_chunk_a_rank


def problems(pp, vpp, num_microbatches):
    return [one_chunk_a_rank("reversed", vpp)] if vpp != 1 else []


def orders(pp, vpp, num_microbatches):
    forward = [(ActionKind.FORWARD, index) for index in range(num_microbatches)]
    backward = [(ActionKind.BACKWARD, index) for index in reversed(range(num_microbatches))]
    return tuple(tuple(Action(kind, slot, index) for kind, index in forward + backward) for slot in range(pp))
'''
ENTRY = [
    ("from megaplan.schedules import dualpipe, ", "reversed_order, "),
    ('    "gpipe": RegisteredSchedule("single", gpipe.problems, gpipe.orders, "GPipe", gradient_buffers=_one),\n',
     '    "reversed": RegisteredSchedule("single", reversed_order.problems, reversed_order.orders, "Reversed"),\n'),
]  # fmt: skip
"""Lines that the tests add, each with the text of the registry that they follow."""


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
    copy = copy_of_megaplan(tmp_path, {"src/megaplan/schedules/registry.py": ENTRY})
    (copy / "src/megaplan/schedules/reversed_order.py").write_text(SCHEDULE, encoding="utf-8")
    drawn = run(copy, "schedule", "--kind", "reversed", "--pp", "2", "--microbatches", "3")
    assert drawn.returncode == 0, drawn.stderr
    assert "reversed" in run(copy, "schema", "spec").stdout
    changed = ("--set", "schedule.kind=reversed", "--set", "mesh.vpp=1")
    estimated = run(copy, "estimate", TINY, "--set", "mesh.pp=2", *changed)
    assert "reversed, " in estimated.stdout, estimated.stderr
    refused = run(copy, "estimate", TINY, "--set", "mesh.pp=2", *changed[:2], "--set", "mesh.vpp=2")
    assert "one chunk" in refused.stderr + refused.stdout or "vpp" in refused.stderr
    assert refused.returncode == 2


def test_a_device_is_one_entry_of_the_data_file(tmp_path: Path) -> None:
    """Capacity, reserve and rates are the entry's; a step time has the interval of a device without measured steps, and says so."""
    copy = copy_of_megaplan(tmp_path, {})
    path = copy / "src/megaplan/devices.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    toy = {key: value for key, value in data["devices"]["h200"].items() if key != "reserve_bytes"}
    toy["capacity_bytes"] = {"value": 40 * 2**30, "basis": "modelled", "source": "a data sheet of 48 GB"}
    toy["peak_flops"] = {name: figure | {"value": figure["value"] // 2} for name, figure in toy["peak_flops"].items()}
    data["devices"]["toy-48gb"] = toy
    path.write_text(json.dumps(data), encoding="utf-8")
    shown = run(copy, "devices", "toy-48gb").stdout
    assert f"capacity: {40 * 2**30:,} bytes, modelled" in shown
    (share,) = re.findall(r"reached.bf16: (\S+) of the peak, fitted", run(copy, "devices", "h100-sxm").stdout)
    assert f"reached.bf16: {share} of the peak, modelled" in shown  # that of the first device of its generation
    megatron = run(copy, "estimate", LLAMA, "--set", "device.name=toy-48gb", "--set", "host={name: megatron}", "--json")
    assert json.loads(megatron.stdout)["time"]["calibration"] == "uncalibrated", megatron.stderr
    found = {
        name: json.loads(run(copy, "estimate", LLAMA, "--set", f"device.name={name}", "--json").stdout) for name in ("h200", "toy-48gb")
    }
    assert found["toy-48gb"]["device"]["capacity_bytes"] == 40 * 2**30
    assert found["toy-48gb"]["time"]["step_seconds"] > 1.5 * found["h200"]["time"]["step_seconds"]
    assert found["toy-48gb"]["time"]["calibration"] == "uncalibrated"
