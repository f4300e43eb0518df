"""Tensors that a TP group sends, block by block; a group of one sends nothing."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megaplan.inventory.build import build_inventory
from megaplan.layout.build import build_layout
from megaplan.spec.models import Spec
from megarun.engine.build import build_stage, materialise
from megarun.model.rotary import Rotary
from megarun.model.stage import Stage
from megarun.parallel.apply.recompute import recompute_stage
from megarun.parallel.apply.weight_gradients import WeightGradients
from megarun.parallel.groups.mesh import build_mesh
from megarun.parallel.groups.shared_gradients import sum_replicated
from megarun.parallel.groups.tensor import ALONE, tensor_parallel
from megarun.trace.fake import lone_rank

pytestmark = pytest.mark.runtime
CPU = torch.device("cpu")
GATHER, REDUCE, SUM = "gather", "reduce", "sum"
NAMES = {"c10d._allgather_base_.default": GATHER, "c10d._reduce_scatter_base_.default": REDUCE, "c10d.allreduce_.default": SUM}
MLA = {"kind": "mla", "num_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}


class Sent(TorchDispatchMode):
    """Counts collectives and the bytes of their whole tensors, over all sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.nbytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = NAMES.get(str(func))
        if name is not None:
            whole: Tensor = args[1] if name is REDUCE else args[0]
            self.counts[name] += 1
            self.nbytes[name] += sum(t.nbytes for t in whole) if isinstance(whole, list) else whole.nbytes
        return func(*args, **(kwargs or {}))


def built(spec_with: Any, letter: str, policy: str = "none", **model: Any) -> tuple[Spec, Stage]:
    overrides = {"model.pattern": letter, "model.num_layers": 2, "model.recurrent.num_heads": 4, "mesh.tp": 2, "recompute.default": policy}
    overrides |= {f"model.{key}": value for key, value in model.items()}
    spec = Spec.model_validate(spec_with(overrides | {"batch.micro_batch_size": 1}))
    inventory = build_inventory(spec)
    tp = tensor_parallel(build_mesh(spec.mesh, CPU))
    stage = build_stage(spec, inventory, build_layout(spec, inventory, [(0, 2)]).slots[0], tp)
    recompute_stage(stage, spec, inventory)
    materialise(stage, CPU)
    for parameter in stage.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return spec, stage


def run_block(spec: Spec, stage: Stage) -> tuple[Sent, Sent]:
    """Forward and backward of the first layer."""
    batch = spec.batch
    x = torch.randn(batch.micro_batch_size, batch.seq_length // 2, spec.model.hidden_size, requires_grad=True)
    rotary = Rotary(stage.rope_cos, stage.rope_sin) if stage.attention is not None else None
    with Sent() as forward:
        y = stage.layers["0"](x, rotary)
    with Sent() as backward:
        torch.autograd.backward(y, torch.ones_like(y))
    return forward, backward


@pytest.mark.requirement("R-32")
@pytest.mark.parametrize(
    ("letter", "policy", "model", "forward", "backward"),
    [
        ("A", "none", {}, {GATHER: 1, REDUCE: 1}, {GATHER: 2, REDUCE: 1}),
        ("A", "selective", {}, {GATHER: 1, REDUCE: 1}, {GATHER: 2, REDUCE: 1}),
        ("A", "full", {}, {GATHER: 1, REDUCE: 1}, {GATHER: 3, REDUCE: 1}),
        ("A", "none", {"attention": MLA}, {GATHER: 3, REDUCE: 1}, {GATHER: 3, REDUCE: 3}),
        ("M", "none", {}, {GATHER: 1, REDUCE: 1}, {GATHER: 2, REDUCE: 1}),
        ("M", "selective", {}, {GATHER: 1, REDUCE: 1}, {GATHER: 3, REDUCE: 1}),
        ("R", "none", {}, {GATHER: 1, REDUCE: 1, SUM: 1}, {GATHER: 2, REDUCE: 1, SUM: 1}),
        ("D", "none", {}, {GATHER: 1, REDUCE: 1}, {GATHER: 2, REDUCE: 1}),
        ("D", "full", {}, {GATHER: 1, REDUCE: 1}, {GATHER: 3, REDUCE: 1}),
        ("E", "none", {}, {GATHER: 1, REDUCE: 1}, {GATHER: 2, REDUCE: 1}),
        ("E", "none", {"moe.shared_ffn_hidden_size": 0}, {}, {}),
    ],
)
def test_collectives_of_a_block(
    letter: str, policy: str, model: dict[str, Any], forward: dict[str, int], backward: dict[str, int], spec_with: Any
) -> None:
    """One gather for all projections of an input, one more in backward; recompute gathers once again and never reduces again."""
    with lone_rank(0, 2):
        found = run_block(*built(spec_with, letter, policy, **model))
    assert [dict(sent.counts) for sent in found] == [forward, backward]


def test_a_dense_block_moves_the_residual_stream(spec_with: Any) -> None:
    """Each collective of D is of the whole stream: 24 tokens of 32 fp32 numbers."""
    with lone_rank(0, 2):
        forward, backward = run_block(*built(spec_with, "D"))
    assert (forward.nbytes[GATHER], forward.nbytes[REDUCE]) == (24 * 32 * 4, 24 * 32 * 4)
    assert (backward.nbytes[GATHER], backward.nbytes[REDUCE]) == (2 * 24 * 32 * 4, 24 * 32 * 4)


def test_a_split_backward_gathers_in_its_second_half(spec_with: Any) -> None:
    """I sends what the stage before waits for; W gathers the input once for all its weights."""
    with lone_rank(0, 2):
        spec, stage = built(spec_with, "A")
        store, made = WeightGradients(stage), []
        store.accumulate = lambda weight, _: made.append(weight)  # type: ignore[method-assign]
        with store.deferring():
            _, first = run_block(spec, stage)
        with Sent() as second:
            store.take()()
    assert dict(first.counts) == {GATHER: 1, REDUCE: 1}
    assert dict(second.counts) == {GATHER: 1}
    block = stage.layers["0"]
    assert {id(weight) for weight in made} == {id(block.get_parameter(f"{name}_proj.weight")) for name in "qkv"}


def test_a_group_of_one_sends_nothing() -> None:
    """And hands tensors on as they are."""
    x = torch.ones(1, 2, 3)
    with Sent() as sent:
        assert ALONE.gather(x) is x
        assert ALONE.reduce(x) is x
        assert ALONE.sum(x) is x
        sum_replicated([("x", torch.nn.Parameter(x))], ALONE)
    assert not sent.counts
    with pytest.raises(RuntimeError, match="a TP group of one rank has no process group"):
        ALONE.start_gather(x)


def test_a_replicated_gradient_that_is_missing_is_named(spec_with: Any) -> None:
    """It would be summed with nothing, on one rank."""
    with lone_rank(0, 2):
        _, stage = built(spec_with, "D")
        with pytest.raises(RuntimeError, match=r"final_norm\.weight has no gradient to share"):
            sum_replicated([("final_norm.weight", stage.final_norm.weight)], stage.tp)
