"""The operations that `benchmarks/gpu/run.py` checks and times: size, inputs, and ideal bytes and FLOPs from megaplan's cost model.

Each operation has a full size and a small one; the small ones check the harness on a machine without a GPU.
"""

from collections.abc import Callable
from functools import cache, partial

import torch
from gpu.case import KernelCase
from gpu.scan_cases import delta_case, m2rnn_case, mamba3_case, selective_case, ssd_case
from torch import Tensor

from megakernels import (
    attention,
    causal_conv1d,
    cross_entropy,
    dispatch_plan,
    gated_add,
    gated_conv1d,
    gated_rms_norm,
    head_gated_norm,
    indexed_attention,
    linear_cross_entropy,
    relu2,
    rms_norm,
    rope,
    routed_experts,
    swiglu,
)
from megakernels.facts import Work
from megakernels.ops.activation.facts import activation
from megakernels.ops.attention.facts import AttentionSizes, pairs_before
from megakernels.ops.causal_conv1d.facts import causal_conv1d as conv_work
from megakernels.ops.cross_entropy.facts import cross_entropy as loss_work
from megakernels.ops.gated_conv1d.facts import GatedConvolutionSizes
from megakernels.ops.library import linear
from megakernels.ops.rms_norm.facts import gated_norm, norm
from megakernels.ops.rope.facts import rope as rope_work
from megaplan.blocks.work import Workload
from megaplan.families.moe.composition import moe_work
from megaplan.spec.models import MixtureOfExperts
from megarun.model.rotary import Rotary, rotary_table
from megarun.optim.muon import orthogonalise

EPS = 1e-5


def cases(small: bool = False, small_length: int = 65) -> list[KernelCase]:
    """The operations at their full sizes, or at sizes for a CPU with so many positions."""
    batch, seq_length = (1, small_length) if small else (4, 4096)
    load = Workload(seq_length=seq_length, num_tokens=batch * seq_length, itemsize=2)
    rows = (batch, seq_length)
    found = [
        *[_norm(load, rows, width) for width in ((96,) if small else (4096, 8192))],
        _gated_norm(load, rows, *((96, 3) if small else (8192, 8))),
        _activation(load, rows, 96 if small else 14336, gated=True),
        _activation(load, rows, 96 if small else 14336, gated=False),
        _gated_add(load, rows, 96 if small else 3584),
        _conv(load, rows, 96 if small else 8448),
        _gated_conv(load, rows, 96 if small else 2048),
        _rope(load, rows, *((4, 16) if small else (32, 128))),
        _attention(load, rows, *((4, 2, 16, 16) if small else (32, 8, 128, 128))),
        _attention(load, rows, *((4, 4, 24, 16) if small else (32, 32, 96, 64))),
        _attention(load, rows, *((4, 2, 16, 16, 9) if small else (32, 8, 128, 128, 1024))),
        _attention(load, rows, *((4, 2, 16, 16, None, 20) if small else (32, 8, 128, 128, None, 1000))),
        _attention(load, rows, *((4, 1, 32, 32) if small else (16, 4, 256, 256))),
        _attention(load, rows, *((4, 1, 32, 32) if small else (16, 8, 256, 256)), cap=50.0),
        _indexed(load, rows, *((2, 24, 16, 2, 8, 20) if small else (28, 96, 64, 8, 64, 2048))),
        _indexed(load, rows, *((2, 24, 16, 3, 16, 9) if small else (16, 192, 128, 64, 128, 2048))),
        selective_case(load, rows, *((40, 16) if small else (8192, 16))),
        ssd_case(load, rows, *((4, 16, 16, 2, 32) if small else (64, 64, 128, 1, 256))),
        ssd_case(load, rows, *((2, 24, 16, 1, 32) if small else (32, 128, 128, 8, 256))),
        mamba3_case(load, rows, *((4, 16, 16, 2, 1, 4) if small else (64, 64, 128, 1, 1, 32))),
        mamba3_case(load, rows, *((4, 16, 16, 2, 4, 4) if small else (112, 64, 128, 8, 4, 32))),
        delta_case(load, rows, *((2, 4, 16, 24) if small else (16, 32, 128, 128))),
        delta_case(load, rows, *((2, 2, 16, 16) if small else (32, 32, 128, 128)), per_row=True),
        _head_norm(load, rows, *((3, 24) if small else (32, 128))),
        m2rnn_case(load, rows, *((2, 8, 4) if small else (44, 64, 16))),
        _cross_entropy(load, rows, 200 if small else 65536),
        _linear_cross_entropy(load, rows, *((24, 200) if small else (4096, 131072))),
        _moe(*(((1, small_length), 24, 16, 6, 2) if small else ((4, 8192), 2048, 768, 128, 8))),
        _newton_schulz(*((2, 24, 40) if small else (8, 2048, 5632))),
        m2rnn_case(load, rows, *((2, 24, 8) if small else (32, 128, 16))),
    ]
    return sorted(found, key=lambda case: case.name)


def _norm(load: Workload, rows: tuple[int, int], width: int) -> KernelCase:
    shapes = {"x": (*rows, width), "weight": (width,)}
    return KernelCase(f"rms_norm {width}", load.num_tokens, shapes, partial(rms_norm, eps=EPS), norm(width, load.itemsize), "copy")


def _gated_norm(load: Workload, rows: tuple[int, int], width: int, num_groups: int) -> KernelCase:
    shapes = {"x": (*rows, width), "gate": (*rows, width), "weight": (width,)}
    call = partial(gated_rms_norm, eps=EPS, num_groups=num_groups)
    return KernelCase(
        f"gated_rms_norm {width}/{num_groups}", load.num_tokens, shapes, call, gated_norm(width, num_groups, load.itemsize), "copy"
    )


def _activation(load: Workload, rows: tuple[int, int], width: int, *, gated: bool) -> KernelCase:
    name, names = ("swiglu", ("gate", "up")) if gated else ("relu2", ("x",))
    work = activation(width, load.itemsize, gated=gated)
    return KernelCase(f"{name} {width}", load.num_tokens, dict.fromkeys(names, (*rows, width)), swiglu if gated else relu2, work, "copy")


def _gated_add(load: Workload, rows: tuple[int, int], width: int) -> KernelCase:
    shapes = {"x": (*rows, width), "side": (*rows, width), "gates": (2,)}
    moved = Work(moved_forward=3 * width * load.itemsize, moved_input=4 * width * load.itemsize)
    return KernelCase(f"gated_add {width}", load.num_tokens, shapes, gated_add, moved, "copy")


def _conv(load: Workload, rows: tuple[int, int], channels: int, taps: int = 4) -> KernelCase:
    shapes: dict[str, tuple[int, ...]] = {"x": (*rows, channels), "weight": (channels, taps), "bias": (channels,)}
    work = conv_work(channels, taps, load.itemsize)
    return KernelCase(f"causal_conv1d {channels}x{taps}", load.num_tokens, shapes, causal_conv1d, work, "copy")


def _gated_conv(load: Workload, rows: tuple[int, int], channels: int, taps: int = 3) -> KernelCase:
    sequences = dict.fromkeys(("input_gate", "output_gate", "value"), (*rows, channels))
    shapes: dict[str, tuple[int, ...]] = {**sequences, "weight": (channels, taps)}
    work = GatedConvolutionSizes(*rows, channels, taps, False, load.itemsize).work()
    return KernelCase(f"gated_conv1d {channels}x{taps}", load.num_tokens, shapes, gated_conv1d, work, "copy")


def _rope(load: Workload, rows: tuple[int, int], heads: int, width: int) -> KernelCase:
    @cache
    def table(device: torch.device) -> Rotary:
        return rotary_table(torch.arange(rows[1]), width, 1e4, device)

    def call(x: Tensor) -> Tensor:
        angles, length = table(x.device), x.shape[1]
        return rope(x, angles.cos[:length], angles.sin[:length])

    return KernelCase(
        f"rope {heads}x{width}", load.num_tokens, {"x": (*rows, heads, width)}, call, rope_work(heads * width, load.itemsize), "copy"
    )


def _attention(
    load: Workload,
    rows: tuple[int, int],
    heads: int,
    groups: int,
    width: int,
    value: int,
    window: int | None = None,
    document: int = 0,
    cap: float | None = None,
) -> KernelCase:
    """Case of attention; with `document`, rows hold documents of so many positions, and FLOPs count only pairs within one document."""

    @cache
    def starts(device: torch.device, length: int) -> Tensor:
        at = torch.arange(length, dtype=torch.int32, device=device)
        return at // document * document

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        begins = starts(q.device, q.shape[1]).expand(q.shape[:2]).contiguous() if document else None
        return attention(q, k, v, width**-0.5, window, begins, cap=cap)

    shapes: dict[str, tuple[int, ...]] = {"q": (*rows, heads, width), "k": (*rows, groups, width), "v": (*rows, groups, value)}
    each = load._replace(seq_length=document) if document else load
    shape = rows[0], each.seq_length, each.seq_length, heads, groups, width, value, each.itemsize, window
    work = AttentionSizes(*shape).work()
    kind = f" window {window}" if window else f" documents {document}" if document else f" cap {cap}" if cap else ""
    return KernelCase(
        f"attention {heads}/{groups} {width}/{value}{kind}",
        load.num_tokens,
        shapes,
        call,
        work,
        "matmul",
        window=window,
        documents=bool(document),
        capped=cap is not None,
        tile=128,
    )


def _indexed(
    load: Workload, rows: tuple[int, int], heads: int, width: int, value: int, index_heads: int, index_width: int, top_k: int
) -> KernelCase:
    """FLOPs count all visible pairs, of which the kernels mask those that are not chosen."""
    numbers = {"scale": width**-0.5, "top_k": top_k, "loss_factor": 1.0 / (load.num_tokens * heads), "eps": EPS}

    @cache
    def table(device: torch.device, length: int) -> Rotary:
        return rotary_table(torch.arange(length), index_width // 2, 10_000.0, device)

    def call(*tensors: Tensor) -> Tensor:
        angles = table(tensors[0].device, tensors[0].shape[1])
        return indexed_attention(*tensors, angles.cos, angles.sin, **numbers)

    def by_name(**inputs: Tensor) -> Tensor:
        return call(*inputs.values())

    shapes: dict[str, tuple[int, ...]] = {
        "q": (*rows, heads, width),
        "k": (*rows, heads, width),
        "v": (*rows, heads, value),
        "index_q": (*rows, index_heads, index_width),
        "index_k": (*rows, index_width),
        "index_weights": (*rows, index_heads),
        "k_scale": (index_width,),
        "k_bias": (index_width,),
    }
    attended = AttentionSizes(*rows, load.seq_length, heads, heads, width, value, load.itemsize).work()
    scores = -(-2 * pairs_before(load.seq_length, None) * index_heads * (index_width + 1) // load.seq_length)
    name = f"indexed_attention {heads} {width}/{value} index {index_heads}x{index_width} of {top_k}"
    return KernelCase(name, load.num_tokens, shapes, by_name, attended + Work(scores, 3 * scores, 0, 0), "matmul", tile=128)


def _head_norm(load: Workload, rows: tuple[int, int], heads: int, width: int) -> KernelCase:
    shapes = {"x": (*rows, heads, width), "gate": (*rows, heads, width), "weight": (width,)}
    work = gated_norm(heads * width, heads, load.itemsize)
    return KernelCase(f"head_gated_norm {heads}x{width}", load.num_tokens, shapes, partial(head_gated_norm, eps=EPS), work, "copy")


def _labels(rows: tuple[int, int], vocab_size: int) -> Callable[[Tensor], Tensor]:
    """Labels of the rows that an input [B, T, …] has, flat."""

    @cache
    def table(device: torch.device) -> Tensor:
        return torch.randint(vocab_size, rows, generator=torch.Generator().manual_seed(1)).to(device)

    return lambda x: table(x.device)[: x.shape[0], : x.shape[1]].flatten()


def _cross_entropy(load: Workload, rows: tuple[int, int], vocab_size: int) -> KernelCase:
    labels = _labels(rows, vocab_size)

    def call(logits: Tensor) -> Tensor:
        return cross_entropy(logits.flatten(0, 1), labels(logits))

    shapes = {"logits": (*rows, vocab_size)}
    work = loss_work(vocab_size, load.itemsize)
    return KernelCase(f"cross_entropy {vocab_size}", load.num_tokens, shapes, call, work, "copy", labels=labels)


def _linear_cross_entropy(load: Workload, rows: tuple[int, int], hidden_size: int, vocab_size: int) -> KernelCase:
    """FLOPs without those of the logits that backward makes again: what is saved against a stored product is not counted as work."""
    labels = _labels(rows, vocab_size)

    def call(x: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(x.flatten(0, 1), weight, labels(x))

    shapes: dict[str, tuple[int, ...]] = {"x": (*rows, hidden_size), "weight": (vocab_size, hidden_size)}
    work = linear(hidden_size, vocab_size, load.itemsize) + loss_work(vocab_size, load.itemsize)
    name, scales = f"linear_cross_entropy {hidden_size}x{vocab_size}", {"weight": hidden_size**-0.5}
    return KernelCase(name, load.num_tokens, shapes, call, work, "matmul", scales, labels=labels)


def _moe(rows: tuple[int, int], hidden_size: int, width: int, num_experts: int, top_k: int) -> KernelCase:
    """Sorting by expert, up, down, and the sum of each token's slots; what plain torch does with sorted copies and `grouped_mm`."""

    @cache
    def chosen(device: torch.device) -> Tensor:
        scores = torch.rand(*rows, num_experts, generator=torch.Generator().manual_seed(1))
        return scores.topk(top_k).indices.int().to(device)

    def call(x: Tensor, weights: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        indices = chosen(x.device)[: x.shape[0], : x.shape[1]].flatten(0, 1)
        wide = weights.flatten(0, 1).to(torch.float64 if x.dtype == torch.float64 else torch.float32)
        order, counts = dispatch_plan(indices, num_experts)
        return routed_experts(x.flatten(0, 1), wide, order, counts, gate, up, down, "swiglu").view(x.shape)

    num_tokens, bank = rows[0] * rows[1], (num_experts, width, hidden_size)
    shapes: dict[str, tuple[int, ...]] = {"x": (*rows, hidden_size), "weights": (*rows, top_k), "gate": bank, "up": bank}
    shapes["down"] = (num_experts, hidden_size, width)
    scales = {"weights": 1 / top_k, "gate": hidden_size**-0.5, "up": hidden_size**-0.5, "down": width**-0.5}
    moe = MixtureOfExperts(num_experts=num_experts, top_k=top_k, ffn_hidden_size=width, activation="swiglu")
    load = Workload(rows[1], num_tokens, 2, gathers=True)
    work = next(op.work for op in moe_work(load, moe, hidden_size) if op.name == "experts")
    return KernelCase(f"moe {num_experts}x{hidden_size}x{width}/{top_k}", num_tokens, shapes, call, work, "matmul", scales)


def _newton_schulz(num_matrices: int, num_rows: int, num_columns: int) -> KernelCase:
    """One step of Muon's iteration, with the FLOPs that symmetry leaves: half of x xᵀ and of its square, and the product with x whole."""
    work = Work(forward=num_matrices * (3 * num_rows**2 * num_columns + num_rows**3))
    shapes = {"matrices": (num_matrices, num_rows, num_columns)}
    name, call = f"newton_schulz {num_matrices}x{num_rows}x{num_columns}", partial(orthogonalise, num_steps=1)
    return KernelCase(name, 1, shapes, call, work, "matmul", differentiable=False)
