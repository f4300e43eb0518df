"""The time of a step in the commands' texts and documents."""

import json
from pathlib import Path

import pytest

from megaplan.cost.step.formulas import FORMULAS

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "step-time-model.md").read_text(encoding="utf-8")
MEGATRON = ("--set", "host.name=megatron", "--set", "device.name=h100-sxm")
KEYS = {"step_seconds", "interval", "tokens_per_second_per_device", "mfu", "terms", "basis", "calibration"}


def time_of(ran) -> dict:
    return json.loads(ran.out)["time"]


def test_the_page_shows_what_is_printed(megaplan):
    command, shown = PAGE.split("```console\n$ megaplan ", 1)[1].split("```", 1)[0].split("\n", 1)
    assert shown in megaplan(*command.split()).out


def test_the_page_names_every_formula():
    assert [name for name in FORMULAS if f"`{name}`" not in PAGE] == []


def test_estimate_and_split_agree(megaplan):
    estimate = time_of(megaplan("estimate", "plans/llama-3.1-8b.yaml", "--json", *MEGATRON))
    split = time_of(megaplan("split", "plans/llama-3.1-8b.yaml", "--json", *MEGATRON, "-o", "a.json"))
    assert estimate == split == time_of(megaplan("estimate", "a.json", "--json"))
    assert set(estimate) == KEYS
    low, high = estimate["interval"]
    assert low < estimate["step_seconds"] < high
    assert (estimate["basis"], estimate["calibration"]) == ("fitted", "dense")
    assert "step " in megaplan("show", "a.json").out


def test_diff_has_both_times(megaplan):
    megaplan("split", "plans/llama-3.1-8b.yaml", *MEGATRON, "-o", "a.json")
    megaplan("split", "plans/llama-3.1-8b.yaml", *MEGATRON, "--set", "schedule.num_microbatches=32", "-o", "b.json")
    both = time_of(megaplan("diff", "a.json", "b.json", "--json"))
    assert both["after"]["step_seconds"] > 1.5 * both["before"]["step_seconds"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("plans/llama-3.1-8b.yaml",), "there are no constants for steps of host megarun"),
        (("plans/mamba-codestral-7b.yaml",), "there are no constants for steps of host megarun"),
    ],
)
def test_what_is_not_timed_says_why(megaplan, words, reason):
    assert time_of(megaplan("estimate", *words, "--json")) == {"reason": reason}


def test_an_uncalibrated_device_has_a_wider_interval(megaplan):
    words = ("estimate", "plans/llama-3.1-8b.yaml", "--json", "--set", "host.name=megatron")
    known, unknown = (time_of(megaplan(*words, "--set", f"device.name={name}")) for name in ("h100-sxm", "mi300x"))
    assert (unknown["basis"], unknown["calibration"]) == ("modelled", "uncalibrated")
    ratios = [time["interval"][1] / time["interval"][0] for time in (known, unknown)]
    assert ratios[0] < ratios[1]
