"""One case for each operation: inputs, the public call, an independent formulation, and the contract's saved set.

The formulations use other algorithms than the operations where there is a choice: position by position for the recurrences, the whole score
matrix for attention, one expert and token at a time for the mixture, torch's own functions elsewhere. Autograd differentiates them in fp64.
"""

import itertools
import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megakernels.activation import gelu, relu2, swiglu
from megakernels.attention import attention
from megakernels.causal_conv1d import causal_conv1d
from megakernels.cross_entropy import cross_entropy
from megakernels.indexed_attention import indexed_attention
from megakernels.linear_cross_entropy import linear_cross_entropy
from megakernels.m2rnn import m2rnn
from megakernels.mamba3 import mamba3
from megakernels.moe import combine, dispatch, experts, route, routed_experts
from megakernels.rms_norm import add_rms_norm, gated_rms_norm, rms_norm
from megakernels.rope import mla_kv, rope
from megakernels.side_embedding import gated_add
from megakernels.ssd import ssd

Inputs = Mapping[str, Tensor]
EPS = 1e-5
BATCH = 2


@dataclass(frozen=True)
class Case:
    """An operation at one setting.

    `saved` names the inputs kept for backward; `extra` lists what is kept besides inputs and outputs: shapes, each with the role of its
    dtype.
    """

    name: str
    inputs: Callable[[Callable[..., Tensor], int], dict[str, Tensor]]
    call: Callable[[Inputs], tuple[Tensor, ...]]
    exact: Callable[[Inputs], tuple[Tensor, ...]]
    saved: tuple[str, ...]
    extra: Callable[[int], list[tuple[tuple[int, ...], str]]] = lambda _num_positions: []
    saved_outputs: tuple[int, ...] = ()
    alike: tuple[str, ...] = ()  # inputs whose gradient is the first one's own tensor
    constant: tuple[str, ...] = ()  # floating inputs without a gradient

    def make(self, num_positions: int, dtype: torch.dtype, requires_grad: bool = True) -> dict[str, Tensor]:
        """Inputs of one size: the same values, rounded to `dtype`, on every call. What is fp32 by contract stays fp32 in bf16 runs."""
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.name} {num_positions}".encode()))

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        made = {}
        for name, value in self.inputs(normal, num_positions).items():
            if not value.is_floating_point():
                made[name] = value
                continue
            wide = name in WIDE and dtype == torch.bfloat16
            made[name] = value.to(torch.float32 if wide else dtype).requires_grad_(requires_grad and name not in self.constant)
        return made

    def differentiable(self, inputs: Inputs) -> list[str]:
        return [name for name, value in inputs.items() if value.is_floating_point() and name not in self.constant]


WIDE = ("cos", "sin", "weights")
"""fp32 by contract whatever the activations' dtype."""


def angles(normal: Callable[..., Tensor], num_positions: int, half: int) -> dict[str, Tensor]:
    angle = normal(num_positions, half)
    return {"cos": angle.cos(), "sin": angle.sin()}


def exact_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def exact_gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, num_groups: int) -> Tensor:
    slices = (x * functional.silu(gate)).chunk(num_groups, dim=-1)
    return torch.cat([exact_rms_norm(piece, torch.ones_like(piece[0, 0])) for piece in slices], dim=-1) * weight


def exact_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Complex multiplication by cos + i sin of the pairs (j, j + R/2)."""
    half = cos.shape[-1]
    straight = x.shape[-1] - 2 * half
    pairs = torch.complex(x[..., straight : straight + half], x[..., straight + half :]) * torch.complex(cos, sin)[:, None]
    return torch.cat([x[..., :straight], pairs.real, pairs.imag], dim=-1)


def exact_mla_kv(kv: Tensor, k_rope: Tensor, cos: Tensor, sin: Tensor, nope_dim: int) -> tuple[Tensor, Tensor]:
    rotated = exact_rope(k_rope[:, :, None], cos, sin).expand(-1, -1, kv.shape[2], -1)
    return torch.cat([kv[..., :nope_dim], rotated], dim=-1), kv[..., nope_dim:]


def exact_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    repeats = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(repeats, 2), v.repeat_interleave(repeats, 2)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    position = torch.arange(q.shape[1])
    visible = position[:, None] >= position
    if window is not None:
        visible &= position[:, None] - window < position
    return torch.einsum("bhij,bjhd->bihd", scores.masked_fill(~visible, -math.inf).softmax(-1), v)


class Joined(torch.autograd.Function):
    """An output as it is, and a loss whose gradient is one whatever that of the output is."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, loss: Tensor) -> Tensor:
        ctx.loss = torch.ones_like(loss)
        return out.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, ctx.loss


def exact_indexed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index_q: Tensor,
    index_k: Tensor,
    index_weights: Tensor,
    k_scale: Tensor,
    k_bias: Tensor,
    cos: Tensor,
    sin: Tensor,
    top_k: int,
    loss_factor: float,
    window: int | None = None,
) -> Tensor:
    """The whole score matrices, sorted; the divergence as torch has it."""
    keys = functional.layer_norm(index_k, index_k.shape[-1:], k_scale, k_bias, EPS)
    keys, queries = exact_rope(keys[:, :, None], cos, sin)[:, :, 0], exact_rope(index_q, cos, sin)
    scores = torch.einsum("bti,bits->bts", index_weights, torch.einsum("btid,bsd->bits", queries, keys).relu())
    scores = scores / math.sqrt(index_q.shape[2] * index_q.shape[3])
    position = torch.arange(q.shape[1])
    visible = position[:, None] >= position
    if window is not None:
        visible &= position[:, None] - window < position
    masked = scores.detach().masked_fill(~visible, -math.inf)
    last = masked.sort(-1, descending=True).values[..., min(top_k, len(position)) - 1, None]
    chosen = visible & (masked >= last)
    attended = (torch.einsum("bthd,bshd->bhts", q, k) * 0.3).masked_fill(~chosen[:, None], -math.inf).softmax(-1)
    log_chosen = scores.masked_fill(~chosen, -math.inf).log_softmax(-1).masked_fill(~chosen, 0)
    target = attended.detach()
    losses = (target * (target.clamp(min=1e-300).log() - log_chosen[:, None])).sum()
    return Joined.apply(torch.einsum("bhts,bshd->bthd", attended, v), loss_factor * losses)  # type: ignore[no-any-return, no-untyped-call]


def exact_conv(x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    padded = functional.pad(x.mT, (weight.shape[1] - 1, 0))
    y = functional.conv1d(padded, weight[:, None], bias, groups=weight.shape[0]).mT
    return functional.silu(y) if silu else y


def exact_conv_after(initial: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    return exact_conv(torch.cat([initial, x], 1), weight, bias, silu)[:, initial.shape[1] :]


def exact_ssd(x: Tensor, dt: Tensor, A_log: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor) -> Tensor:
    """The recurrence, position by position."""
    repeats = x.shape[2] // B.shape[2]
    B, C = B.repeat_interleave(repeats, 2), C.repeat_interleave(repeats, 2)
    step = functional.softplus(dt + dt_bias)
    state = x.new_zeros(x.shape[0], x.shape[2], x.shape[3], B.shape[3])
    found = []
    for t in range(x.shape[1]):
        decay = (-step[:, t] * A_log.exp()).exp()
        state = decay[..., None, None] * state + step[:, t, :, None, None] * x[:, t, :, :, None] * B[:, t, :, None]
        found.append((state @ C[:, t, :, :, None]).squeeze(-1) + D[:, None] * x[:, t])
    return torch.stack(found, 1)


def exact_m2rnn(q: Tensor, k: Tensor, v: Tensor, f: Tensor, state_map: Tensor, D: Tensor, dt_bias: Tensor, A_log: Tensor) -> Tensor:
    """The recurrence, position by position."""
    state = q.new_zeros(q.shape[0], v.shape[2], q.shape[2], v.shape[3])
    found = []
    for t in range(q.shape[1]):
        decay = (-A_log.exp() * functional.softplus(f[:, t] + dt_bias)).exp()[..., None, None]
        inner = state @ state_map + k[:, t, None, :, None] * v[:, t, :, None]
        state = decay * state + (1 - decay) * inner.tanh()
        found.append((q[:, t, None, None] @ state).squeeze(2) + D * v[:, t])
    return torch.stack(found, 1)


def exact_mamba3(
    x: Tensor,
    z: Tensor,
    B: Tensor,
    C: Tensor,
    dt: Tensor,
    A: Tensor,
    trapezoid: Tensor,
    B_bias: Tensor,
    C_bias: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    angles: Tensor | None = None,
    mimo_x: Tensor | None = None,
    mimo_z: Tensor | None = None,
    mimo_o: Tensor | None = None,
) -> Tensor:
    """The recurrence, position by position and rank by rank; the state turns back, not keys and queries forth, and what was added a step
    ago is kept beside it.
    """
    repeats, ones = x.shape[2] // B.shape[3], torch.ones(x.shape[2], B.shape[2], x.shape[3], dtype=x.dtype)
    into, gate, out = (ones if weight is None else weight for weight in (mimo_x, mimo_z, mimo_o))
    state = previous = x.new_zeros(x.shape[0], x.shape[2], x.shape[3], B.shape[4])
    found = []
    for t in range(x.shape[1]):
        step, rate = functional.softplus(dt[:, t] + dt_bias), functional.softplus(A[:, t]).clamp(min=1e-4)
        share, decay = trapezoid[:, t].sigmoid(), (-step * rate).exp()
        keys, queries = (
            each[:, t].repeat_interleave(repeats, 2).transpose(1, 2) + bias for each, bias in ((B, B_bias), (C, C_bias))
        )  # [B, H, R, S]
        added = torch.zeros_like(state)
        for r in range(B.shape[2]):
            added = added + (x[:, t] * into[:, r])[..., None] * keys[:, :, r, None]
        state = decay[..., None, None] * (state + ((1 - share) * step)[..., None, None] * previous)
        if angles is not None:
            angle = -math.pi * angles[:, t, None].tanh() * step[..., None]
            state = turned(state, angle)
        state = state + (share * step)[..., None, None] * added
        y = torch.zeros_like(x[:, t])
        for r in range(B.shape[2]):
            read = (state @ queries[:, :, r, :, None]).squeeze(-1) + D[:, None] * x[:, t] * into[:, r]
            y = y + out[:, r] * read * functional.silu(z[:, t] * gate[:, r])
        found.append(y)
        previous = added
    return torch.stack(found, 1)


def turned(rows: Tensor, angle: Tensor) -> Tensor:
    """Complex multiplication by exp(i · angle) of the pairs (j, j + S // 2), j < N."""
    count, half = angle.shape[-1], rows.shape[-1] // 2
    pairs = torch.complex(rows[..., :count], rows[..., half : half + count]) * torch.polar(torch.ones_like(angle), angle)[:, :, None]
    return torch.cat([pairs.real, rows[..., count:half], pairs.imag, rows[..., half + count :]], -1)


def exact_route(x: Tensor, weight: Tensor, top_k: int, normalize: bool) -> Tensor:
    weights = (x @ weight.T).softmax(-1).sort(-1, descending=True).values[:, :top_k]
    return weights / weights.sum(-1, keepdim=True) if normalize else weights


def exact_experts(inputs: Inputs, activation: str) -> Tensor:
    """Every row with its own copy of its expert's matrices."""
    owner = torch.repeat_interleave(torch.arange(len(inputs["counts"])), inputs["counts"])
    up = torch.einsum("mh,mfh->mf", inputs["x"], inputs["up"][owner])
    if activation == "swiglu":
        hidden = functional.silu(torch.einsum("mh,mfh->mf", inputs["x"], inputs["gate"][owner])) * up
    else:
        hidden = up.relu() ** 2 if activation == "relu2" else functional.gelu(up, approximate="tanh")
    return inputs["weights"].flatten()[inputs["rows"].long(), None] * torch.einsum("mf,mhf->mh", hidden, inputs["down"][owner])


TOP_K, NUM_EXPERTS = 2, 5


def plan(num_tokens: int) -> dict[str, Tensor]:
    """Rows and counts of a fixed routing in which expert 1 is far ahead and expert 3 gets nothing."""
    first = torch.tensor([1, 1, 0, 4])[torch.arange(num_tokens) % 4]
    experts_of = torch.stack([first, torch.where(first == 1, 2, 1)], 1).flatten()
    order = sorted(range(experts_of.numel()), key=lambda index: (experts_of[index].item(), index))
    counts = [int((experts_of == expert).sum()) for expert in range(NUM_EXPERTS)]
    return {"rows": torch.tensor(order, dtype=torch.int32), "counts": torch.tensor(counts, dtype=torch.int32)}


def expert_case(activation: str, hidden: int, width: int) -> Case:
    gated = activation == "swiglu"

    def inputs(normal: Callable[..., Tensor], tokens: int) -> dict[str, Tensor]:
        gate = {"gate": normal(NUM_EXPERTS, width, hidden) / math.sqrt(hidden)} if gated else {}
        return {
            "x": normal(tokens * TOP_K, hidden),
            "weights": normal(tokens, TOP_K).abs(),
            **plan(tokens),
            **gate,
            "up": normal(NUM_EXPERTS, width, hidden) / math.sqrt(hidden),
            "down": normal(NUM_EXPERTS, hidden, width) / math.sqrt(width),
        }

    return Case(
        f"experts_{activation}_{hidden}x{width}",
        inputs,
        lambda i: (experts(i["x"], i["weights"], i["rows"], i["counts"], i.get("gate"), i["up"], i["down"], activation),),
        lambda i: (exact_experts(i, activation),),
        ("x", "weights", "rows", "counts", *(("gate",) if gated else ()), "up", "down"),
        lambda tokens: [((tokens * TOP_K, width), "x")] * (2 if gated else 1),
    )


def exact_routed_experts(inputs: Inputs, activation: str) -> Tensor:
    token = inputs["rows"].long() // TOP_K
    rows = exact_experts({**inputs, "x": inputs["x"][token]}, activation)
    return torch.zeros_like(inputs["x"]).index_add(0, token, rows)


def routed_case(activation: str, hidden: int, width: int) -> Case:
    case = expert_case(activation, hidden, width)
    return replace(
        case,
        name=f"routed_{case.name}",
        inputs=lambda n, t: {**case.inputs(n, t), "x": n(t, hidden)},
        call=lambda i: (routed_experts(i["x"], i["weights"], i["rows"], i["counts"], i.get("gate"), i["up"], i["down"], activation),),
        exact=lambda i: (exact_routed_experts(i, activation),),
    )


def attention_case(name: str, heads: int, groups: int, width: int, value_width: int, window: int | None) -> Case:
    return Case(
        name,
        lambda n, t: {"q": n(BATCH, t, heads, width), "k": n(BATCH, t, groups, width), "v": n(BATCH, t, groups, value_width)},
        lambda i: (attention(i["q"], i["k"], i["v"], 0.3, window),),
        lambda i: (exact_attention(i["q"], i["k"], i["v"], 0.3, window),),
        ("q", "k", "v"),
        lambda t: [((BATCH, heads, t), "accumulator")],
        saved_outputs=(0,),
    )


def indexed_case(name: str, top_k: int, window: int | None) -> Case:
    names = ("q", "k", "v", "index_q", "index_k", "index_weights", "k_scale", "k_bias", "cos", "sin")
    return Case(
        name,
        lambda n, t: {
            "q": n(BATCH, t, 2, 6),
            "k": n(BATCH, t, 2, 6),
            "v": n(BATCH, t, 2, 5),
            "index_q": n(BATCH, t, 3, 8),
            "index_k": n(BATCH, t, 8),
            "index_weights": n(BATCH, t, 3),
            "k_scale": n(8),
            "k_bias": n(8),
            **angles(n, t, 3),
        },
        lambda i: (indexed_attention(**i, scale=0.3, top_k=top_k, loss_factor=0.7, eps=EPS, window=window),),
        lambda i: (exact_indexed_attention(**i, top_k=top_k, loss_factor=0.7, window=window),),
        names,
        lambda t: [((BATCH, 2, t), "accumulator"), ((BATCH, t), "accumulator"), ((BATCH, t), "accumulator")],
        saved_outputs=(0,),
        constant=("cos", "sin"),
    )


def ssd_case(name: str, chunk_size: int, num_groups: int) -> Case:
    return Case(
        name,
        lambda n, t: {
            "x": n(BATCH, t, 4, 5),
            "dt": n(BATCH, t, 4),
            "A_log": n(4).abs().mul(2).log1p(),
            "B": n(BATCH, t, num_groups, 7),
            "C": n(BATCH, t, num_groups, 7),
            "D": n(4),
            "dt_bias": n(4) - 2,
        },
        lambda i: (ssd(**i, chunk_size=chunk_size),),
        lambda i: (exact_ssd(**i),),
        ("x", "dt", "A_log", "B", "C", "D", "dt_bias"),
        lambda t: [((BATCH, math.ceil(t / chunk_size), 4, 5, 7), "x")],
    )


def mamba3_case(name: str, chunk_size: int, rank: int, num_angles: int) -> Case:
    heads, groups, width, state = 4, 2, 5, 7
    mimo = ("mimo_x", "mimo_z", "mimo_o") if rank > 1 else ()
    absent = dict.fromkeys([*([] if num_angles else ["angles"]), *([] if mimo else ["mimo_x", "mimo_z", "mimo_o"])])
    return Case(
        name,
        lambda n, t: {
            "x": n(BATCH, t, heads, width),
            "z": n(BATCH, t, heads, width),
            "B": n(BATCH, t, rank, groups, state),
            "C": n(BATCH, t, rank, groups, state),
            "dt": n(BATCH, t, heads),
            "A": n(BATCH, t, heads) - 1,
            "trapezoid": n(BATCH, t, heads),
            **({"angles": n(BATCH, t, num_angles)} if num_angles else {}),
            "B_bias": n(heads, rank, state),
            "C_bias": n(heads, rank, state),
            "D": n(heads),
            "dt_bias": n(heads) - 2,
            **{weight: n(heads, rank, width) for weight in mimo},
        },
        lambda i: (mamba3(**i, **absent, chunk_size=chunk_size),),
        lambda i: (exact_mamba3(**i),),
        ("x", "z", "B", "C", "dt", "A", "trapezoid", *(("angles",) if num_angles else ()), "B_bias", "C_bias", "D", "dt_bias", *mimo),
        lambda t: [
            ((BATCH, math.ceil(t / chunk_size), heads, width, state), "x"),
            ((BATCH, math.ceil(t / chunk_size), heads, num_angles), "accumulator"),
        ],
    )


def route_case(normalize: bool) -> Case:
    return Case(
        f"route_normalize_{normalize}",
        lambda n, t: {"x": n(t, 9), "weight": n(6, 9)},
        lambda i: (route(i["x"], i["weight"], 3, normalize)[0],),
        lambda i: (exact_route(i["x"], i["weight"], 3, normalize),),
        ("x", "weight"),
        lambda t: [((t, 6), "accumulator"), ((t, 3), "int32")],
    )


def document_starts(num_positions: int) -> Tensor:
    """int32 [B, T]: the first row holds documents of 1, 2, 3, … positions, the second one of a third of the row and one of the rest."""
    first = [t for t in range(num_positions) if math.isqrt(8 * t + 1) ** 2 == 8 * t + 1]  # triangular numbers
    position = torch.arange(num_positions, dtype=torch.int32)
    row = torch.tensor(first, dtype=torch.int32)[torch.searchsorted(torch.tensor(first), position, right=True) - 1]
    third = num_positions // 3
    return torch.stack([row, torch.where(position < third, 0, third).to(torch.int32)])


def apart(exact: Callable[..., Tensor], sequences: tuple[str, ...], inputs: Inputs) -> Tensor:
    """An exact formulation run on every document alone; `sequences` are the inputs that have positions; rotary tables keep a row's."""
    rows = []
    for row, starts in enumerate(inputs["starts"].tolist()):
        edges = [*sorted(set(starts)), len(starts)]
        found = [
            exact(
                **{name: value[row : row + 1, start:stop] for name, value in inputs.items() if name in sequences},
                **{name: inputs[name][start:stop] for name in ("cos", "sin") if name in inputs},
                **{name: value for name, value in inputs.items() if name not in (*sequences, "starts", "cos", "sin")},
            )
            for start, stop in itertools.pairwise(edges)
        ]
        rows.append(torch.cat(found, 1))
    return torch.cat(rows)


def packed(case: Case, call: Callable[..., Tensor], exact: Callable[..., Tensor], sequences: tuple[str, ...]) -> Case:
    """The case with several documents in each row; `starts` is saved beside what it saved before."""
    return replace(
        case,
        name=f"{case.name}_packed",
        inputs=lambda n, t: {**case.inputs(n, t), "starts": document_starts(t)},
        call=lambda i: (call(**i),),
        exact=lambda i: (apart(exact, sequences, i),),
        saved=(*case.saved, "starts"),
    )


def exact_linear_cross_entropy(x: Tensor, weight: Tensor, labels: Tensor, z_loss: float) -> Tensor:
    logits = x @ weight.mT
    squares = logits.logsumexp(1).square()[labels >= 0].sum()
    return functional.cross_entropy(logits, labels, reduction="sum") + z_loss * squares


CASES = [
    Case(
        "rms_norm",
        lambda n, t: {"x": n(BATCH, t, 37), "weight": n(37)},
        lambda i: (rms_norm(i["x"], i["weight"], EPS),),
        lambda i: (exact_rms_norm(i["x"], i["weight"]),),
        ("x", "weight"),
        lambda t: [((BATCH, t), "accumulator")],
    ),
    Case(
        "add_rms_norm",
        lambda n, t: {"x": n(BATCH, t, 37), "branch": n(BATCH, t, 37), "weight": n(37)},
        lambda i: add_rms_norm(i["x"], i["branch"], i["weight"], EPS),
        lambda i: (i["x"] + i["branch"], exact_rms_norm(i["x"] + i["branch"], i["weight"])),
        ("weight",),
        lambda t: [((BATCH, t), "accumulator")],
        saved_outputs=(0,),
        alike=("branch",),
    ),
    Case(
        "gated_rms_norm",
        lambda n, t: {"x": n(BATCH, t, 39), "gate": n(BATCH, t, 39), "weight": n(39)},
        lambda i: (gated_rms_norm(i["x"], i["gate"], i["weight"], EPS, 3),),
        lambda i: (exact_gated_rms_norm(i["x"], i["gate"], i["weight"], 3),),
        ("x", "gate", "weight"),
        lambda t: [((BATCH, t, 3), "accumulator")],
    ),
    Case(
        "swiglu",
        lambda n, t: {"gate": n(BATCH, t, 21), "up": n(BATCH, t, 21)},
        lambda i: (swiglu(i["gate"], i["up"]),),
        lambda i: (functional.silu(i["gate"]) * i["up"],),
        ("gate", "up"),
    ),
    Case("relu2", lambda n, t: {"x": n(BATCH, t, 21)}, lambda i: (relu2(i["x"]),), lambda i: (functional.relu(i["x"]) ** 2,), ("x",)),
    Case(
        "gelu",
        lambda n, t: {"x": n(BATCH, t, 21)},
        lambda i: (gelu(i["x"]),),
        lambda i: (functional.gelu(i["x"], approximate="tanh"),),
        ("x",),
    ),
    Case(
        "rope",
        lambda n, t: {"x": n(BATCH, t, 3, 10), **angles(n, t, 3)},
        lambda i: (rope(**i),),
        lambda i: (exact_rope(**i),),
        ("cos", "sin"),
        constant=("cos", "sin"),
    ),
    Case(
        "mla_kv",
        lambda n, t: {"kv": n(BATCH, t, 3, 11), "k_rope": n(BATCH, t, 6), **angles(n, t, 3)},
        lambda i: mla_kv(**i, nope_dim=4),
        lambda i: exact_mla_kv(**i, nope_dim=4),
        ("cos", "sin"),
        constant=("cos", "sin"),
    ),
    attention_case("attention", 3, 3, 12, 12, None),
    attention_case("attention_grouped_unequal", 6, 2, 5, 7, None),
    attention_case("attention_window", 4, 2, 5, 5, 9),
    indexed_case("indexed_attention", 11, None),
    indexed_case("indexed_attention_window", 4, 9),
    Case(
        "causal_conv1d",
        lambda n, t: {"x": n(BATCH, t, 11), "weight": n(11, 4), "bias": n(11)},
        lambda i: (causal_conv1d(**i, silu=True),),
        lambda i: (exact_conv(**i, silu=True),),
        ("x", "weight", "bias"),
    ),
    Case(
        "causal_conv1d_plain",
        lambda n, t: {"x": n(BATCH, t, 11), "weight": n(11, 3)},
        lambda i: (causal_conv1d(i["x"], i["weight"], None, silu=False),),
        lambda i: (exact_conv(i["x"], i["weight"], None, silu=False),),
        ("x", "weight"),
    ),
    Case(
        "causal_conv1d_initial",
        lambda n, t: {"x": n(BATCH, t, 11), "weight": n(11, 4), "bias": n(11), "initial": n(BATCH, 3, 11)},
        lambda i: (causal_conv1d(**i, silu=True),),
        lambda i: (exact_conv_after(**i, silu=True),),
        ("x", "weight", "bias", "initial"),
    ),
    ssd_case("ssd", 64, 2),
    ssd_case("ssd_one_group_small_chunks", 16, 1),
    Case(
        "m2rnn",
        lambda n, t: {
            "q": n(BATCH, t, 5),
            "k": n(BATCH, t, 5),
            "v": n(BATCH, t, 3, 6),
            "f": n(BATCH, t, 3),
            "state_map": n(3, 6, 6) / math.sqrt(6),
            "D": n(3, 6),
            "dt_bias": n(3) - 1,
            "A_log": n(3).abs().mul(2).log1p(),
        },
        lambda i: (m2rnn(**i, save_every=32),),
        lambda i: (exact_m2rnn(**i),),
        ("q", "k", "v", "f", "state_map", "D", "dt_bias", "A_log"),
        lambda t: [((BATCH, math.ceil(t / 32) + 1, 3, 5, 6), "accumulator")],
    ),
    mamba3_case("mamba3", 32, 3, 2),
    mamba3_case("mamba3_single_unrotated", 64, 1, 0),
    route_case(normalize=True),
    route_case(normalize=False),
    Case(
        "gated_add",
        lambda n, t: {"x": n(BATCH, t, 7), "side": n(BATCH, t, 7), "gates": n(2)},
        lambda i: (gated_add(**i),),
        lambda i: (i["x"] + i["gates"][1] * i["gates"][0].tanh() * i["side"],),
        ("side", "gates"),
    ),
    Case(
        "dispatch",
        lambda n, t: {"x": n(t, 9), "rows": plan(t)["rows"]},
        lambda i: (dispatch(i["x"], i["rows"], TOP_K),),
        lambda i: (torch.stack([i["x"][row // TOP_K] for row in i["rows"].tolist()]),),
        ("rows",),
    ),
    Case(
        "combine",
        lambda n, t: {"x": n(t * TOP_K, 9), "rows": plan(t)["rows"]},
        lambda i: (combine(i["x"], i["rows"], TOP_K),),
        lambda i: (torch.zeros(i["x"].shape[0] // TOP_K, 9, dtype=i["x"].dtype).index_add(0, i["rows"].long() // TOP_K, i["x"]),),
        ("rows",),
    ),
    expert_case("swiglu", 16, 24),
    expert_case("swiglu", 7, 9),
    expert_case("relu2", 24, 8),
    expert_case("gelu", 5, 6),
    routed_case("swiglu", 16, 24),
    routed_case("gelu", 5, 6),
    Case(
        "cross_entropy",
        lambda n, t: {"logits": n(t, 23) * 3, "labels": torch.where(torch.arange(t) % 5 == 3, -100, torch.arange(t) * 7 % 23)},
        lambda i: (cross_entropy(i["logits"], i["labels"]),),
        lambda i: (functional.cross_entropy(i["logits"], i["labels"], reduction="sum"),),
        ("logits", "labels"),
        lambda t: [((t,), "accumulator")],
    ),
    Case(
        "linear_cross_entropy",
        lambda n, t: {
            "x": n(t, 12),
            "weight": n(23, 12) / 2,
            "labels": torch.where(torch.arange(t) % 5 == 3, -100, torch.arange(t) * 7 % 23),
        },
        lambda i: (linear_cross_entropy(i["x"], i["weight"], i["labels"], z_loss=0.03),),
        lambda i: (exact_linear_cross_entropy(i["x"], i["weight"], i["labels"], 0.03),),
        ("x", "weight", "labels"),
        lambda t: [((t,), "accumulator")],
    ),
]

_BY_NAME = {case.name: case for case in CASES}
CASES += [
    packed(
        _BY_NAME["attention_grouped_unequal"],
        partial(attention, scale=0.3),
        partial(exact_attention, scale=0.3, window=None),
        ("q", "k", "v"),
    ),
    packed(
        _BY_NAME["attention_window"],
        partial(attention, scale=0.3, window=9),
        partial(exact_attention, scale=0.3, window=9),
        ("q", "k", "v"),
    ),
    packed(
        _BY_NAME["indexed_attention"],
        partial(indexed_attention, scale=0.3, top_k=11, loss_factor=0.7, eps=EPS),
        partial(exact_indexed_attention, top_k=11, loss_factor=0.7),
        ("q", "k", "v", "index_q", "index_k", "index_weights"),
    ),
    packed(_BY_NAME["causal_conv1d"], partial(causal_conv1d, silu=True), partial(exact_conv, silu=True), ("x",)),
    packed(_BY_NAME["ssd"], partial(ssd, chunk_size=64), exact_ssd, ("x", "dt", "B", "C")),
    packed(_BY_NAME["ssd_one_group_small_chunks"], partial(ssd, chunk_size=16), exact_ssd, ("x", "dt", "B", "C")),
    packed(_BY_NAME["mamba3"], partial(mamba3, chunk_size=32), exact_mamba3, ("x", "z", "B", "C", "dt", "A", "trapezoid", "angles")),
    packed(_BY_NAME["m2rnn"], partial(m2rnn, save_every=32), exact_m2rnn, ("q", "k", "v", "f")),
]
