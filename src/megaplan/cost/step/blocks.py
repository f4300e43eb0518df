"""Work of each kind of block on one rank, and of the ends of the model."""

from __future__ import annotations

from megaplan.cost.step import attention as attention_core
from megaplan.cost.step import launch, low_rank, memory, transfers
from megaplan.cost.step.gemm import linear
from megaplan.cost.step.grouped import filled_up, grouped_linear
from megaplan.cost.step.ledger import BACKWARD, FORWARD, Ledger
from megaplan.cost.step.low_rank import adapter_elements, num_adapters
from megaplan.cost.step.parameters import accumulate_bytes, held
from megaplan.cost.step.scan import scan
from megaplan.cost.step.workload import AttentionShape, StepWorkload

ROTARY_BYTES = 4.0


def ledger_of(work: StepWorkload, kind: str) -> Ledger:
    """The work of one block of a letter, or of `embedding`, `head` or `accumulate` (a stage's gradients)."""
    found = Ledger()
    _KINDS[kind](work, found)
    return found


def _repeats(work: StepWorkload) -> tuple[float, float]:
    """How often backward runs products again, and how often everything cheap."""
    again = work.recomputed
    return (0.5, 1.0) if again.per_op else (again.full, again.full)


def _attention(work: StepWorkload, found: Ledger) -> None:
    shape, mesh, hidden, tokens = work.model.attention, work.mesh, work.model.hidden, work.tokens
    if shape is None:
        return
    full, modules = work.recomputed.full, work.recomputed.modules
    products, cheap = _repeats(work)
    own, heads = tokens / mesh.tp, shape.num_heads / mesh.tp
    if shape.kv_lora:
        extra, key_bytes = _latent(work, found, shape, products)
    else:
        local_kv = max(shape.num_kv_heads / mesh.tp, 1.0)
        linear(found, work, tokens, heads * shape.key_dim + 2 * local_kv * shape.key_dim, hidden, again=products, site="A.qkv")
        linear(found, work, tokens, hidden, heads * shape.value_dim, again=products, site="A.out")
        extra = (shape.num_heads + shape.num_kv_heads) * shape.key_dim / mesh.tp * ROTARY_BYTES
        key_bytes = 4.0 * shape.num_kv_heads * shape.key_dim / mesh.tp
    attention_core.core(found, work, shape, max(full, 1.0 if "core_attn" in modules else 0.0))
    memory.norms(found, own, hidden, 1.0 if "layernorm" in modules else cheap)
    found.move(FORWARD, tokens * extra)
    found.move(BACKWARD, tokens * extra)
    kernels = launch.KERNELS["A.mla" if shape.kv_lora else "A"]
    _launch(work, found, kernels, "A", "attn")
    transfers.tensor(found, work, full)
    transfers.context(found, work, key_bytes, full)


def _latent(work: StepWorkload, found: Ledger, shape: AttentionShape, products: float) -> tuple[float, float]:
    """MLA's linears; bytes a token of its rotary and concatenation, and of its keys and values."""
    mesh, hidden, tokens = work.mesh, work.model.hidden, work.tokens
    own, heads = tokens / mesh.tp, shape.num_heads / mesh.tp
    raised = 1.0 if "mla_up_proj" in work.recomputed.modules else products
    latent = shape.kv_lora + shape.rope_dim
    if shape.q_lora:
        linear(found, work, own, shape.q_lora + latent, hidden, again=products, site="A.down")
        linear(found, work, tokens, heads * shape.key_dim, shape.q_lora, again=raised, site="A.q_up")
    else:
        linear(found, work, tokens, heads * shape.key_dim + latent, hidden, again=products, site="A.down")
    columns = heads * (shape.key_dim - shape.rope_dim + shape.value_dim)
    linear(found, work, tokens, columns, shape.kv_lora, again=raised, site="A.kv_up")
    linear(found, work, tokens, hidden, heads * shape.value_dim, again=products, site="A.out")
    return heads * (2 * shape.key_dim + shape.value_dim) * ROTARY_BYTES, heads * (shape.key_dim + shape.value_dim) * 2.0


def _dense(work: StepWorkload, found: Ledger) -> None:
    model, mesh, tokens = work.model, work.mesh, work.tokens
    full, (products, cheap) = work.recomputed.full, _repeats(work)
    width, matrices = model.ffn / mesh.tp, 2 if model.gated else 1
    linear(found, work, tokens, width * matrices, model.hidden, again=1.0 if "mlp" in work.recomputed.modules else products, site="D.up")
    linear(found, work, tokens, model.hidden, width, again=products, site="D.down")
    memory.norms(found, tokens / mesh.tp, model.hidden, cheap)
    memory.activation(found, tokens, width, gated=model.gated, again=cheap)
    _launch(work, found, launch.KERNELS["D"], "D", "mlp")
    transfers.tensor(found, work, full)


def _experts(work: StepWorkload, found: Ledger) -> None:
    model, mesh, tokens, shape = work.model, work.mesh, work.tokens, work.model.experts
    if shape is None:
        return
    modules, (products, cheap) = work.recomputed.modules, _repeats(work)
    again = 1.0 if "moe" in modules else products
    own, matrices, width = tokens / mesh.tp, 2 if model.gated else 1, shape.latent or model.hidden
    filled = filled_up(work, shape)
    rows, local, inner = own * mesh.etp * shape.top_k * filled, shape.num / mesh.ep, shape.width / mesh.etp
    per_expert = rows * mesh.ep / shape.num
    fused = launch.experts_fused(work.software)
    grouped_linear(found, work, rows, per_expert, local, inner * matrices, width, again, (True, not fused))
    grouped_linear(found, work, rows, per_expert, local, width, inner, again, (not fused, True))
    memory.norms(found, own, model.hidden, 0.0)
    memory.router(found, own, model.hidden, shape.num)
    if fused:
        found.move(BACKWARD, rows * inner * matrices * 2.0)  # products apply it; backward reads what went in
    else:
        repeated = 1.0 if "moe_act" in modules or again >= 1 else max(again, cheap * 0.5)
        memory.activation(found, rows, inner, gated=model.gated, again=repeated)
    memory.permutation(found, rows, width, again)
    if shape.latent:
        linear(found, work, own, width, model.hidden, again=again)
        linear(found, work, own, model.hidden, width, again=again)
    linear(found, work, own, shape.num, model.hidden, again=again, low=False)
    if shape.shared:
        linear(found, work, tokens, shape.shared * matrices / mesh.tp, model.hidden, again=again, site="E.up")
        linear(found, work, tokens, model.hidden, shape.shared / mesh.tp, again=again, site="E.down")
        memory.activation(found, tokens, shape.shared / mesh.tp, gated=model.gated, again=0.0)
        transfers.tensor(found, work)
    quantize = launch.QUANTIZE_KERNELS * local if launch.casts_apart(work.software) else 0.0
    ratio, graphs = launch.BACKWARD_KERNELS["E"], work.software.graphs
    found.launch(launch.KERNELS["router"], launch.KERNELS["router"] * ratio, graphed=bool({"full", "moe", "moe_router"} & graphs))
    kernels = launch.KERNELS["experts"] + quantize
    found.launch(kernels, kernels * ratio, graphed=bool({"full", "moe"} & graphs))
    transfers.exchange(found, work, shape, again)


def _mamba(work: StepWorkload, found: Ledger) -> None:
    model, mesh, shape = work.model, work.mesh, work.model.mamba
    if shape is None:
        return
    full, inner = work.recomputed.full, shape.num_heads * shape.head_dim
    columns = (2 * inner + 2 * shape.num_groups * shape.state_dim + shape.num_heads) / mesh.tp
    linear(found, work, work.tokens, columns, model.hidden, again=full, site="M.in")
    linear(found, work, work.tokens, model.hidden, inner / mesh.tp, again=full, site="M.out")
    scan(found, work, shape, full)
    memory.norms(found, work.tokens / mesh.tp, model.hidden, 0.0)
    _launch(work, found, launch.KERNELS["M"], "M", "mamba", recompute=False)
    transfers.tensor(found, work)


def _embedding(work: StepWorkload, found: Ledger) -> None:
    found.move(FORWARD, work.tokens / work.mesh.tp * work.model.hidden * 6.0)
    if work.model.adapters is None:
        found.move(BACKWARD, work.tokens * work.model.hidden * 8.0)


def _head(work: StepWorkload, found: Ledger) -> None:
    """The head and loss; prediction depths have heads of their own, and a projection of two streams."""
    model, mesh, tokens = work.model, work.mesh, work.tokens
    heads, vocab = 1 + model.mtp, model.vocab / mesh.tp
    linear(found, work, tokens, vocab, model.hidden, low=work.software.low_head, count=heads)
    found.move(FORWARD, tokens * vocab * memory.LOGIT_BYTES * heads)
    found.move(BACKWARD, tokens * vocab * memory.LOGIT_BYTES * heads)
    if model.mtp:
        linear(found, work, tokens / mesh.tp, model.hidden, 2 * model.hidden, count=model.mtp)
    transfers.tensor_head(found, work)
    kernels = launch.KERNELS["head"]
    found.launch(kernels, kernels * launch.BACKWARD_KERNELS["head"], graphed="full" in work.software.graphs)


def _hop(work: StepWorkload, found: Ledger) -> None:
    """What every stage of a pipeline sends on: the stream, once a chunk and pass."""
    if work.mesh.pp > 1:
        moved = work.mesh.vpp * work.tokens / work.mesh.tp * work.model.hidden * 2.0
        for run in (FORWARD, BACKWARD):
            found.transfer(run, "pipeline", moved, work.mesh.vpp)


def _accumulate(work: StepWorkload, found: Ledger) -> None:
    """Gradients added to fp32 sums by an operation of their own, a microbatch, where products do not add them."""
    trained = sum(held(work)) if work.model.adapters is None else adapter_elements(work)
    found.move(BACKWARD, trained * accumulate_bytes(work.software), "accumulate")


def _launch(work: StepWorkload, found: Ledger, kernels: float, kind: str, graph: str, *, recompute: bool = True) -> None:
    again = 1 + launch.AGAIN * work.recomputed.full if recompute else 1.0
    narrow = num_adapters(work.model, kind)
    backward = kernels * launch.BACKWARD_KERNELS[kind] * again + narrow * low_rank.BACKWARD_KERNELS
    graphed = bool({"full", graph} & work.software.graphs)
    found.launch(kernels + narrow * low_rank.KERNELS, backward, graphed=graphed)


_KINDS = {
    **{"A": _attention, "D": _dense, "E": _experts, "M": _mamba},
    **{"embedding": _embedding, "head": _head, "hop": _hop, "accumulate": _accumulate},
}
