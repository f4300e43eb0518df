"""A case of an operation: inputs, the public call, an independent formulation, and the contract's saved set."""

import itertools
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from op_exact import (
    EPS,
    NUM_EXPERTS,
    TOP_K,
    Inputs,
    angles,
    exact_attention,
    exact_chosen_attention,
    exact_experts,
    exact_gated_conv,
    exact_gated_delta,
    exact_indexed_attention,
    exact_mamba3,
    exact_route,
    exact_routed_experts,
    exact_selective_scan,
    exact_ssd,
    seen_by,
)
from torch import Tensor

from megakernels import (
    attention,
    chosen_attention,
    experts,
    gated_conv1d,
    gated_delta,
    indexed_attention,
    indexed_attention_choice,
    mamba3,
    route,
    routed_experts,
    selective_scan,
    ssd,
)

BATCH = 2


@dataclass(frozen=True)
class Case:
    """An operation at one setting.

    `saved` names the inputs kept for backward; `extra` lists the shapes saved in addition to inputs and outputs, each with the role of its
    dtype.
    """

    name: str
    inputs: Callable[[Callable[..., Tensor], int], dict[str, Tensor]]
    call: Callable[[Inputs], tuple[Tensor, ...]]
    exact: Callable[[Inputs], tuple[Tensor, ...]]
    saved: tuple[str, ...]
    extra: Callable[[int], list[tuple[tuple[int, ...], str]]] = lambda _num_positions: []
    saved_outputs: tuple[int, ...] = ()
    same_gradient: tuple[str, ...] = ()  # inputs whose gradient is the first one's own tensor
    constant: tuple[str, ...] = ()  # floating inputs without a gradient

    def make(self, num_positions: int, dtype: torch.dtype, requires_grad: bool = True) -> dict[str, Tensor]:
        """Inputs of one size: the same values, rounded to `dtype`, on every call.

        Tensors that are fp32 by contract are fp32 in bf16 runs.
        """
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


def plan(num_tokens: int) -> dict[str, Tensor]:
    """Rows and counts of a fixed routing in which expert 1 is far ahead and expert 3 gets nothing."""
    first = torch.tensor([1, 1, 0, 4])[torch.arange(num_tokens) % 4]
    experts_of = torch.stack([first, torch.where(first == 1, 2, 1)], 1).flatten()
    order = sorted(range(experts_of.numel()), key=lambda index: (experts_of[index].item(), index))
    counts = [int((experts_of == expert).sum()) for expert in range(NUM_EXPERTS)]
    return {"rows": torch.tensor(order, dtype=torch.int32), "counts": torch.tensor(counts, dtype=torch.int32)}


def some(num_tokens: int) -> Tensor:
    """Rows of some of the same pairs, and rows without a pair, among them and `TOP_K` behind them."""
    rows = plan(num_tokens)["rows"]
    rows[::3] = -1
    return torch.cat([rows, torch.full((TOP_K,), -1, dtype=torch.int32)])


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


def indexed_case(name: str, top_k: int, window: int | None, sinks: bool = False) -> Case:
    names = ("q", "k", "v", "index_q", "index_k", "index_weights", "k_scale", "k_bias", "cos", "sin", *(("sinks",) if sinks else ()))
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
            **({"sinks": n(2)} if sinks else {}),
        },
        lambda i: (indexed_attention(**i, scale=0.3, top_k=top_k, loss_factor=0.7, eps=EPS, window=window),),
        lambda i: (exact_indexed_attention(**i, top_k=top_k, loss_factor=0.7, window=window),),
        names,
        lambda t: [((BATCH, 2, t), "accumulator"), ((BATCH, t), "accumulator"), ((BATCH, t), "accumulator")],
        saved_outputs=(0,),
        constant=("cos", "sin"),
    )


def with_choice(case: Case, top_k: int, window: int | None) -> Case:
    """Indexed attention that hands its choice on."""

    def call(inputs: Inputs) -> tuple[Tensor, ...]:
        numbers = {"scale": 0.3, "top_k": top_k, "loss_factor": 0.7, "eps": EPS}
        return (indexed_attention_choice(**inputs, window=window, **numbers)[0],)

    return replace(case, name=case.name.replace("attention", "attention_choice"), call=call)


def words_of(chosen: Tensor) -> Tensor:
    """bool [B, T, T] as the int32 words of a choice."""
    num_keys = chosen.shape[-1]
    padded = torch.nn.functional.pad(chosen, (0, -num_keys % 128)).numpy()
    return torch.from_numpy(np.packbits(padded, axis=-1, bitorder="little").view("int32"))


def chosen_case(name: str, window: int | None, packed: bool = False, sinks: bool = False) -> Case:
    """Every query has chosen itself, and a third of the keys that it sees."""

    def inputs(normal: Callable[..., Tensor], t: int) -> dict[str, Tensor]:
        starts = {"starts": document_starts(t)} if packed else {}
        pattern = (7 * torch.arange(t) + 3 * torch.arange(t)[:, None] + torch.arange(BATCH)[:, None, None]) % 3 == 0
        chosen = (pattern | torch.eye(t, dtype=torch.bool)) & seen_by(t, window, starts.get("starts"))
        q, k, v = normal(BATCH, t, 2, 6), normal(BATCH, t, 2, 6), normal(BATCH, t, 2, 5)
        return {"q": q, "k": k, "v": v, "choice": words_of(chosen), **starts, **({"sinks": normal(2)} if sinks else {})}

    return Case(
        name,
        inputs,
        lambda i: (chosen_attention(**i, scale=0.3, window=window),),
        lambda i: (exact_chosen_attention(i["q"], i["k"], i["v"], i["choice"], i.get("sinks")),),
        ("q", "k", "v", "choice", *(("starts",) if packed else ()), *(("sinks",) if sinks else ())),
        lambda t: [((BATCH, 2, t), "accumulator")],
        saved_outputs=(0,),
    )


LIMITED = (0.08, 0.4)
"""Limits of the step size, of the case that has them."""


def ssd_case(name: str, chunk_size: int, num_groups: int, dt_limits: tuple[float, float] = (0.0, math.inf)) -> Case:
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
        lambda i: (ssd(**i, chunk_size=chunk_size, dt_limits=dt_limits),),
        lambda i: (exact_ssd(**i, dt_limits=dt_limits),),
        ("x", "dt", "A_log", "B", "C", "D", "dt_bias"),
        lambda t: [((BATCH, math.ceil(t / chunk_size), 4, 5, 7), "x")],
    )


def mamba3_case(name: str, chunk_size: int, rank: int, num_angles: int, save_every: int | None = None, heavy_tail: bool = False) -> Case:
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
        lambda i: (mamba3(**i, **absent, chunk_size=chunk_size, save_every=save_every, heavy_tail=heavy_tail),),
        lambda i: (exact_mamba3(**i, heavy_tail=heavy_tail),),
        ("x", "z", "B", "C", "dt", "A", "trapezoid", *(("angles",) if num_angles else ()), "B_bias", "C_bias", "D", "dt_bias", *mimo),
        lambda t: [
            ((BATCH, math.ceil(t / (save_every or chunk_size)), heads, width, state), "x"),
            ((BATCH, math.ceil(t / (save_every or chunk_size)), heads, num_angles), "accumulator"),
        ],
    )


def gated_conv_case(name: str, kernel: int, bias: bool) -> Case:
    sequences = ("input_gate", "output_gate", "value")
    return Case(
        name,
        lambda n, t: {**{each: n(BATCH, t, 11) for each in sequences}, "weight": n(11, kernel), **({"bias": n(11)} if bias else {})},
        lambda i: (gated_conv1d(**i),),
        lambda i: (exact_gated_conv(**i),),
        (*sequences, "weight", *(("bias",) if bias else ())),
    )


def selective_case(name: str, save_every: int) -> Case:
    channels, width = 5, 3
    return Case(
        name,
        lambda n, t: {
            "x": n(BATCH, t, channels),
            "dt": n(BATCH, t, channels),
            "A_log": n(channels, width).abs().mul(2).log1p(),
            "B": n(BATCH, t, width),
            "C": n(BATCH, t, width),
            "D": n(channels),
            "dt_bias": n(channels) - 2,
        },
        lambda i: (selective_scan(**i, save_every=save_every),),
        lambda i: (exact_selective_scan(**i),),
        ("x", "dt", "A_log", "B", "C", "D", "dt_bias"),
        lambda t: [((BATCH, math.ceil(t / save_every), channels, width), "accumulator")],
    )


def delta_case(name: str, chunk_size: int, save_every: int, key_heads: int, per_row: bool, beta_limit: float = 1.0) -> Case:
    heads, keys, values = 4, 5, 6
    rows = (keys,) if per_row else ()
    return Case(
        name,
        lambda n, t: {
            "q": n(BATCH, t, key_heads, keys),
            "k": n(BATCH, t, key_heads, keys),
            "v": n(BATCH, t, heads, values),
            "decay": n(BATCH, t, heads, *rows),
            "beta": n(BATCH, t, heads),
            "A_log": n(heads).abs().mul(2).log1p(),
            "dt_bias": n(heads, *rows) - 2,
        },
        lambda i: (gated_delta(**i, chunk_size=chunk_size, save_every=save_every, beta_limit=beta_limit),),
        lambda i: (exact_gated_delta(**i, beta_limit=beta_limit),),
        ("q", "k", "v", "decay", "beta", "A_log", "dt_bias"),
        lambda t: [((BATCH, math.ceil(t / save_every), heads, keys, values), "accumulator")],
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


def per_document(exact: Callable[..., Tensor], sequences: tuple[str, ...], inputs: Inputs) -> Tensor:
    """An exact formulation run on every document alone; `sequences` are the inputs with positions; rotary tables keep a row's positions."""
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
    """The case with several documents in each row; `starts` is also saved."""
    return replace(
        case,
        name=f"{case.name}_packed",
        inputs=lambda n, t: {**case.inputs(n, t), "starts": document_starts(t)},
        call=lambda i: (call(**i),),
        exact=lambda i: (per_document(exact, sequences, i),),
        saved=(*case.saved, "starts"),
    )
