"""Low-rank adapters on a frozen model: work that they add, and work that freezing removes."""

import pytest

from megaplan.cost.blocks import trained_elements
from megaplan.cost.step.blocks import ledger_of
from megaplan.cost.step.data import once_of
from megaplan.cost.step.gemm import CAST_BYTES, SUM_BYTES
from megaplan.cost.step.launch import ADAPTER_KERNELS
from megaplan.cost.step.parameters import trained
from megaplan.cost.step.predict import predict_step
from megaplan.cost.step.workload import OPTIMIZER_BYTES, BatchShape, Machine, MeshShape, Sharded, Software, StageShape, TimedStep
from megaplan.devices import load_device
from megaplan.inventory.build import build_inventory
from megaplan.spec.models import Spec

RANK, HIDDEN, FFN = 16, 1024, 4096
MODEL = {
    "pattern": "AD",
    "num_layers": 8,
    "hidden_size": HIDDEN,
    "vocab_size": 32000,
    "attention": {"kind": "gqa", "num_heads": 16, "num_kv_heads": 4, "head_dim": 64},
    "mlp": {"ffn_hidden_size": FFN},
}


def spec_of(families, lora=True):
    whole = {"format": "megaplan.spec/1", "name": "m", "model": MODEL, "batch": {"micro_batch_size": 1, "seq_length": 2048}}
    return Spec.model_validate(whole | ({"lora": {"rank": RANK, "alpha": 32.0, "families": families}} if lora else {}))


def work_of(families=None, *, lora=True, dtype="bf16", sharded=None, **degrees):
    spec, software = spec_of(families, lora), Software("megatron-bridge", "26.04", dtype=dtype, sharded=sharded)
    mesh, machine = MeshShape(**{"world": 8, "dp": 8, **degrees}), Machine.of(load_device("h100-sxm"))
    stages = (StageShape(1.0, {"A": 4.0, "D": 4.0}, True, True),)
    return TimedStep(spec, build_inventory(spec), mesh, BatchShape(1, 2048, 4), software, machine, stages)


def test_trained_elements_are_those_of_the_inventorys_adapters():
    families = ["o_proj", "down_proj"]
    adapters = sum(trained_elements(block) for block in build_inventory(spec_of(families)).layers)
    assert sum(trained(work_of(families))) == adapters
    assert sum(trained(work_of(families, pp=2))) == adapters / 2
    assert sum(trained(work_of(families, tp=2))) < adapters


def test_a_frozen_linear_has_no_weight_gradient_and_an_adapter_two_narrow_products():
    whole, frozen = ledger_of(work_of(lora=False), "D"), ledger_of(work_of(["q_proj"]), "D")
    assert (len(whole.products), len(frozen.products)) == (6, 4)
    adapted = ledger_of(work_of(["down_proj"]), "D")
    narrow = [product for product in adapted.products if product not in frozen.products]
    assert len(narrow) == 6
    assert sum(product.flops for product in narrow) == 3 * 2 * 2048 * RANK * (HIDDEN + FFN)
    moved = {run: sum(each.moved for each in adapted.moved if each.run == run) for run in (0, 1)}
    plain = {run: sum(each.moved for each in frozen.moved if each.run == run) for run in (0, 1)}
    assert moved[0] - plain[0] == SUM_BYTES * 2048 * HIDDEN
    assert moved[1] - plain[1] == SUM_BYTES * 2048 * FFN
    assert tuple(more - plain for more, plain in zip(adapted.kernels, frozen.kernels, strict=True)) == ADAPTER_KERNELS


def test_a_frozen_linear_is_cast_for_two_products_instead_of_three():
    def casts(work):
        return sum(each.moved for each in ledger_of(work, "D").moved if each.kind == "cast.fp8")

    assert casts(work_of(["q_proj"], dtype="fp8")) == casts(work_of(lora=False, dtype="fp8")) * (CAST_BYTES - 1) / CAST_BYTES


def test_adapters_alone_are_reduced_gathered_and_updated():
    work = work_of()
    found, elements = once_of(work), sum(trained(work))
    assert (found.dense.reduced, found.dense.gathered) == (2 * elements, 2 * elements)
    assert found.optimizer_bytes == OPTIMIZER_BYTES * elements / 8
    sharded = once_of(work_of(sharded=Sharded("fsdp2")))
    assert sharded.sharded.reduced == 4 * elements
    plain = once_of(work_of(lora=False, sharded=Sharded("fsdp2")))
    assert sharded.sharded.gathered == plain.sharded.gathered + 2 * elements


def test_few_adapters_are_faster_than_many_and_multiply_less_than_training():
    """Narrow products and sums on every linear of a small model take longer than the weight gradients that they replace."""
    few, every, trained = (predict_step(work) for work in (work_of(["q_proj"]), work_of(), work_of(lora=False)))
    assert few.seconds < every.seconds
    assert few.terms["gemm"] < trained.terms["gemm"]


@pytest.mark.parametrize("tp", [1, 2])
def test_a_cut_linear_sends_the_narrow_stream(tp):
    sent = {
        families: sum(each.moved for each in ledger_of(work_of([families], tp=tp), "A").transfers if each.run == 0)
        for families in ("q_proj", "up_proj")
    }
    assert sent["q_proj"] - sent["up_proj"] == (tp - 1) / tp * 2 * 2048 * RANK
