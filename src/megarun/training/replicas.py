"""`--check-replicas`: the copies of each tensor on several ranks are compared bit by bit, to find a device that computes wrong values.

Data-parallel replicas, parameters that tensor parallelism replicates, and their optimizer state get the same updates on every rank that has
them. A sum of each tensor's bits differs if one bit does. Tensors of a single rank, such as a shard of FSDP2 without another replica,
cannot be compared.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megarun.checkpoint.keeper import Keeper
from megarun.checkpoint.pieces import Pieces
from megarun.checkpoint.state import model_state, optimizer_state
from megarun.engine.trainer import Trainer
from megarun.errors import place, refusal
from megarun.job.job import Job

WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by the size of an element."""
MOST_NAMED = 8
Sums = dict[str, tuple[str, int]]
"""The tensor's name and the sum of its bits, by the tensor's part."""


class ReplicaChecks:
    """Compares the ranks' copies of state after every few steps; every method is collective.

    Args:
        every: Steps between two checks; 0: none.
        keeper: Checkpoints of the run.
        trainer: State of this rank.
        job: Job of the plan.
    """

    def __init__(self, every: int, keeper: Keeper, trainer: Trainer, job: Job) -> None:
        self._every, self._keeper, self._trainer, self._job = every, keeper, trainer, job

    def after(self, step: int, *, saves: bool) -> None:
        """Compare after a step if a check is due, or before a save: a checkpoint that is kept has been compared.

        Copies in memory are made after every step. Checkpoints of unchecked steps do not count once copies differ, so a restart repeats
        these steps.

        Raises:
            MegaplanError: MP676 on every rank: copies differ.
        """
        if not self._every or (step % self._every and not saves):
            return
        found: list[Sums] = [{} for _ in range(dist.get_world_size())]
        inventory = self._job.inventory
        state = [*model_state(self._trainer, inventory), *optimizer_state(self._trainer, inventory)]
        dist.all_gather_object(found, sums_of(state), group=self._keeper.control)
        lines = differences(found)
        if lines:
            self._keeper.finish_save()
            if self._every > 1:
                self._keeper.forget_copies()
            more = [f"and {len(lines) - MOST_NAMED} more"] if len(lines) > MOST_NAMED else []
            shown = [
                f"{name}: {', '.join(place(rank, self._job.spec.mesh) for rank in ranks)} {verb}"
                for name, ranks, verb in lines[:MOST_NAMED]
            ]
            raise refusal("MP676", "\n".join([f"after step {step}:", *shown, *more]))


def sums_of(state: Sequence[tuple[str, Pieces]]) -> Sums:
    """The sum of the bits of each tensor of a rank, keyed by tensor and part. One device synchronisation."""
    parts = [hashlib.sha256(f"{name} {pieces.boxes}".encode()).hexdigest()[:16] for name, pieces in state]
    sums = torch.stack([sum_of_bits(pieces.local) for _, pieces in state]).tolist() if state else []
    return {part: (name, total) for part, (name, _), total in zip(parts, state, sums, strict=True)}


def sum_of_bits(tensor: Tensor) -> Tensor:
    """The sum of a tensor's elements as integers, int64 []: another value if one bit is another."""
    whole = tensor.detach().contiguous()
    return whole.view(WORDS[whole.element_size()]).sum(dtype=torch.int64)


def differences(found: Sequence[Sums]) -> list[tuple[str, list[int], str]]:
    """Each tensor whose copies differ: its name, the ranks at fault, and the difference.

    A minority is named. Without a majority (for example two copies), all ranks with a copy are named.
    """
    lines = []
    holders: dict[str, list[int]] = {}
    for rank, sums in enumerate(found):
        for part in sums:
            holders.setdefault(part, []).append(rank)
    for part, ranks in holders.items():
        counts = Counter(found[rank][part][1] for rank in ranks).most_common()
        if len(counts) > 1:
            usual = counts[0][0] if counts[0][1] > len(ranks) / 2 else None
            odd = [rank for rank in ranks if found[rank][part][1] != usual]
            verb = "differ from each other" if usual is None else f"differs from {counts[0][1]} others"
            lines.append((found[ranks[0]][part][0], odd, verb))
    return lines
