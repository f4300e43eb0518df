"""Which rows of the global batch a rank trains on.

The rows of a step are a function of (step, seed) alone, in the order [microbatch][data rank][sequence]. So D data ranks with M
microbatches, and one process with M · D, read the same microbatches: microbatch m of data rank d is microbatch m · D + d of the one.

CP and TP ranks share their sequences. A CP rank has two pieces of each (`megarun.parallel.groups.context`), of which a TP rank takes its
own tokens, a consecutive part; with `vocab_parallel` all of them, for each rank looks every token up.

Packed rows (`data.packing: documents`) have the document of every token beside them. Every rank reads it from the token file itself, for
its own rows whichever stage it has: no stage waits for another's, and nothing is sent. The last token of a document has no label; how many
labels the whole batch has is counted from the same table, the same on every rank.

What features look at beyond a token, those before it and those after its label, is taken from whole rows, before these are cut into pieces:
it never leaves the row or, in packed rows, the document, and no stage has to know of either.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from megaplan.schedules import placement, slot_owner
from megaplan.spec.models import Spec
from megarun.errors import refusal
from megarun.parallel.groups.context import ContextParallel
from megarun.parallel.groups.mesh import RankMesh
from megarun.parallel.groups.shapes import residual_shape, token_shape
from megarun.parallel.groups.tensor_vocabulary import IGNORE_INDEX

MISSING = -1
"""What n-grams see before the first token of a row or document."""


class TokenRows(Protocol):
    """What a token file offers; `TokenFile` and `TokenMix` are such."""

    def rows(self, step: int, seed: int, num_rows: int, seq_length: int) -> np.ndarray:
        """Global batch of 0-based `step`, int64 [num_rows, seq_length + 1]."""
        ...

    def starts(self, step: int, seed: int, num_rows: int, seq_length: int) -> np.ndarray:
        """Of each of its tokens, the column of its document's first, 0 if that is before the row: int32 [num_rows, seq_length + 1]."""
        ...

    def structure_rows(self, step: int, seed: int, num_rows: int, seq_length: int) -> np.ndarray:
        """Classes of its first seq_length tokens, uint8 [num_rows, seq_length]."""
        ...


@dataclass(frozen=True, slots=True)
class Packed:
    """Where the documents of packed rows are.

    Attributes:
        starts: int32 [num_microbatches · micro_batch_size, T / cp] on the rank's device: each token's first position of its document, as
            `ContextParallel.own_starts` counts it.
        num_targets: Labels of the whole batch, over all microbatches and data ranks: what its loss is divided by.
    """

    starts: Tensor
    num_targets: int


class Batch(NamedTuple):
    """A rank's part of a step; rows are num_microbatches · micro_batch_size, t is the residual stream's own tokens.

    Attributes:
        tokens: int64 [rows, own tokens] (`token_shape`) on the first stage, else None.
        labels: Each token's successor, or `IGNORE_INDEX`: the same shape on the last stage, else None.
        packed: None where each row is one text.
        before: int64 [rows, n − 1, t] on the first stage of a model with n-grams of up to n tokens: the tokens 1, 2, … places before, or
            `MISSING`.
        structure: Classes of own tokens, uint8 [rows, t], on the first stage of a model that embeds them.
        following: On the last stage of a model that predicts further tokens, the label of each depth, as `labels`: 2, 3, … places on.
    """

    tokens: Tensor | None
    labels: Tensor | None
    packed: Packed | None = None
    before: Tensor | None = None
    structure: Tensor | None = None
    following: tuple[Tensor, ...] = ()

    def beside(self) -> dict[str, Any]:
        """What stages take by keyword beside tokens or residual stream; one that needs a thing not of its own does not read it."""
        given: dict[str, Any] = {"before": self.before, "structure": self.structure, "labels": self.labels}
        given["starts"] = self.packed.starts if self.packed is not None else None
        if self.following:
            given["following"] = self.following
        return {name: value for name, value in given.items() if value is not None}

    def part(self, index: int, num_parts: int) -> Batch:
        """Rows of one of `num_parts` equal parts, views of these."""

        def cut(rows: Tensor | None) -> Tensor | None:
            return None if rows is None else rows.chunk(num_parts)[index]

        packed = self.packed
        if packed is not None:
            packed = Packed(packed.starts.chunk(num_parts)[index], packed.num_targets)
        following = tuple(rows.chunk(num_parts)[index] for rows in self.following)
        return Batch(cut(self.tokens), cut(self.labels), packed, cut(self.before), cut(self.structure), following)


class Batches:
    """This rank's microbatches: token ids on the first stage, their successors on the last (a V has both on rank 0), else nothing."""

    def __init__(self, source: TokenRows, spec: Spec, mesh: RankMesh) -> None:
        self._source, self._mesh = source, mesh
        last_slot = spec.mesh.pp * spec.mesh.vpp - 1
        last_rank, _ = slot_owner(placement(spec.schedule.kind), last_slot, spec.mesh.pp)
        self._reads_tokens, self._reads_labels = mesh.coordinate["pp"] == 0, mesh.coordinate["pp"] == last_rank
        self._packs, self._seed, self._seq_length = spec.data.packing == "documents", spec.training.seed, spec.batch.seq_length
        self._cp, tp = ContextParallel(spec.mesh.cp, mesh.coordinate["cp"], None), mesh.coordinate["tp"]
        shared, (_, length), (_, share, _) = self._cp.positions(self._seq_length), token_shape(spec), residual_shape(spec)
        self._share = shared[tp * share : (tp + 1) * share]
        self._own = self._share if length == share else shared
        features = spec.model.features
        self._num_before = features.ngram.max_order - 1 if features.ngram is not None else 0
        self._num_further = features.mtp.depth if features.mtp is not None else 0
        self._has_classes = features.structure is not None
        self._shape = (spec.schedule.microbatches_per_update, mesh.num_data_ranks, spec.batch.micro_batch_size)

    def at(self, step: int) -> Batch:
        """The rank's part of 0-based `step`, on its device.

        Raises:
            MegaplanError: MP621 if packed rows leave the whole batch without a label.
        """
        batch = step, self._seed, prod(self._shape), self._seq_length
        device, packed, starts = self._mesh.device, None, None
        if self._packs:
            table = self._source.starts(*batch)
            num_targets = int((table[:, 1:] <= np.arange(self._seq_length)).sum())  # the next token is of the same document
            if num_targets == 0:
                tokens = prod(self._shape) * self._seq_length
                raise refusal("MP621", f"step {step + 1}: {tokens:,} tokens, each the last one of its document", "data.packing")
            starts = self._mine(table)
            packed = Packed(self._cp.own_starts(starts[:, :-1]).contiguous().to(device), num_targets)
        if not (self._reads_tokens or self._reads_labels):
            return Batch(None, None, packed)
        rows = self._mine(self._source.rows(*batch))
        found = Batch(None, None, packed)
        if self._reads_tokens:
            found = found._replace(tokens=rows[:, self._own].to(device))
            if self._num_before:
                places = [_earlier(rows, starts, places)[:, self._share] for places in range(1, self._num_before + 1)]
                found = found._replace(before=torch.stack(places, 1).to(device))
            if self._has_classes:
                found = found._replace(structure=self._mine(self._source.structure_rows(*batch))[:, self._share].to(device))
        if self._reads_labels:
            first, *further = [_later(rows, starts, places)[:, self._own].to(device) for places in range(1, self._num_further + 2)]
            found = found._replace(labels=first, following=tuple(further))
        return found

    def _mine(self, rows: np.ndarray) -> Tensor:
        """Rows of the whole batch [num_rows, n] -> of this rank's microbatches, one behind the other."""
        return torch.from_numpy(rows).view(*self._shape, -1)[:, self._mesh.data_rank].flatten(0, 1)


def _later(rows: Tensor, starts: Tensor | None, places: int) -> Tensor:
    """The token `places` behind each one of its document, else `IGNORE_INDEX`: int64 [n, T] from rows and starts [n, T + 1]."""
    length = rows.shape[1] - 1
    found = torch.full_like(rows[:, :length], IGNORE_INDEX)
    known = slice(0, max(length + 1 - places, 0))
    found[:, known] = rows[:, places:]
    if starts is not None:
        found[:, known].masked_fill_(starts[:, places:] > torch.arange(known.stop), IGNORE_INDEX)
    return found


def _earlier(rows: Tensor, starts: Tensor | None, places: int) -> Tensor:
    """The token `places` before each one of its document, else `MISSING`: int64 [n, T] from rows and starts [n, T + 1]."""
    length = rows.shape[1] - 1
    found = torch.full_like(rows[:, :length], MISSING)
    num_known = max(length - places, 0)
    found[:, places:] = rows[:, :num_known]
    if starts is not None:
        found[:, places:].masked_fill_(starts[:, places:length] > torch.arange(num_known), MISSING)
    return found
