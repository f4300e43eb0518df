"""Work of each kind of block and of the ends of the model on one rank: the operations of `megaplan.cost.blocks`, by kernel class."""

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from typing import NamedTuple

from megakernels.facts import ideal
from megakernels.ops.attention.facts import AttentionSizes
from megakernels.ops.cross_entropy.facts import Loss
from megakernels.ops.moe.facts import ROUTE, ExpertSizes, Permutation
from megakernels.ops.rms_norm.facts import FINAL_NORM, RESIDUAL_NORM
from megakernels.ops.rope.facts import MLA_KV, ROPE
from megakernels.ops.ssd.facts import Ssd
from megaplan.blocks.work import OpWork, Workload, Works
from megaplan.cost.blocks import PART, adapter_name, end_works, layer_works
from megaplan.cost.step import attention, launch, own_modules, scan, transfers
from megaplan.cost.step.gemm import adapter, linear
from megaplan.cost.step.grouped import busiest, experts, padding
from megaplan.cost.step.ledger import BACKWARD, FORWARD, Ledger
from megaplan.cost.step.parameters import accumulate_bytes, trained
from megaplan.cost.step.workload import Recomputed, TimedStep
from megaplan.families.registry import FAMILIES
from megaplan.families.residual import path_in
from megaplan.inventory.tensors import Block, Inventory

ELEMENT_BYTES = 2
"""Bytes of an activation's element: frameworks store bf16 under every dtype of products."""
ROUTER_BYTES = 10
"""Bytes per expert, token and pass that frameworks' routers move in addition to ideal ones: scores, choice and map in fp32."""
SEPARATE_NORM = 10 / 8, 12 / 8, 5 / 8
"""Bytes of separate kernels for residual addition and norm minus those of one kernel: forward, backward, and the recomputed norm."""
SEPARATE_SUM = 6 / 8, 6 / 8, 0.0
"""The same for a block that shares the previous block's norm: only the addition, and in backward the addition of the norm's gradients."""
FINAL_SHARES = 4 / 8, 6 / 8
"""The same for the final norm: the addition before it belongs to the last layer."""
LOSS_TIMES = 2
"""Additional bytes of the loss compared with bf16 logits, because frameworks convert logits to fp32."""
MODULES = {
    "core_attn": frozenset({("attention", "attention")}),
    "layernorm": frozenset({("A", "norm")}),
    "mla_up_proj": frozenset({("A", "q_up"), ("A", "kv_up")}),
    "mlp": frozenset({("D", "gate_proj"), ("D", "up_proj")}),
}
"""Operations of Megatron's recomputed modules, by part and name; `moe` is a complete E block, and `grouped.experts` has `moe_act`."""


class Kinds(NamedTuple):
    """Kinds of layers: the kind of each layer, and the block of each kind.

    The name of a kind is a letter; a number follows it for the second and later variants of the letter.
    """

    layers: tuple[str, ...]
    blocks: Mapping[str, Block]


@cache
def kinds_in(inventory: Inventory) -> Kinds:
    """The kinds of a model's layers."""
    names: dict[int, str] = {}
    found, variants = {}, Counter[str]()
    for block in inventory.layers:
        if id(block) not in names:
            variants[block.family] += 1
            number = variants[block.family]
            names[id(block)] = name = f"{block.family}{number if number > 1 else ''}"
            found[name] = block
    return Kinds(tuple(names[id(block)] for block in inventory.layers), found)


def ledger_of(work: TimedStep, kind: str) -> Ledger:
    """Work of one block of a kind, or of `embedding`, `head`, `hop` (transfer to the next stage) or `accumulate` (gradients of a stage)."""
    found = Ledger()
    match kind:
        case "embedding":
            _add(found, work, end_works(_load(work), work.spec).embedding)
        case "head":
            _head(work, found)
        case "hop":
            _hop(work, found)
        case "accumulate":
            found.move(BACKWARD, sum(trained(work)) * accumulate_bytes(work.software), "accumulate")
        case _:
            _block(work, found, kinds_in(work.inventory).blocks[kind])
    return found


def _load(work: TimedStep) -> Workload:
    """Part of a microbatch on one rank.

    All-to-all dispatchers sort received rows by expert also without expert parallelism (NVIDIA/Megatron-LM,
    megatron/core/transformer/moe/token_dispatcher.py, dispatch_postprocess).
    """
    mesh, batch, sorts = work.mesh, work.batch, work.software.dispatcher == "alltoall"
    tokens = batch.micro * batch.seq // mesh.cp
    return Workload(batch.seq, tokens, ELEMENT_BYTES, tp=mesh.tp, ep=mesh.ep, etp=mesh.etp, cp=mesh.cp, sorts=sorts)


def _block(work: TimedStep, found: Ledger, block: Block) -> None:
    model, letter = work.spec.model, block.family
    ops, family = layer_works(_load(work), model, block), FAMILIES[letter]
    shares, modules = path_in(model.residual_path, block).shares_input, own_modules.modules_of(work)
    num_adapters = _add(found, work, ops, shares=shares and not (modules is not None and modules.separate_norms))
    exchanges = family.exchanges(family.section_of(model), model.hidden_size, block.variant)
    again = _products_again(work.recomputed, letter)
    if exchanges.sharded:
        transfers.tensor(found, work, 0.0 if exchanges.rows else work.recomputed.full, shares=shares)
        if work.software.shares_saved and (letter in "AG" or work.spec.host.block_layers == 1):  # one of the operators of a layer
            transfers.saved(found, work)
    own_modules.heads(found, work, ops, work.recomputed.full)
    own_modules.stream(found, work, letter, work.recomputed.full)
    if exchanges.context_width:
        transfers.context(found, work, exchanges.context_width, work.recomputed.full)
    if exchanges.rows:
        transfers.exchange(found, work, exchanges, again)
    latent = any(isinstance(op.facts, AttentionSizes) and op.facts.latent for op in ops)
    local = next((op.facts.experts for op in ops if isinstance(op.facts, ExpertSizes)), 0)
    launch.launch(found, work, "A.mla" if latent else letter, local, num_adapters)


def _head(work: TimedStep, found: Ledger) -> None:
    """Add head and loss; each prediction depth has one more head and loss, and a projection of two streams."""
    ends = end_works(_load(work), work.spec)
    _add(found, work, ends.head, low=work.software.low_head, times=1 + ends.mtp_depth)
    _add(found, work, tuple(op for op in ends.mtp if op.name == "proj"), times=ends.mtp_depth)
    transfers.tensor_head(found, work)
    kernels = launch.KERNELS["head"]
    found.launch(kernels, kernels * launch.BACKWARD_KERNELS["head"], graphed="full" in work.software.graphs)


def _hop(work: TimedStep, found: Ledger) -> None:
    """Add the transfers between stages: the residual stream, once per chunk and pass."""
    if work.mesh.pp > 1:
        moved = work.mesh.vpp * work.tokens / work.mesh.tp * work.spec.model.hidden_size * ELEMENT_BYTES
        for run in (FORWARD, BACKWARD):
            found.transfer(run, "pipeline", moved, work.mesh.vpp)


def _add(found: Ledger, work: TimedStep, ops: Works, *, low: bool = True, times: float = 1.0, shares: bool = False) -> int:
    """Add operations by the class of their kernels, and return the number of adapters.

    Linears of the block's input are one product, as in Transformer Engine, with one adapter if any of them has an adapter.
    """
    names, num_adapters = {op.name for op in ops}, 0
    for together in _linears(ops, work.spec.model.hidden_size):
        op, columns = together[0], sum(each.weights for each in together) // together[0].in_width
        tokens, again = _tokens(work, op), _again(work.recomputed, op)
        linear(found, work, tokens, columns, op.in_width, again=again, low=low, count=times, trained=op.work.weight_grad > 0)
        if any(adapter_name(each.name) in names for each in together):
            adapter(found, work, tokens, columns, op.in_width, again)
            num_adapters += 1
    for op in ops:
        tokens, again = _tokens(work, op), _again(work.recomputed, op)
        if op.is_linear:
            continue
        if isinstance(op.facts, ExpertSizes):
            experts(found, work, op, op.facts, tokens, again)
        elif isinstance(op.facts, AttentionSizes):
            attention.core(found, work, op, op.facts, again)
        elif isinstance(op.facts, Ssd):
            scan.scan(found, op.facts, work.batch.seq, again)
        elif op.facts is not None or not op.weights:  # adapters are added with their linears
            _move(found, work, op, tokens, again, times, shares=shares)
    return num_adapters


def _linears(ops: Works, hidden_size: int) -> Iterable[list[OpWork]]:
    """Linears of a block; the linears of its input (of the stream's width, except the last of the block) are one group."""
    found: dict[object, list[OpWork]] = {}
    linears = [op for op in ops if op.is_linear]
    for op in linears:
        of_input = op.in_width == hidden_size and op is not linears[-1]
        found.setdefault(op.own_tokens if of_input else op.name, []).append(op)
    return found.values()


def _tokens(work: TimedStep, op: OpWork) -> int:
    """Tokens of one call of an operation."""
    return int(work.tokens) // (work.mesh.tp if op.own_tokens and work.software.sequence_parallel else 1)


def _move(found: Ledger, work: TimedStep, op: OpWork, tokens: int, again: float, times: float, *, shares: bool = False) -> None:
    """Add a memory-bound operation: its ideal bytes and the additional bytes of frameworks; for the router also its products.

    `shares`: the block reads the norm of the block before it.
    """
    forward, backward = (float(moved) for moved, _ in ideal(op.work, tokens))
    kind, factor, repeated = "plain", times, forward
    if op.facts is RESIDUAL_NORM:
        forward, backward, repeated = (forward * share for share in (SEPARATE_SUM if shares else SEPARATE_NORM))
    elif op.facts in (ROPE, MLA_KV):
        if own_modules.rotates(work):
            return
        repeated = 0  # published steps have no visible time for recomputed rotations
    elif op.facts is FINAL_NORM:
        forward, backward = (forward * share for share in FINAL_SHARES)
    elif op.skew is not None or isinstance(op.facts, Permutation):
        kind, factor = "permute", times * padding(work) * busiest(work, op.skew or 1.0)
    elif isinstance(op.facts, Loss):
        vocab = work.spec.model.vocab_size / (1 if op.own_tokens else work.mesh.tp)
        if own_modules.loss(found, work, times * tokens * vocab):
            return
        factor *= LOSS_TIMES
    elif op.part == "M":
        kind = "scanned"
    elif op.facts is ROUTE:
        hidden = work.spec.model.hidden_size
        num_experts = op.weights // hidden
        linear(found, work, tokens, num_experts, hidden, again=again, low=False, trained=op.work.weight_grad > 0)
        for run in (FORWARD, BACKWARD):
            found.move(run, ROUTER_BYTES * num_experts * tokens)
    found.move(FORWARD, forward * factor, kind)
    found.move(BACKWARD, (backward + again * repeated) * factor, kind)


def _again(recomputed: Recomputed, op: OpWork) -> float:
    """Number of times that backward runs an operation again."""
    if op.part == PART or (op.part, op.name) in recomputed.kept:
        return 0.0
    if any((op.part, op.name) in MODULES.get(module, ()) for module in recomputed.modules):
        return 1.0
    if op.skew is not None or op.part == "E" or op.is_linear:
        return _products_again(recomputed, op.part if op.part != "experts" else "E")
    return recomputed.full if op.part in ("attention", "scan") else max(recomputed.full, float(recomputed.per_op))


def _products_again(recomputed: Recomputed, letter: str) -> float:
    """Number of times that backward runs the products of a block again: one half if the policy is per operation."""
    if (letter == "E" and "moe" in recomputed.modules) or (letter == "A" and "attention" in recomputed.modules):
        return 1.0
    return 0.5 if recomputed.per_op else recomputed.full
