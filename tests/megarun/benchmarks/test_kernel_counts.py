"""The facts of linears and banks in eight bits, compared with the roofline's counts in a training step."""

import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))  # rooflines

pytest.importorskip("triton")
from rooflines.runs import count_ranks  # noqa: E402
from rooflines.work import Work  # noqa: E402

import megaplan  # noqa: E402
from megakernels.facts import Pass  # noqa: E402
from megakernels.ops.fp8_linear.facts import summed  # noqa: E402
from megakernels.ops.moe.facts import ExpertSizes  # noqa: E402
from megaplan.cost.blocks import layer_works, rank_workload  # noqa: E402
from megaplan.cost.low_precision import EightBits, in_eight_bits, saved_by_attention, sharing  # noqa: E402
from megarun.job.job import Job  # noqa: E402

pytestmark = pytest.mark.runtime


def spec(pattern: str, hidden_size: int, **sections: Any) -> dict[str, Any]:
    """One microbatch of two sequences of 1,024."""
    model = {"pattern": pattern, "num_layers": len(pattern), "hidden_size": hidden_size, "vocab_size": 4096, **sections}
    rest = {"schedule": {"kind": "1f1b", "num_microbatches": 3}, "batch": {"micro_batch_size": 2, "seq_length": 1024}}
    return {"format": "megaplan.spec/1", "name": "counts", "model": model, **rest, "host": {"kernels": "triton"}}


BANKS = [("swiglu", True, 4), ("relu2", False, 1)]
"""Activation, biases and slots."""


IN_EIGHT_BITS = pytest.mark.parametrize(
    ("recipe", "kernels"),
    [
        ("fp8_delayed", "triton"),
        ("fp8_current", "reference"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("fp8_rowwise", "triton"), ("fp8_current", "triton"), ("fp8_rowwise", "reference"), ("fp8_delayed", "reference"))
        ),
    ],
)


@IN_EIGHT_BITS
@pytest.mark.parametrize(("activation", "bias", "top_k"), BANKS)
def test_banks_in_eight_bits(recipe: str, kernels: str, activation: str, bias: bool, top_k: int) -> None:
    """Bytes to 5 %, FLOPs to 7 %, which fill each expert's rows up to a multiple of 16, launches to 7 %, with the sums over slots."""
    moe = {"num_experts": 16, "top_k": top_k, "ffn_hidden_size": 512, "activation": activation, "bias": bias}
    source = spec("E", 1024, moe=moe) | {"precision": {"params": "bf16", "recipe": {"name": recipe}}, "host": {"kernels": kernels}}
    loaded = megaplan.load(source)
    (block,) = loaded.inventory.layers
    load = rank_workload(loaded.spec, loaded.spec.precision.of(block.family))._replace(gathers=True)
    bank = EightBits(loaded.spec, load.itemsize, "none")
    (op,) = (op for op in layer_works(load, loaded.spec.model, block) if isinstance(op.facts, ExpertSizes))
    passes = bank.passes(op._replace(weights=0), load.num_tokens, shares=False)  # without the sums of gradients
    row = load.num_tokens * 1024
    sums = Pass(2 * (top_k + 1) * row, 0, 2) if kernels == "triton" else Pass((22 * top_k - 6) * row, 0, 3 * top_k + 2)
    names = {"megakernels.fp8_experts": passes[0], "megakernels.fp8_experts_backward": passes[1]}
    counted = [
        event.done
        for event in count_ranks(Job(loaded.spec, loaded.inventory, loaded.layout))[0]
        if event.action is not None and event.action.microbatch == 1 and isinstance(event.done, Work) and event.done.op in names
    ]
    assert len(counted) == len(names)
    for done in counted:
        ours = summed(*names[done.op], sums)
        assert ours.num_bytes == pytest.approx(done.num_bytes, rel=0.05)
        assert names[done.op].product.flops == pytest.approx(done.product_flops["fp8"], rel=0.07)
        assert ours.launches == pytest.approx(done.launches, rel=0.07)


SIDES = {"fp8_quantize": 0, "fp8_linears": 0, "fp8_input_gradients": 1, "fp8_weight_gradients": 2}
"""Operations in eight bits, and the pass each belongs to: F, I or W."""


def scaled_passes(source: Any) -> list[list[int]]:
    """Bytes, FLOPs and launches of F, I and W of all linears by the cost model."""
    loaded, found = megaplan.load(source), [[0, 0, 0] for _ in range(3)]
    for block in loaded.inventory.layers:
        load = rank_workload(loaded.spec, loaded.spec.precision.of(block.family))
        ops, scaled = layer_works(load, loaded.spec.model, block), EightBits(loaded.spec, load.itemsize, "none")
        shared, saved = sharing(ops), saved_by_attention(ops)
        for index, op in enumerate(ops):
            passes = scaled.passes(op, load.num_tokens, shares=index in shared, keeps=index not in saved) if in_eight_bits(op) else ()
            for own, parts in zip(found, passes, strict=False):
                counts = ((part.num_bytes, part.flops, part.launches) for part in parts)
                own[:] = [total + sum(values) for total, values in zip(own, zip(*counts, strict=True), strict=True)]
    return found


@IN_EIGHT_BITS
def test_linears_in_eight_bits(recipe: str, kernels: str) -> None:
    """Bytes to 5 %, FLOPs exactly, launches to 10 %; in plain torch 7 and 14 %."""
    attention, mlp = {"kind": "gqa", "num_heads": 8, "num_kv_heads": 4, "head_dim": 128}, {"ffn_hidden_size": 2816, "activation": "swiglu"}
    source = spec("AD", 1024, attention=attention, mlp=mlp)
    source |= {"precision": {"recipe": {"name": recipe}}, "host": {"kernels": kernels}}
    loaded, theirs = megaplan.load(source), [[0, 0, 0] for _ in range(3)]
    for event in count_ranks(Job(loaded.spec, loaded.inventory, loaded.layout))[0]:
        if event.action is None or event.action.microbatch != 1 or not isinstance(event.done, Work) or "fp8" not in event.done.op:
            continue
        own = theirs[SIDES[event.done.op.removeprefix("megakernels.")]]
        own[0] += event.done.num_bytes
        own[1] += event.done.product_flops.get("fp8", 0)
        own[2] += event.done.launches
    for ours, counts in zip(scaled_passes(source), theirs, strict=True):
        assert ours[0] == pytest.approx(counts[0], rel=0.05 if kernels == "triton" else 0.07)
        assert ours[1] == counts[1] > 0
        assert ours[2] == pytest.approx(counts[2], rel=0.1 if kernels == "triton" else 0.14)
