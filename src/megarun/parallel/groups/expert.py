"""Expert parallelism: ownership of experts, row counts, and the exchange of rows (R-58).

The ranks of an EP group hold consecutive experts: with E experts on ep ranks, expert e is on rank e // (E / ep). Rows are sent sorted by
expert, so the rows for one rank are contiguous, and a rank receives each source's rows in order, without padding:

- the counts of rows for every expert are exchanged first, the same number to every rank;
- the host reads how many rows each rank sends and receives, the only device synchronisation of a block;
- rows and their routing weights are sent, and results returned after the experts with the reversed splits.

The ranks of an ETP group have a slice of each of the same experts. Rows that arrived at one of them are gathered by all, in the order of
these ranks and of the sources, and the partial results of their slices are summed on the rank at which the row arrived.

With `host.moe_dispatcher: allgather` every rank has the tokens of all ranks of its EP and ETP groups instead, in the order of the ETP ranks
and of the EP ranks. It picks the rows of its own experts, and the ranks' partial sums are reduced and scattered to the tokens' ranks.

The gradient of an all-to-all is the reverse all-to-all, the gradient of a gather is the sum and vice versa; none needs input or output,
so nothing is saved.

Source: NVIDIA/Megatron-LM, megatron/core/transformer/moe/token_dispatcher.py (`MoEAllGatherTokenDispatcher`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megakernels import dispatch_plan
from megaplan.families.moe.program import ExpertMesh, received_rows
from megaplan.spec.models import MixtureOfExperts, Spec
from megarun.parallel.groups.gathered_tokens import gathered_tokens, scattered_sum
from megarun.parallel.groups.mesh import RankMesh
from megarun.parallel.groups.slices import gathered_rows, summed_rows
from megarun.parallel.groups.tensor import ALONE, TensorParallel
from megarun.parallel.groups.turns import hand_over, takes_turns


@dataclass(frozen=True, slots=True)
class Splits:
    """Rows that a rank exchanges with every rank of its group, by rank.

    Attributes:
        sent: Rows sent to each rank's experts.
        received: Rows received from each rank for this rank's experts.
        gathered: Rows that arrived at each rank of the ETP group; empty if experts are not sharded.
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]
    gathered: tuple[int, ...] = ()

    @property
    def num_received(self) -> int:
        """Total rows of this rank's experts."""
        return sum(self.gathered or self.received)


class Routing(Protocol):
    """Provides the row counts on the host."""

    def in_layer(self, variant: float | None) -> "Routing":
        """The counts in an E layer of a variant (`MixtureOfExperts.variant_of`)."""
        ...

    def __call__(self, sent: Tensor, received: Tensor) -> Splits:
        """Splits of one block and microbatch.

        Args:
            sent: int32 [ep, E / ep], rows for each rank's experts.
            received: int32 [etp · ep, E / ep], rows from each rank for this rank's experts, by the ETP rank at which they arrived.
        """
        ...

    def of_experts(self, counts: Tensor) -> Sequence[int]:
        """Rows of each EP rank's experts, of the tokens of all ranks: counts int32 [ep, E / ep]."""
        ...


class MeasuredRouting:
    """Row counts of the router, read from the device (a synchronisation)."""

    def __init__(self, slice_index: int = 0) -> None:
        """Args: rank within the ETP group."""
        self._slice = slice_index

    def in_layer(self, variant: float | None) -> "MeasuredRouting":  # noqa: ARG002  counts are read
        """See `Routing`."""
        return self

    def __call__(self, sent: Tensor, received: Tensor) -> Splits:
        """See `Routing`."""
        numbers, degree = torch.cat([sent, received]).sum(1).tolist(), len(sent)
        here, *there = (tuple(numbers[first : first + degree]) for first in range(0, len(numbers), degree))
        return Splits(here, there[self._slice], tuple(map(sum, there)) if len(there) > 1 else ())

    def of_experts(self, counts: Tensor) -> Sequence[int]:
        """See `Routing`."""
        numbers: list[int] = counts.sum(1).tolist()
        return numbers


class StatedRouting:
    """Row counts stated by the spec, for fake tensors: this rank is the busiest of its group.

    It receives the layer's `moe.routing_skew` times the mean, equally from every rank including itself; the rows that it does not send to
    itself are spread over the others. The same number of rows arrives at every rank of its ETP group.
    """

    def __init__(self, moe: MixtureOfExperts, num_tokens: int, mesh: ExpertMesh, index: int, variant: float | None = None) -> None:
        """Args: `moe` section of the spec, tokens per rank and microbatch, degrees, rank within the EP group, variant of the layer."""
        self._given = moe, num_tokens, mesh, index
        arrived = received_rows(moe, num_tokens, ExpertMesh(mesh.ep, 1), variant)
        received = spread(arrived, mesh.ep)
        elsewhere = spread(moe.rows_of(num_tokens) - received[index], mesh.ep - 1)
        gathered = (arrived,) * mesh.etp if mesh.etp > 1 else ()
        self._splits = Splits((*elsewhere[:index], received[index], *elsewhere[index:]), received, gathered)
        others = spread(moe.rows_of(num_tokens) * mesh.ep * mesh.etp - arrived * mesh.etp, mesh.ep - 1)
        self._rows = (*others[:index], arrived * mesh.etp, *others[index:])

    def in_layer(self, variant: float | None) -> "StatedRouting":
        """The counts in an E layer of a variant."""
        return self if variant is None else StatedRouting(*self._given, variant)

    def __call__(self, sent: Tensor, received: Tensor) -> Splits:  # noqa: ARG002  fake tensors have no values
        """See `Routing`."""
        return self._splits

    def of_experts(self, counts: Tensor) -> Sequence[int]:  # noqa: ARG002
        """See `Routing`."""
        return self._rows


@dataclass(frozen=True, slots=True)
class ExpertParallel:
    """The EP group of a rank.

    Attributes:
        degree: Number of ranks in the group.
        index: Rank within the group.
        group: Process group; None if the degree is one.
        routing: Source of the splits on the host.
        slices: The ETP group: the ranks with the slices of this rank's experts.
        by_gather: True if every rank gathers all tokens, instead of the rows of its experts.
        passes_turns: True if, in a pair, the other computation runs during an exchange.
    """

    degree: int
    index: int
    group: dist.ProcessGroup | None
    routing: Routing
    slices: TensorParallel = ALONE
    by_gather: bool = False
    passes_turns: bool = True

    @property
    def travels(self) -> bool:
        """True if other ranks compute this rank's rows."""
        return self.degree * self.slices.degree > 1

    def in_layer(self, variant: float | None) -> "ExpertParallel":
        """The group in an E layer of a variant (`MixtureOfExperts.variant_of`)."""
        return replace(self, routing=self.routing.in_layer(variant))

    def share(self, num_experts: int) -> int:
        """Number of experts per rank; the spec's rules ensure that it divides (MP203)."""
        return num_experts // self.degree

    def owner(self, expert: int, num_experts: int) -> int:
        """The rank of the group that owns an expert."""
        return expert // self.share(num_experts)

    def announce(self, counts: Tensor, capacity: int | None = None) -> tuple[Tensor, Splits]:
        """Exchange row counts with every rank, which all ranks already know if experts have a capacity.

        Args:
            counts: Rows for each expert, int32 [E].
            capacity: Rows that every expert has from every rank.

        Returns:
            int32 [etp · ep, E / ep], rows from each rank for each of this rank's experts; and the splits on the host.
        """
        slices = self.slices.degree
        if capacity is not None:
            share = self.share(counts.shape[0])
            each = (share * capacity,) * self.degree
            gathered = (sum(each),) * slices if slices > 1 else ()
            return counts.new_full((slices * self.degree, share), capacity), Splits(each, each, gathered)
        sent = counts.view(self.degree, -1)
        if not self.travels:
            return sent.clone(), self.routing(sent, sent)
        received = sent
        if self.degree > 1:
            received = torch.empty_like(sent)
            dist.all_to_all_single(received, sent, group=self.group)
        if slices > 1:
            received = self.slices.start_gather(received.unsqueeze(0)).wait().squeeze(0)
        return received, self.routing(sent, received)

    def exchange(self, splits: Splits, *rows: Tensor) -> tuple[Tensor, ...]:
        """Send rows to their experts: [Σ sent, ...] each -> [Σ received, ...], or [Σ gathered, ...]."""
        return gathered_rows(self.slices, splits.gathered, *_exchange(self, splits.sent, splits.received, *rows))

    def give_back(self, splits: Splits, rows: Tensor) -> Tensor:
        """Return rows to their source ranks, slices summed: [Σ received, ...], or [Σ gathered, ...] -> [Σ sent, ...]."""
        rows = summed_rows(self.slices, splits.gathered, rows)
        return _exchange(self, splits.received, splits.sent, rows)[0]

    def gather(self, tokens: Tensor) -> Tensor:
        """Tokens of all ranks, by ETP rank and EP rank: [N, ...] each -> [etp · ep · N, ...]."""
        return gathered_tokens(self.slices, gathered_tokens(self._members, tokens))

    def scatter(self, partial: Tensor) -> Tensor:
        """This rank's tokens of the sum over all ranks: [etp · ep · N, ...] -> [N, ...]."""
        return scattered_sum(self._members, scattered_sum(self.slices, partial))

    def own_rows(self, indices: Tensor, num_choices: int, num_experts: int) -> tuple[Tensor, Tensor]:
        """Rows of this rank's experts among the tokens of all ranks.

        Args:
            indices: Choices of this rank's tokens, int32 [N, k].
            num_choices: Choices of the router.
            num_experts: E; the choices after them are null experts.

        Returns:
            int32 [M], the flat index token · k + slot of each row, sorted by expert, of gathered tokens; and int32 [E / ep], rows of each.
        """
        rows, counts = dispatch_plan(self.gather(indices), num_choices)
        by_rank = counts[:num_experts].view(self.degree, -1)
        numbers = self.routing.of_experts(by_rank)
        first = sum(numbers[: self.index])
        return rows[first : first + numbers[self.index]].clone(), by_rank[self.index].clone()  # kernels read aligned tensors

    def own_buffers(self, places: Tensor, num_experts: int, num_pairs: int) -> tuple[Tensor, Tensor]:
        """The same for experts with buffers of one size, planned by each rank for its own tokens.

        Args:
            places: int32 [E · C], the flat index of each row of the experts' buffers, -1 for an empty one.
            num_experts: E.
            num_pairs: N · k, pairs of a token and a slot of one rank.
        """
        share = self.share(num_experts)
        own = self.gather(places).view(-1, self.degree, share, places.shape[0] // num_experts)[:, self.index]
        first = torch.arange(0, len(own) * num_pairs, num_pairs, dtype=own.dtype, device=own.device)
        rows = torch.where(own < 0, own, own + first.view(-1, 1, 1)).transpose(0, 1).flatten()
        return rows, rows.new_full((share,), rows.shape[0] // share)

    @property
    def _members(self) -> TensorParallel:
        return TensorParallel(self.degree, self.index, self.group)

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Rows ordered by destination rank -> rows ordered by source rank."""
        arrived = rows.new_empty((sum(received), *rows.shape[1:]))
        dist.all_to_all_single(arrived, rows.contiguous(), list(received), list(sent), group=self.group)
        return arrived

    def start_all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> tuple[Tensor, Tensor, dist.Work]:
        """The same without waiting: received rows, sent rows (which must stay alive until the end), and the exchange."""
        arrived, leaving = rows.new_empty((sum(received), *rows.shape[1:])), rows.contiguous()
        return arrived, leaving, dist.all_to_all_single(arrived, leaving, list(received), list(sent), group=self.group, async_op=True)


LOCAL = ExpertParallel(1, 0, None, MeasuredRouting())
"""No expert parallelism: this rank has every expert."""


def expert_parallel(spec: Spec, mesh: RankMesh, *, measured: bool = True) -> ExpertParallel:
    """This rank's EP group, with its ETP group.

    Args:
        spec: Spec, which states row counts that are not measured.
        mesh: This rank's position in the mesh.
        measured: True if row counts are read from tensors.
    """
    degrees, moe = ExpertMesh(spec.mesh.ep, spec.mesh.etp), spec.model.moe
    if moe is None or (degrees.ep * degrees.etp == 1 and (measured or not moe.null_experts)):
        return LOCAL
    index, slice_index = (mesh.expert_coordinate[axis] if degree > 1 else 0 for axis, degree in degrees._asdict().items())
    num_tokens = spec.batch.micro_batch_size * spec.batch.seq_length // (spec.mesh.cp * spec.mesh.tp)
    routing: Routing = MeasuredRouting(slice_index) if measured else StatedRouting(moe, num_tokens, degrees, index)
    slices = TensorParallel(degrees.etp, slice_index, mesh.experts["etp"].get_group()) if degrees.etp > 1 else ALONE
    group = mesh.experts["ep"].get_group() if degrees.ep > 1 else None
    return ExpertParallel(degrees.ep, index, group, routing, slices, spec.host.gathers_tokens)


def spread(count: int, parts: int) -> tuple[int, ...]:
    """A count divided as evenly as possible, the first parts larger by one."""
    return tuple(count // parts + (index < count % parts) for index in range(parts))


def _exchange(ep: ExpertParallel, sent: Sequence[int], received: Sequence[int], *rows: Tensor) -> tuple[Tensor, ...]:
    if ep.degree == 1:
        return rows
    results: tuple[Tensor, ...] = _Exchange.apply(ep, sent, received, *rows)  # type: ignore[no-untyped-call]
    return results


class _Exchange(torch.autograd.Function):
    """Sequential all-to-alls with the same splits, forward and backward; saves nothing."""

    @staticmethod
    def forward(ctx: Any, ep: ExpertParallel, sent: Sequence[int], received: Sequence[int], *rows: Tensor) -> tuple[Tensor, ...]:
        """[Σ sent, ...] each -> [Σ received, ...]."""
        ctx.ep, ctx.sent, ctx.received = ep, sent, received
        return _moved(ep, sent, received, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients are sent back with the reversed splits."""
        return None, None, None, *_moved(ctx.ep, ctx.received, ctx.sent, gradients)


def _moved(ep: ExpertParallel, sent: Sequence[int], received: Sequence[int], rows: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """All-to-alls of these rows; the other computation of a pair runs while they are in transit."""
    if not (ep.passes_turns and takes_turns()):
        return tuple(ep.all_to_all(each, sent, received) for each in rows)
    started = [ep.start_all_to_all(each, sent, received) for each in rows]
    hand_over()
    for _, _, work in started:
        work.wait()
    return tuple(arrived for arrived, _, _ in started)
