"""Which rows of the global batch a rank trains on.

The rows of a step are a function of (step, seed) alone, in the order [microbatch][data rank][sequence]. So D data ranks with M
microbatches, and one process with M · D, read the same microbatches: microbatch m of data rank d is microbatch m · D + d of the one.

TP ranks share their sequences. Each takes its own tokens, a consecutive part; with `vocab_parallel` all of them, for each rank looks
every token up.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from megaplan.schedule import placement, slot_owner
from megaplan.spec.models import Spec
from megarun.parallel.mesh import RankMesh
from megarun.parallel.shapes import token_shape


class TokenRows(Protocol):
    """What a token file offers; `megarun.data.TokenFile` is one."""

    def rows(self, step: int, seed: int, num_rows: int, seq_length: int) -> np.ndarray:
        """Global batch of 0-based `step`, int64 [num_rows, seq_length + 1]."""
        ...


class Batches:
    """This rank's microbatches: token ids on the first stage, their successors on the last (a V has both on rank 0), else nothing."""

    def __init__(self, source: TokenRows, spec: Spec, mesh: RankMesh) -> None:
        self._source, self._mesh = source, mesh
        last_slot = spec.mesh.pp * spec.mesh.vpp - 1
        last_rank, _ = slot_owner(placement(spec.schedule.kind), last_slot, spec.mesh.pp)
        self._reads_tokens, self._reads_labels = mesh.coordinate["pp"] == 0, mesh.coordinate["pp"] == last_rank
        self._seed, self._seq_length = spec.training.seed, spec.batch.seq_length
        _, length = token_shape(spec)
        first = mesh.coordinate["tp"] * length if length < self._seq_length else 0
        self._own = slice(first, first + length), slice(first + 1, first + 1 + length)  # of tokens, and of their successors
        self._shape = (spec.schedule.microbatches_per_update, mesh.num_data_ranks, spec.batch.micro_batch_size)

    def at(self, step: int) -> tuple[Tensor | None, Tensor | None]:
        """Tokens and labels of 0-based `step`, int64 [num_microbatches · micro_batch_size, own tokens] on the rank's device."""
        if not (self._reads_tokens or self._reads_labels):
            return None, None
        num_microbatches, num_ranks, micro_batch_size = self._shape
        num_rows = num_microbatches * num_ranks * micro_batch_size
        rows = self._source.rows(step, self._seed, num_rows, self._seq_length)
        mine = torch.from_numpy(rows).view(*self._shape, -1)[:, self._mesh.data_rank].flatten(0, 1)
        here, next_one = self._own
        tokens = mine[:, here].contiguous().to(self._mesh.device) if self._reads_tokens else None
        labels = mine[:, next_one].contiguous().to(self._mesh.device) if self._reads_labels else None
        return tokens, labels
