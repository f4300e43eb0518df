"""The page on costs states the rates that the data file has, and a costs file that is read."""

import json
import re
from pathlib import Path

import pytest

from megaplan.cost.file import parse_costs
from megaplan.cost.formulas import FORMULAS
from megaplan.devices import load_device
from megaplan.families.registry import FAMILIES
from megaplan.inventory.build import build_inventory

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "costs.md").read_text(encoding="utf-8")


@pytest.mark.requirement("R-51")
def test_the_rates_on_the_page_are_those_of_the_data_file():
    device = load_device("h200")
    figures = {name: (f"{figure.value} %", figure.basis) for name, figure in device.efficiency.items()}
    for name, figure in (
        ("launch_ns", device.launch),
        ("collective_latency_ns", device.collective_latency),
        ("recurrence_step_ns", device.recurrence_step),
    ):
        figures[name] = (f"{figure.value:,} ns", figure.basis)
    section = PAGE.split("## Rates of the H200")[1].split("## Formulas")[0]
    rows = re.findall(r"^\| (\w+) \| ([\d,]+ (?:%|ns)) \| (\w+) \|", section, re.MULTILINE)
    assert {name: (value, basis) for name, value, basis in rows} == figures


def test_the_costs_file_on_the_page_is_read(make_spec):
    spec = make_spec("AE")
    (text,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    measured = parse_costs(text, "costs.md", spec, build_inventory(spec))
    assert measured.times.layers[1].total_ns == sum(value for value in json.loads(text)["layers"][1].values())
    assert measured.times.last.total_ns == 0


def test_the_page_names_the_formulas_of_every_model():
    named = PAGE.split("## Formulas")[1]
    of_families = {name for family in FAMILIES.values() for name in family.formulas}
    assert of_families < set(FORMULAS)
    assert all(f"{name}`" in named for name in set(FORMULAS) - of_families)
