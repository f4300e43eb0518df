"""Bytes of modules that run as separate torch operations equal those counted by torch's dispatcher on the same modules."""

from collections import Counter
from random import Random
from typing import Any

import pytest

import megaplan
from megakernels.ops.attention.facts import AttentionSizes
from megaplan.cost.blocks import layer_works
from megaplan.cost.step import own_modules, transfers
from megaplan.cost.step.blocks import _load, kinds_in
from megaplan.cost.step.from_spec import step_of, timed_step
from megaplan.cost.step.ledger import BACKWARD, FORWARD, Ledger
from megaplan.cost.step.workload import TimedStep
from megaplan.inventory.build import build_inventory

torch = pytest.importorskip("torch")
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

SEEDS = range(12)
VIEWS = {
    *("view", "_unsafe_view", "transpose", "permute", "expand", "slice", "split", "select", "unsqueeze", "squeeze", "t", "detach", "alias"),
    *("split_with_sizes", "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "as_strided"),
}


class Counted(TorchDispatchMode):
    """Bytes that operations read and write; operands with fewer elements than `least` are angles and sums of rows."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least, self.moved = least, 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made, name = op(*args, **(kwargs or {})), op.overloadpacket.__name__
        if name == "slice_backward":  # zeros of the full tensor, and a copy of the part
            self.moved += _bytes(made) + 2 * _bytes(args[0])
        elif name not in VIEWS:
            self.moved += sum(_bytes(each) for each in tree_leaves((args, made)) if _is_counted(each, self.least))
        return made


def _is_counted(each: Any, least: int) -> bool:
    return isinstance(each, torch.Tensor) and each.numel() >= least


def _bytes(tensor: Any) -> int:
    """Bytes of the elements that are there: an expanded dim has one."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride else 1
    return elements * tensor.element_size()


class Opaque(torch.autograd.Function):
    """A kernel or a product, whose own bytes are counted elsewhere."""

    @staticmethod
    def forward(ctx: Any, shape: Any, *inputs: Any) -> Any:
        ctx.shapes = [each.shape for each in inputs]
        return torch.empty(shape, dtype=torch.bfloat16)

    @staticmethod
    def backward(ctx: Any, _: Any) -> Any:
        return None, *(torch.empty(shape, dtype=torch.bfloat16) for shape in ctx.shapes)


def counted(body: Any, inputs: list[Any], least: int) -> tuple[int, int]:
    """Bytes of a module's forward and backward."""
    with Counted(least) as forward:
        made = body(*inputs)
    gradient = torch.empty(made.shape, dtype=made.dtype)
    with Counted(least) as backward:
        torch.autograd.backward(made, gradient, inputs=inputs)
    return forward.moved, backward.moved


def turned(heads: Any, width: int) -> Any:
    """Heads whose first `width` values are rotated, as GPT-NeoX and Megatron-LM do without a kernel."""
    cos = torch.ones(heads.shape[0], 1, 1, width, dtype=torch.bfloat16)
    part, rest = (heads, None) if width == heads.shape[-1] else (heads[..., :width], heads[..., width:])
    half = width // 2
    found = part * cos + torch.cat((-part[..., half:], part[..., :half]), -1) * cos
    return found if rest is None else torch.cat((found, rest), -1)


def attention(sizes: AttentionSizes, rotated: int, *, flash: bool, packs: bool) -> Any:
    """The path of heads from the projection (columns: a key head's queries, key and value) to the next projection."""
    batch, positions, heads, groups, width = sizes.batch, sizes.queries, sizes.heads, sizes.groups, sizes.width

    def body(made: Any) -> Any:
        parts = made.view(positions, batch, groups, (heads // groups + 2) * width).split((heads // groups * width, width, width), dim=-1)
        query, key, value = (each.view(positions, batch, -1, width) for each in parts)
        if rotated:
            query, key = turned(query, rotated), turned(key, rotated)
        if groups < heads:
            key, value = key.expand(positions, batch, heads, width), value.expand(positions, batch, heads, width)
        if not flash:
            key, value = (each if groups == heads else each.contiguous() for each in (key, value))
            return Opaque.apply((batch, heads, positions, width), query, key, value).permute(2, 0, 1, 3).contiguous()
        first = [each.transpose(0, 1).contiguous().view(batch * positions, 1, heads, width) for each in (query, key, value)]
        made = Opaque.apply((batch * positions, heads, width), *([torch.concat(first, dim=1)] if packs else first))
        return made.view(batch, positions, heads, width).transpose(0, 1).contiguous()

    return body


def work_of(sizes: AttentionSizes, rotated: int, host: dict[str, Any], **model: Any) -> TimedStep:
    """A step of one layer of attention and one MLP."""
    attention = {"kind": "gqa", "num_heads": sizes.heads, "num_kv_heads": sizes.groups, "head_dim": sizes.width}
    attention |= {"rotary_dim": rotated} if rotated else {"nope_layers": [0, 2]}
    spec = {
        "format": "megaplan.spec/1",
        "name": "m",
        "model": {
            **{"pattern": "AD", "num_layers": 4, "hidden_size": sizes.heads * sizes.width, "vocab_size": 1024, "attention": attention},
            **{"mlp": {"ffn_hidden_size": 4 * sizes.heads * sizes.width, "activation": "gelu"}},
            **model,
        },
        "mesh": {"tp": 1},
        "batch": {"micro_batch_size": sizes.batch, "seq_length": sizes.queries},
        "optimizer": {"matrix": "adamw"},
        "host": {"name": "megatron", "model": "gpt", "transformer_impl": "local", **host},
        "device": {"name": "a100-40gb"},
    }
    job = megaplan.load(spec)
    return timed_step(job.spec, build_inventory(job.spec), ((0, 4),), (0,), step_of(job.spec))


def moved(ledger: Ledger, run: int) -> float:
    return sum(each.moved for each in ledger.moved if each.run == run)


@pytest.mark.parametrize("seed", SEEDS)
def test_bytes_of_heads_are_those_that_torch_counts(seed):
    draw = Random(seed)
    heads, width, flash = draw.choice([2, 4, 6]), draw.choice([32, 64]), draw.random() < 0.6
    neox = draw.random() < 0.5
    rotated = draw.choice([0, width // 4, width // 2, width])
    groups = 1 if draw.random() < 0.3 and not neox else heads
    sizes = AttentionSizes(draw.choice([3, 4]), draw.choice([16, 48]), 0, heads, groups, width, width, 2)
    host = {"attention_backend": "flash" if flash else "unfused", "rope_fusion": False, **({"framework": "gpt-neox"} if neox else {})}
    work, ledger = work_of(sizes, rotated, host), Ledger()
    block = kinds_in(work.inventory).blocks["A"]
    own_modules.heads(ledger, work, layer_works(_load(work), work.spec.model, block), 0.0)
    given = torch.zeros(sizes.queries, sizes.batch, (heads + 2 * groups) * width, dtype=torch.bfloat16, requires_grad=True)
    least = sizes.queries * (rotated or width) + 1  # more than angles have
    found = counted(attention(sizes, rotated, flash=flash, packs=neox), [given], least)
    assert (moved(ledger, FORWARD), moved(ledger, BACKWARD)) == found


def test_again_repeats_the_forward():
    work = work_of(AttentionSizes(2, 16, 16, 4, 4, 32, 32, 2), 32, {"attention_backend": "flash", "framework": "gpt-neox"})
    ops, once, twice = layer_works(_load(work), work.spec.model, kinds_in(work.inventory).blocks["A"]), Ledger(), Ledger()
    own_modules.heads(once, work, ops, 0.0)
    own_modules.heads(twice, work, ops, 1.0)
    assert moved(twice, BACKWARD) == moved(once, BACKWARD) + moved(once, FORWARD)


def test_bytes_of_the_loss_are_those_that_torch_counts():
    tokens, vocab = 32, 512
    logits = torch.zeros(tokens, vocab, dtype=torch.bfloat16, requires_grad=True)

    class Loss(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, logits: Any) -> Any:
            shifted = logits - logits.max(dim=-1).values.unsqueeze(-1)
            torch.exp(shifted, out=shifted)
            shifted.div_(shifted.sum(dim=-1).unsqueeze(-1))
            ctx.save_for_backward(shifted)
            return shifted[:, 0].clone()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return ctx.saved_tensors[0].mul_(gradient.unsqueeze(-1))

    found = counted(lambda given: Loss.apply(given.float()), [logits], tokens * vocab)
    assert found == tuple(each * tokens * vocab for each in own_modules.LOGIT)


@pytest.mark.parametrize("framework", ["megatron-lm", "gpt-neox"])
def test_blocks_side_by_side_gather_and_reduce_once(framework):
    sizes = AttentionSizes(2, 16, 16, 4, 4, 32, 32, 2)
    host = {"framework": framework, "sequence_parallel": False}
    work = work_of(sizes, 32, host, parallel_layers=[1, 3])
    work = type(work)(**{**{name: getattr(work, name) for name in work.__slots__}, "mesh": work.mesh._replace(tp=2, world=2)})
    alone, beside = Ledger(), Ledger()
    transfers.tensor(alone, work)
    transfers.tensor(beside, work, shares=True)
    sent = Counter({run: sum(each.moved for each in alone.transfers if each.run == run) for run in (FORWARD, BACKWARD)})
    assert sum(each.moved for each in beside.transfers) == (sent[BACKWARD] if framework == "gpt-neox" else 0)
