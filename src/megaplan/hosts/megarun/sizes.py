"""The settings of a spec that decide how FSDP2 stores parameters: equal sizes give equal storage."""

from __future__ import annotations

from typing import NamedTuple

from megakernels.ops.newton_schulz.facts import REFERENCE_BYTES
from megaplan.dtypes import DType
from megaplan.families.registry import FAMILIES
from megaplan.spec.models import Spec


class Sizes(NamedTuple):
    """Settings of a spec that decide storage, computed once for all its blocks.

    Attributes:
        tp: `mesh.tp`.
        ep: `mesh.ep`.
        etp: `mesh.etp`.
        replicated: True if shards have replicas.
        params: `precision.params`.
        families: `precision.families`, by letter.
        low: Letters whose weights are gathered in 8 bits by their recipe; autograd makes their gradients as if they were not.
        degrees: Ranks that share dense tensors, and those that share expert banks.
        whole: True if every rank owns whole tensors: neither TP nor EP divides them.
        masters: `precision.master`.
        master: Bytes of an element in it.
        grads: Bytes of an element in `precision.grads`.
        reduce: Bytes of an element in `precision.reduce`.
        moments: Bytes of an element in `precision.moments`.
        iteration: Bytes of an element in Muon's iteration; 0 without Muon.
        squares: Bytes of an element of x xᵀ in it: those of the plain torch products come on top.
        casts_gradients: True if AdamW's gradients are cast for it.
        recasts: True if reduced gradients are cast.
        padded: True if chunks are whole rows, as FSDP2 cuts them; without padding each is its share of the elements.
        whole_state: True if there is no FSDP2.
        frozen: Dtype of the shards of frozen parameters; None if all are trained.
    """

    tp: int
    ep: int
    etp: int
    replicated: bool
    params: DType
    families: tuple[tuple[str, DType], ...]
    low: frozenset[str]
    degrees: tuple[int, int]
    whole: bool
    masters: DType
    master: int
    grads: int
    reduce: int
    moments: int
    iteration: int
    squares: int
    casts_gradients: bool
    recasts: bool
    padded: bool
    whole_state: bool
    frozen: DType | None = None

    def compute(self, family: str) -> DType:
        """Dtype of the gathered parameters of a family's blocks."""
        return DType.FP8 if family in self.low else self.made(family)

    def stored(self, frozen: bool) -> int:
        """Bytes of an element of a trained tensor's shard, or of a frozen one's."""
        return self.master if self.frozen is None or not frozen else self.frozen.bytes

    def made(self, family: str) -> DType:
        """Dtype of the gradients of a family's parameters in autograd."""
        return next((dtype for letter, dtype in self.families if letter == family), self.params)


def _gathered_low(spec: Spec) -> frozenset[str]:
    """Letters whose weights are gathered in 8 bits by their recipe."""
    recipe = spec.precision.recipe
    if recipe is None or not recipe.param_gather:
        return frozenset()
    return frozenset(letter for letter in FAMILIES if recipe.families is None or letter in recipe.families)


def storage_sizes(spec: Spec, *, padded: bool = True) -> Sizes:
    """The sizes of a spec; without `padded` those of a runtime that could cut between any two elements."""
    mesh, precision = spec.mesh, spec.precision
    iteration = spec.newton_schulz_dtype.bytes if spec.optimizer.uses_muon else 0
    return Sizes(
        mesh.tp,
        mesh.ep,
        mesh.etp,
        mesh.dp_replicate > 1,
        params=precision.params,
        families=tuple(precision.families.items()),
        low=_gathered_low(spec),
        degrees=spec.shard_degrees,
        whole=mesh.tp == mesh.ep == mesh.etp == 1,
        masters=precision.master,
        master=precision.master.bytes,
        grads=precision.grads.bytes,
        reduce=precision.reduce.bytes,
        moments=precision.moments.bytes,
        iteration=iteration,
        squares=2 * iteration + (0 if spec.host.uses_triton else REFERENCE_BYTES),
        casts_gradients=precision.grads is not precision.master,
        recasts=precision.grads is not precision.reduce,
        padded=padded,
        whole_state=spec.has_whole_state,
        frozen=None if spec.lora is None else spec.lora.stored(precision.params),
    )
