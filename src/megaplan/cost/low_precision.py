"""Linears and banks of megarun under a recipe in eight bits: the operations that multiply in eight bits, and their passes.

Consecutive linears with inputs of the same width are assumed to read the same input: they share its copies, and their input gradients are
added.
"""

from itertools import pairwise

from megakernels.facts import Pass
from megakernels.ops.fp8_experts.facts import ScaledBankCost
from megakernels.ops.fp8_linear.facts import DELAYED, NOTHING, ScaledPass, ScaledPasses, linear_passes
from megakernels.ops.moe.facts import ExpertSizes
from megaplan.blocks.costs import LATE
from megaplan.blocks.work import OpWork, Works
from megaplan.cost.blocks import HEAD, LOGITS_AGAIN
from megaplan.dtypes import DType
from megaplan.low_precision import SCALINGS
from megaplan.spec.host import device_of
from megaplan.spec.local import packed_gather
from megaplan.spec.models import Spec

ATTENTION = "attention"
"""The part of attention's kernels."""


class EightBits:
    """Passes of a spec's linears and banks in eight bits.

    Args:
        spec: A checked spec.
        itemsize: Bytes of an element of activations.
        policy: Recompute policy of the layer.
    """

    def __init__(self, spec: Spec, itemsize: int, policy: str) -> None:
        recipe, moe, mesh = spec.precision.recipe, spec.model.moe, spec.mesh
        scaling = "" if recipe is None else SCALINGS[recipe.name]
        self._by_row, self._delayed = scaling == "rows", scaling == DELAYED
        self._emulated = spec.emulates_products
        self._itemsize, self._fused, self._grad_bytes = itemsize, spec.host.uses_triton, spec.precision.grads.bytes
        self._cp = mesh.cp
        self._travels, self._etp = mesh.ep * mesh.etp > 1, mesh.etp
        self._keeps = self._travels and policy != "selective"
        grouped = spec.precision.params is DType.BF16 and device_of(spec.device).generation == "hopper"
        self._packs = packed_gather(spec)
        self._head = spec.model.hidden_size, spec.model.vocab_size // (mesh.tp if mesh.vocab_parallel else 1)
        self._products = 1 if moe is None or grouped else moe.num_experts // mesh.ep

    def passes(self, op: OpWork, tokens: int, *, shares: bool, keeps: bool = True) -> ScaledPasses | None:
        """F, I and W of a linear or a bank (a bank's I includes the gradients of its matrices).

        None for other operations and emulated products.

        Args:
            op: The operation.
            tokens: Tokens of the call.
            shares: True if the input is the previous linear's.
            keeps: True if the input's copy is kept in place of the input.
        """
        if self._emulated:
            return None
        if in_eight_bits(op):
            setting = {
                "by_row": self._by_row,
                "delayed": self._delayed,
                "fused": self._fused,
                "has_weight_gradient": op.work.weight_grad > 0,
            }
            out = op.weights // op.in_width
            packed = self._packs is not None and self._packs.fits((out, op.in_width))
            late = op.counts == LATE
            setting |= {"shares": shares, "keeps": keeps and not late, "packed": packed}
            found = linear_passes(op.in_width, out, tokens, self._itemsize, **setting)
            if not late:
                return found
            expands = linear_passes(op.in_width, out, tokens * self._cp, self._itemsize, **setting)[0]
            return expands, _together(expands, found[1]), found[2]
        if not isinstance(op.facts, ExpertSizes):
            return None
        rows = tokens * op.facts.slots * self._etp
        bank = op.facts._replace(tokens=rows if self._travels else tokens)
        how = self._by_row, self._fused, self._travels, self._keeps, self._products, self._packed_bank(bank), self._delayed
        return ScaledBankCost(bank, rows, *how).passes(op.weights * 2 * self._grad_bytes)

    def of_head(self, op: OpWork, tokens: int) -> ScaledPasses | None:
        """F, I and W of the head's product, and of its logits that backward makes again; None for other operations and emulated ones."""
        if self._emulated or op.name not in (HEAD, LOGITS_AGAIN):
            return None
        how = {"by_row": self._by_row, "delayed": self._delayed, "fused": self._fused}
        made = linear_passes(*self._head, tokens, self._itemsize, **how, shares=False, keeps=False)
        nothing = ScaledPass(NOTHING, NOTHING)
        return made if op.name == HEAD else (nothing, made[0], nothing)

    def _packed_bank(self, bank: ExpertSizes) -> tuple[bool, bool]:
        """True for gate and up, and for down, if they are given packed."""
        packs, width, hidden = self._packs, bank.width, bank.hidden
        return packs is not None and packs.fits((bank.experts, width, hidden)), packs is not None and packs.fits(
            (bank.experts, hidden, width)
        )


def _together(first: ScaledPass, second: ScaledPass) -> ScaledPass:
    """Two passes, one after another."""
    pairs = zip(first, second, strict=True)
    return ScaledPass(*(Pass(one.num_bytes + two.num_bytes, one.flops + two.flops, one.launches + two.launches) for one, two in pairs))


def in_eight_bits(op: OpWork) -> bool:
    """True for the linears that multiply in the recipe's format: those whose input has a gradient."""
    return op.is_linear and bool(op.in_width) and bool(op.work.input_grad)


def sharing(ops: Works) -> frozenset[int]:
    """Indices of linears that read the same input as the previous linear."""
    return frozenset(
        index
        for index, (before, op) in enumerate(pairwise(ops), start=1)
        if in_eight_bits(before) and in_eight_bits(op) and (before.in_width, before.own_tokens) == (op.in_width, op.own_tokens)
    )


def saved_by_attention(ops: Works) -> frozenset[int]:
    """Indices of linears whose input is the result of attention: attention saves it, so no copy is kept."""
    return frozenset(index for index, (before, op) in enumerate(pairwise(ops), start=1) if in_eight_bits(op) and before.part == ATTENTION)
