"""Which rows of the global batch a rank trains on.

The rows of a step are a function of (step, seed) alone, in the order [microbatch][data rank][sequence]. So D data ranks with M
microbatches, and one process with M · D, read the same microbatches: microbatch m of data rank d is microbatch m · D + d of the one.

CP and TP ranks share their sequences. A CP rank has two pieces of each (`megarun.parallel.context`), of which a TP rank takes its own
tokens, a consecutive part; with `vocab_parallel` all of them, for each rank looks every token up.

Packed rows (`data.packing: documents`) have the document of every token beside them. Every rank reads it from the token file itself, for
its own rows whichever stage it has: no stage waits for another's, and nothing is sent. The last token of a document has no label; how many
labels the whole batch has is counted from the same table, the same on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from megaplan.schedule import placement, slot_owner
from megaplan.spec.models import Spec
from megarun.errors import refusal
from megarun.parallel.context import ContextParallel
from megarun.parallel.mesh import RankMesh
from megarun.parallel.shapes import token_shape


class TokenRows(Protocol):
    """What a token file offers; `megarun.data.TokenFile` is one."""

    def rows(self, step: int, seed: int, num_rows: int, seq_length: int) -> np.ndarray:
        """Global batch of 0-based `step`, int64 [num_rows, seq_length + 1]."""
        ...

    def starts(self, step: int, seed: int, num_rows: int, seq_length: int) -> np.ndarray:
        """Of each of its tokens, the column of its document's first, 0 if that is before the row: int32 [num_rows, seq_length + 1]."""
        ...


IGNORED = -100
"""Label of a token that predicts nothing."""


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
    """A rank's part of a step.

    Attributes:
        tokens: int64 [num_microbatches · micro_batch_size, own tokens] on the first stage, else None.
        labels: Each token's successor, or `IGNORED`: the same shape on the last stage, else None.
        packed: None where each row is one text.
    """

    tokens: Tensor | None
    labels: Tensor | None
    packed: Packed | None = None


class Batches:
    """This rank's microbatches: token ids on the first stage, their successors on the last (a V has both on rank 0), else nothing."""

    def __init__(self, source: TokenRows, spec: Spec, mesh: RankMesh) -> None:
        self._source, self._mesh = source, mesh
        last_slot = spec.mesh.pp * spec.mesh.vpp - 1
        last_rank, _ = slot_owner(placement(spec.schedule.kind), last_slot, spec.mesh.pp)
        self._reads_tokens, self._reads_labels = mesh.coordinate["pp"] == 0, mesh.coordinate["pp"] == last_rank
        self._packs, self._seed, self._seq_length = spec.data.packing == "documents", spec.training.seed, spec.batch.seq_length
        _, length = token_shape(spec)
        self._cp = ContextParallel(spec.mesh.cp, mesh.coordinate["cp"], None)
        shared = self._cp.positions(self._seq_length)
        first = mesh.coordinate["tp"] * length if length < len(shared) else 0
        self._own = shared[first : first + length]
        self._shape = (spec.schedule.microbatches_per_update, mesh.num_data_ranks, spec.batch.micro_batch_size)

    def at(self, step: int) -> Batch:
        """The rank's part of 0-based `step`, on its device.

        Raises:
            MegaplanError: MP621 if packed rows leave the whole batch without a label.
        """
        batch = step, self._seed, prod(self._shape), self._seq_length
        device, packed, last = self._mesh.device, None, None
        if self._packs:
            starts = self._source.starts(*batch)
            last = starts[:, 1:] == np.arange(1, self._seq_length + 1)  # of its document: the next token begins another
            num_targets = int((~last).sum())
            if num_targets == 0:
                raise refusal("MP621", f"step {step + 1}: {last.size:,} tokens, each the last one of its document", "data.packing")
            packed = Packed(self._cp.own_starts(self._mine(starts[:, :-1])).contiguous().to(device), num_targets)
        if not (self._reads_tokens or self._reads_labels):
            return Batch(None, None, packed)
        rows = self._mine(self._source.rows(*batch))
        successors = rows[:, 1:] if last is None else rows[:, 1:].masked_fill(self._mine(last), IGNORED)
        tokens = rows[:, :-1][:, self._own].contiguous().to(device) if self._reads_tokens else None
        labels = successors[:, self._own].contiguous().to(device) if self._reads_labels else None
        return Batch(tokens, labels, packed)

    def _mine(self, rows: np.ndarray) -> Tensor:
        """Rows of the whole batch [num_rows, n] -> of this rank's microbatches, one behind the other."""
        return torch.from_numpy(rows).view(*self._shape, -1)[:, self._mesh.data_rank].flatten(0, 1)
