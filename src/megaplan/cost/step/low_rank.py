"""Low-rank adapters on a frozen model: which linears have one, their narrow products, and their elements.

Query, key and value projections are one linear here, as Transformer Engine runs them, with one adapter where any of them has one.
"""

from __future__ import annotations

from collections.abc import Callable

from megaplan.cost.step.workload import AdapterShape, AttentionShape, ModelShape, StepWorkload

LINEARS: dict[str, dict[str, tuple[str, ...]]] = {
    "A": {
        "A.qkv": ("q_proj", "k_proj", "v_proj"),
        "A.down": ("q_down", "q_proj", "kv_down"),
        "A.q_up": ("q_up",),
        "A.kv_up": ("kv_up",),
        "A.out": ("o_proj",),
    },
    "D": {"D.up": ("gate_proj", "up_proj"), "D.down": ("down_proj",)},
    "E": {"E.up": ("shared.gate_proj", "shared.up_proj"), "E.down": ("shared.down_proj",)},
    "M": {"M.in": ("in_proj",), "M.out": ("out_proj",)},
}
"""By letter, the linears of a block as the step model runs them, and their names in a spec."""
KERNELS, BACKWARD_KERNELS = 4.0, 8.0
"""Of an adapter: two products, the scale and the sum; backward the gradients of both products, scale and sum."""


def adapters(rank: int, adapts: Callable[[str, str], bool]) -> AdapterShape:
    """The adapters of a model by what a spec's `lora` says of each letter's linears."""
    chosen = {site for letter, sites in LINEARS.items() for site, names in sites.items() if any(adapts(letter, name) for name in names)}
    return AdapterShape(rank, frozenset(chosen))


def has_adapter(work: StepWorkload, site: str | None) -> bool:
    """Whether a linear has one."""
    return work.model.adapters is not None and site in work.model.adapters.linears


def num_adapters(model: ModelShape, letter: str) -> int:
    """Adapters of a block."""
    return 0 if model.adapters is None else len(model.adapters.linears & _widths(model, letter).keys())


def adapter_elements(work: StepWorkload) -> float:
    """Elements of a mean stage's adapters on a rank: A [rank, in] and B [out, rank], of which tensor parallelism cuts one."""
    model, found = work.model, 0.0
    if model.adapters is None:
        return 0.0
    for letter, count in model.counts.items():
        for site, (inputs, outputs) in _widths(model, letter).items():
            found += count * model.adapters.rank * (inputs + outputs) * (site in model.adapters.linears)
    return found / work.mesh.tp / work.mesh.pp


def _widths(model: ModelShape, letter: str) -> dict[str, tuple[int, int]]:
    """Width of the input and of the result of every linear of a block that can have an adapter."""
    hidden, matrices = model.hidden, 2 if model.gated else 1
    if letter == "A" and model.attention is not None:
        return _of_attention(hidden, model.attention)
    if letter == "D":
        return {"D.up": (hidden, model.ffn * matrices), "D.down": (model.ffn, hidden)}
    if letter == "E" and model.experts is not None and model.experts.shared:
        return {"E.up": (hidden, model.experts.shared * matrices), "E.down": (model.experts.shared, hidden)}
    if letter == "M" and model.mamba is not None:
        inner = model.mamba.num_heads * model.mamba.head_dim
        columns = 2 * inner + 2 * model.mamba.num_groups * model.mamba.state_dim + model.mamba.num_heads
        return {"M.in": (hidden, columns), "M.out": (inner, hidden)}
    return {}


def _of_attention(hidden: int, shape: AttentionShape) -> dict[str, tuple[int, int]]:
    values = shape.num_heads * shape.value_dim
    if not shape.kv_lora:
        return {"A.qkv": (hidden, (shape.num_heads + 2 * shape.num_kv_heads) * shape.key_dim), "A.out": (values, hidden)}
    queries, latent = shape.num_heads * shape.key_dim, shape.kv_lora + shape.rope_dim
    raised = shape.num_heads * (shape.key_dim - shape.rope_dim + shape.value_dim)
    found = {"A.down": (hidden, latent + (shape.q_lora or queries)), "A.kv_up": (shape.kv_lora, raised), "A.out": (values, hidden)}
    return found | ({"A.q_up": (shape.q_lora, queries)} if shape.q_lora else {})
