"""The worked examples of the page match the model, term by term."""

import re
from pathlib import Path

import pytest

import megaplan
from megaplan.cost.step.blocks import ledger_of
from megaplan.cost.step.from_spec import step_of, timed_step
from megaplan.cost.step.predict import StepTimer, bandwidths, block_terms, peak_of
from megaplan.inventory.build import build_inventory

PAGE = Path(__file__).parents[4] / "docs" / "reference" / "step-time-examples.md"
ROW = re.compile(r"^\| (\d+) \| (\w+) \| (\w+), (forward|backward) \| (\w+) \| `([^`]+)` \| ([\d.]+) \|$", re.MULTILINE)
SPECS = {
    "llama": ("plans/llama-3.1-8b.yaml", ("host.name=megatron", "device.name=h100-sxm")),
    "mixtral": ("plans/mixtral-8x7b.yaml", ("host={name: megatron, moe_dispatcher: alltoall}", "device.name=h100-sxm")),
    "codestral": ("plans/mamba-codestral-7b.yaml", ("host.name=megatron", "device.name=h100-sxm")),
}
EXAMPLES = ROW.findall(PAGE.read_text(encoding="utf-8"))


def terms_and_symbols(name: str, block: str, run: int) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of a block's pass by term, and the symbols of the page."""
    path, changes = SPECS[name]
    job = megaplan.load(path, *changes)
    work = timed_step(job.spec, build_inventory(job.spec), job.spans, list(range(len(job.spans))), step_of(job.spec))
    rates = StepTimer(work).rates(work)
    links, machine = bandwidths(work), work.machine
    terms = block_terms(ledger_of(work, block), machine, rates, links)[run]
    terms["gaps"] = terms["kernels"] * rates["gap"]
    symbols = {
        "R": peak_of(machine, "bf16") * rates["product.bf16"],
        "W": machine.memory * rates["memory"],
        "e": rates["quality"],
        "k0": rates["depth.bf16"],
        "f": rates["plain"],
        "p": rates["permute"],
        "g": rates["gap"],
        "s": rates["grouped"],
        "m0": rates["rows"],
        "w": rates["weights"],
        "Rs": machine.peaks["bf16"] * rates["scan"],
        "Ra": machine.peaks["bf16"] * rates[f"attention.{run}"],
        "c": rates[f"spread.{run}"],
        "SM": float(machine.num_sms),
        "Wx": links["exchange"] * rates["exchange"],
        "lx": rates["exchange.latency"],
        "Wp": links["pipeline"] * rates["pipeline"],
        "lp": rates["pipeline.latency"],
        "xp": rates["pipeline.exposed"],
    }
    return terms, symbols


def test_there_are_ten():
    assert [int(number) for number, *_ in EXAMPLES] == list(range(1, 11))


@pytest.mark.parametrize("example", EXAMPLES, ids=[f"{number}-{term}" for number, _, _, _, term, *_ in EXAMPLES])
def test_an_example_is_what_the_model_computes(example):
    _, name, block, run, term, expression, milliseconds = example
    terms, symbols = terms_and_symbols(name, block, 0 if run == "forward" else 1)
    arithmetic = expression.replace("·", "*").replace("^", "**").replace("−", "-")
    by_hand = eval(arithmetic, {"__builtins__": {}}, symbols)  # arithmetic of this repository alone
    assert terms[term] == pytest.approx(by_hand, rel=1e-9)
    assert 1e3 * by_hand == pytest.approx(float(milliseconds), abs=6e-4)
