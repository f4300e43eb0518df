"""The formulas as text match the functions, and `megaplan explain` prints them."""

from dataclasses import replace

import pytest

from megakernels.ops.attention.facts import AttentionSizes
from megaplan.cost.data import DataTimes, host_ns
from megaplan.cost.rates import PARTS, rates_of, rates_with
from megaplan.cost.step import attention, data, gemm, grouped, launch, memory, own_modules, pipeline, scan, transfers
from megaplan.cost.step.formulas import FORMULAS
from megaplan.cost.step.ledger import FORWARD
from megaplan.dtypes import DType
from megaplan.measured.constants import measured
from megaplan.spec.load import load_spec

HEADS = AttentionSizes(1, 8192, 8192, 12, 12, 128, 128, 2)
SCAN_FLOPS = 8192 * (2 * 128 * 8 * 128 + 2 * 128 * 8192 + 4 * 8192 * 128)
SPEC = load_spec("plans/tiny-hybrid.yaml", ("device.name=h200", "host.cuda_graphs=none")).spec


def measured_seconds() -> float:
    """Products that reach half of the peak, in a thousand launches of a microsecond."""
    constants = measured("h200")
    assert constants is not None
    rates = rates_with(rates_of(SPEC), constants._replace(shares={"half": PARTS // 2}, launch_ns=1000))
    return (replace(rates, percent=rates.own).kind_ns("half", 0, 989 * 10**15, "D", DType.BF16) + 1000 * rates.launch_ns) / 1e9


def host_seconds() -> float:
    """Host seconds of a forward alone."""
    return host_ns(SPEC, 100_000, 0, DataTimes(0, 0, 0), (60_000_000, 1000), (0, 0)) / SPEC.schedule.microbatches_per_update / 1e9


COMPUTED = {
    "step_gemm": gemm.product_seconds(2e12, 1e8, 0.9, 4096, 7e14, 2.5e12, 0.5, 70),
    "step_quality": gemm.quality(4096, 4096, 132),
    "step_grouped": grouped.grouped_seconds(1e12, 4e8, 1e8, 512, 7168, 1e15, 6e12, 0.98, 60, 70, 0.6),
    "step_attention": attention.attention_seconds(2 * 32 * 256 * 8192**2 / 2, 2048, 1.0, 132, 6e14, 2),
    "step_scores": memory.moved_seconds(4 * 8 * 2048**2 * attention.score_bytes(FORWARD, dropped=True), 1.45e12, 1),
    "step_memory": memory.moved_seconds(4096 * 4096 * 10, 2.5e12, 1.3),
    "step_drops": attention.drawn_seconds(12 * 8192**2 / 2, 108, attention.DRAWN[0]),
    "step_copies_of_heads": memory.moved_seconds(8192 * own_modules.copied(HEADS, flash=True, packs=False)[0], 1.48e12, 1),
    "step_scan": scan.scan_seconds(SCAN_FLOPS, 2e9, 5e13, 6e12),
    "step_transfer": transfers.transfer_seconds(2 * 3 * 8e6, 6, 3.6e11, 8e-6, 0.4),
    "step_short_ring": transfers.short_ring(2),
    "step_copies": transfers.copies(8, 8, distinct=True),
    "step_launch": launch.joined_seconds(0.010, 0.009),
    "step_pipeline": pipeline.pipeline_seconds(16, 2, [(1, 0.028), (1, 0.030), (1, 0.026)]),
    "step_ring": data.ring_seconds(2e9, 64, 2e11, 3e-5),
    "step_data": data.exposed_seconds(0.05, 0.04, 0.4, 0.03, 0.02),
    "step_growth": pipeline.grown(10, 0.0025, 5),
    "step_measured": measured_seconds(),
    "step_host": host_seconds(),
}


def test_every_formula_has_a_computed_example():
    assert set(COMPUTED) == set(FORMULAS)


@pytest.mark.parametrize("name", FORMULAS)
def test_the_example_is_what_the_function_computes(name):
    expression, _, value = FORMULAS[name].example.rpartition(" = ")
    by_hand = eval(expression.replace("·", "*").replace("^", "**"), {"__builtins__": {}})  # arithmetic of this repository alone
    assert by_hand == pytest.approx(float(value), rel=1e-3)
    assert COMPUTED[name] == pytest.approx(by_hand, rel=1e-9)
    assert FORMULAS[name].source
    assert FORMULAS[name].unit


@pytest.mark.parametrize("name", FORMULAS)
def test_explain_prints_it(name, capsys):
    from megaplan.cli.main import run  # noqa: PLC0415

    assert run(["explain", name]) == 0
    printed = capsys.readouterr().out
    assert FORMULAS[name].summary.split(",")[0][:40] in printed
    assert "units: " + FORMULAS[name].unit in printed
