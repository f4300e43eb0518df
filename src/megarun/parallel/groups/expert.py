"""Expert parallelism: which rank owns an expert, how many rows travel, and the exchange itself (R-58).

The ranks of an EP group hold consecutive experts: with E experts on ep ranks, expert e lives on rank e // (E / ep). Rows leave sorted by
expert, so what goes to one rank is one piece, and a rank receives each source's piece in order, without padding:

- the counts of rows for every expert are exchanged first, the same number to every rank;
- the host learns how many rows go to each rank and come from it: the one number that a block reads from the device;
- rows and their routing weights follow, and come back after the experts with the same splits turned round.

An all-to-all needs neither its input nor its output for its gradient, so nothing is kept: the gradient travels the other way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megaplan.families.moe.program import ExpertMesh, received_rows
from megaplan.spec.models import MixtureOfExperts, Spec
from megarun.parallel.groups.mesh import RankMesh


@dataclass(frozen=True, slots=True)
class Splits:
    """Rows that a rank exchanges with every rank of its group, by rank.

    Attributes:
        sent: To each rank's experts.
        received: From each rank, for this rank's experts.
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]

    @property
    def num_received(self) -> int:
        """Rows this rank's experts work on."""
        return sum(self.received)


class Routing(Protocol):
    """Tells the host how many rows travel."""

    def __call__(self, sent: Tensor, received: Tensor) -> Splits:
        """Splits of one block and microbatch.

        Args:
            sent: int32 [ep, E / ep], rows for each rank's experts.
            received: The same shape, rows from each rank for this rank's experts.
        """
        ...


class MeasuredRouting:
    """What the router chose: reads the counts, which waits for the device."""

    def __call__(self, sent: Tensor, received: Tensor) -> Splits:
        """See `Routing`."""
        here, there = torch.stack([sent, received]).sum(2).tolist()
        return Splits(tuple(here), tuple(there))


class StatedRouting:
    """What the spec states, for tensors without values: this rank is the busiest of its group.

    It receives `moe.routing_skew` times the mean, the same from every rank, itself among them; what it does not send to itself it spreads
    over the others.
    """

    def __init__(self, moe: MixtureOfExperts, num_tokens: int, degree: int, index: int) -> None:
        """Args: the spec's section, tokens of the rank and microbatch, ranks of the group, this rank's place."""
        received = spread(received_rows(moe, num_tokens, ExpertMesh(degree, 1)), degree)
        elsewhere = spread(num_tokens * moe.top_k - received[index], degree - 1)
        self._splits = Splits((*elsewhere[:index], received[index], *elsewhere[index:]), received)

    def __call__(self, sent: Tensor, received: Tensor) -> Splits:  # noqa: ARG002  they have no values
        """See `Routing`."""
        return self._splits


@dataclass(frozen=True, slots=True)
class ExpertParallel:
    """The EP group of a rank.

    Attributes:
        degree: Ranks in the group.
        index: This rank's place in it.
        group: None on a degree of one, where no row travels.
        routing: How the host learns the splits.
    """

    degree: int
    index: int
    group: dist.ProcessGroup | None
    routing: Routing

    def share(self, num_experts: int) -> int:
        """Experts a rank owns; the rules of the spec say that it divides (MP203)."""
        return num_experts // self.degree

    def owner(self, expert: int, num_experts: int) -> int:
        """The rank of the group that owns an expert."""
        return expert // self.share(num_experts)

    def announce(self, counts: Tensor) -> tuple[Tensor, Splits]:
        """Tell every rank how many rows it will get.

        Args:
            counts: int32 [E], rows for each expert.

        Returns:
            int32 [ep, E / ep], rows from each rank for each of this rank's experts; and the splits on the host.
        """
        sent = counts.view(self.degree, -1)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        return received, self.routing(sent, received)

    def exchange(self, splits: Splits, *rows: Tensor) -> tuple[Tensor, ...]:
        """Send rows to their experts: [Σ sent, ...] each -> [Σ received, ...]."""
        return _exchange(self, splits.sent, splits.received, *rows)

    def give_back(self, splits: Splits, rows: Tensor) -> Tensor:
        """Send rows back where they came from: [Σ received, ...] -> [Σ sent, ...]."""
        return _exchange(self, splits.received, splits.sent, rows)[0]

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Rows in order of the ranks they go to -> rows in order of the ranks they came from."""
        arrived = rows.new_empty((sum(received), *rows.shape[1:]))
        dist.all_to_all_single(arrived, rows.contiguous(), list(received), list(sent), group=self.group)
        return arrived


LOCAL = ExpertParallel(1, 0, None, MeasuredRouting())
"""Every expert is here."""


def expert_parallel(spec: Spec, mesh: RankMesh, *, measured: bool = True) -> ExpertParallel:
    """This rank's EP group.

    Args:
        spec: States what is not measured.
        mesh: This rank's place.
        measured: Whether tensors have values that the routing can be read from.
    """
    degree, moe = spec.mesh.ep, spec.model.moe
    if degree == 1 or moe is None:
        return LOCAL
    index = mesh.expert_coordinate["ep"]
    num_tokens = spec.batch.micro_batch_size * spec.batch.seq_length // (spec.mesh.cp * spec.mesh.tp)
    routing: Routing = MeasuredRouting() if measured else StatedRouting(moe, num_tokens, degree, index)
    return ExpertParallel(degree, index, mesh.experts["ep"].get_group(), routing)


def spread(count: int, parts: int) -> tuple[int, ...]:
    """A count over parts as evenly as whole numbers go, the first ones larger."""
    return tuple(count // parts + (index < count % parts) for index in range(parts))


def _exchange(ep: ExpertParallel, sent: Sequence[int], received: Sequence[int], *rows: Tensor) -> tuple[Tensor, ...]:
    results: tuple[Tensor, ...] = _Exchange.apply(ep, sent, received, *rows)  # type: ignore[no-untyped-call]
    return results


class _Exchange(torch.autograd.Function):
    """All-to-alls with the same splits, one after the other on every rank, forward and backward; keeps nothing."""

    @staticmethod
    def forward(ctx: Any, ep: ExpertParallel, sent: Sequence[int], received: Sequence[int], *rows: Tensor) -> tuple[Tensor, ...]:
        """[Σ sent, ...] each -> [Σ received, ...]."""
        ctx.ep, ctx.sent, ctx.received = ep, sent, received
        return tuple(ep.all_to_all(each, sent, received) for each in rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients go back the way the rows came."""
        return None, None, None, *(ctx.ep.all_to_all(gradient, ctx.received, ctx.sent) for gradient in gradients)
