"""Muon: momentum orthogonalised by Newton-Schulz, for plain tensors and FSDP2 shards, single matrices and stacks.

Tensors of one shape are updated in rounds (`megaplan.inventory.tensors`), each matrix by one of the ranks that share it:
ranks send it their rows of the momentum's update, and it sends them their rows of the result. Each of the two exchanges is one all-to-all,
in the iteration's dtype. Tall matrices are multiplied from the right, so that none is transposed.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from megakernels import decayed_add_, nesterov_, newton_schulz_
from megaplan.inventory.tensors import MatrixRound, matrix_round
from megarun.optim.numbers import number
from megarun.parallel.groups.local import gradient_of, local
from megarun.parallel.groups.tensor import ALONE, TensorParallel

MOMENTUM = 0.95
ADAMW_RMS = 0.2


def orthogonalise(matrices: Tensor, num_steps: int) -> Tensor:
    """`newton_schulz_` of a copy of matrices [n, rows, cols], which runs in their dtype."""
    return newton_schulz_(matrices.clone(memory_format=torch.contiguous_format), num_steps)


class RoundKey(NamedTuple):
    """Facts that the tensors of a round share.

    Attributes:
        round: Rounds of these tensors.
        part: Shape of a rank's part of a matrix in the iteration, with the sharded dim first.
        share_elements: Elements of a full shard of a tensor.
        rows: Rows of dim 0 if the ranks' shares differ, else 0.
        cut: True if TP or ETP shards the matrices.
        is_bank: True for expert banks.
        group: The ranks that share them; None if every rank has full matrices.
        place: This rank's place among them.
    """

    round: MatrixRound
    part: tuple[int, int]
    share_elements: int
    rows: int
    cut: bool
    is_bank: bool
    group: dist.ProcessGroup | None
    place: int


class Member(NamedTuple):
    """A parameter of a kind.

    Attributes:
        parameter: The parameter.
        rows: Rows of one of its matrices, before TP gathers it.
        share_rows: Rows of a full shard, with all dims except the last as rows.
        transposed: True if the iteration has a matrix transposed: TP or ETP shards its columns.
        scale: Factor of its update.
    """

    parameter: Tensor
    rows: int
    share_rows: int
    transposed: bool
    scale: float


class Piece(NamedTuple):
    """Rows of one matrix on one rank.

    Attributes:
        owner: The rank that orthogonalises it.
        slot: Index of the matrix among the owner's matrices.
        tensor: The tensor that it belongs to.
        start: First row in this rank's share of the tensor.
        num_rows: Number of rows.
        offset: First row in the matrix.
    """

    owner: int
    slot: int
    tensor: int
    start: int
    num_rows: int
    offset: int


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised per matrix, with decoupled weight decay.

    The update of a matrix [rows, cols] is scaled by 0.2 · sqrt(max(rows, cols)), which gives it the RMS of an AdamW update, so that both
    groups share one learning rate and decay (arXiv:2502.16982, equation 4). The momentum of a sharded parameter is sharded. A matrix that
    TP or ETP shards is gathered over that group.

    Args:
        params: (parameter, num_matrices) pairs; dims before the last, read as rows, are split into num_matrices equal matrices.
        lr: Learning rate.
        weight_decay: Decoupled decay, multiplied by the learning rate.
        moments_dtype: Dtype of the momentum.
        iteration_dtype: Dtype of Newton-Schulz and of exchanged updates.
        num_steps: Newton-Schulz steps.
        cut: Dim along which TP, or ETP in a bank, shards a parameter's matrix, for the parameters that it shards.
        tp: The TP group.
        slices: The ETP group.
        banks: Parameters of expert banks.
    """

    def __init__(
        self,
        params: Iterable[tuple[Tensor, int]],
        *,
        lr: float,
        weight_decay: float,
        moments_dtype: torch.dtype,
        iteration_dtype: torch.dtype,
        num_steps: int,
        cut: Mapping[Tensor, int] | None = None,
        tp: TensorParallel = ALONE,
        slices: TensorParallel = ALONE,
        banks: Container[Tensor] = (),
    ) -> None:
        self._cut, self._parts, self._counts, self._banks = dict(cut or {}), (tp, slices), dict(params), banks
        self.moments_dtype, self.iteration_dtype, self.num_steps = moments_dtype, iteration_dtype, num_steps
        self._deals: dict[tuple[RoundKey, int], Deal] = {}
        super().__init__(list(self._counts), {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], float] | None = None,
        *,
        rate: Tensor | None = None,
        scale: Tensor | None = None,
        lent: Callable[[Sequence[Tensor]], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Update every parameter with its gradient, multiplied by `scale`; all ranks of a shard group must call it together.

        Numbers are on the device; `rate` defaults to the group's. A round runs in the context `lent` of its parameters, in which their
        state is on the device.
        """
        device = next(iter(self._counts)).device
        rate = number(self.param_groups[0]["lr"], device) if rate is None else rate
        scale = number(1.0, device) if scale is None else scale
        if closure is not None:
            raise ValueError("Muon does not support a closure")
        for parameter in self._counts:
            gradient_of(parameter, "a matrix")
            if not self.state[parameter]:
                self.state[parameter] |= self.first_state(parameter)
        first_owner = 0
        for kind, start, together in self._rounds():
            with lent([member.parameter for member in together]):
                if kind.group is None:
                    self._update_whole(kind, together, rate, scale)
                    continue
                deal = self._deals.get((kind, start)) or self._deals.setdefault((kind, start), Deal(kind, together, first_owner))
                self._update_dealt(kind, deal, rate, scale)
                first_owner += deal.num_owners

    def _rounds(self) -> Iterator[tuple[RoundKey, int, list[Member]]]:
        """The rounds of an update, in order: facts of the tensors, place of the first in their kind, and the tensors."""
        for kind, members in self._kinds.items():
            most = kind.round.num_tensors
            for start in range(0, len(members), most):
                yield kind, start, members[start : start + most]

    def rounds(self) -> Iterator[list[Tensor]]:
        """The parameters of each round of an update, in order."""
        return ([member.parameter for member in members] for _, _, members in self._rounds())

    def averages(self, _parameter: Tensor) -> dict[str, torch.dtype]:
        """Name of the momentum of a parameter, with its dtype."""
        return {"momentum": self.moments_dtype}

    def first_state(self, parameter: Tensor, held: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """State of a parameter before its first update: the one `held` in host memory, if any, else new."""
        return dict(held or {}) or {"momentum": torch.zeros_like(parameter, dtype=self.moments_dtype)}

    @cached_property
    def _kinds(self) -> dict[RoundKey, list[Member]]:
        found: dict[RoundKey, list[Member]] = {}
        for parameter, count in self._counts.items():
            kind, member = self._kind_of(parameter, count)
            found.setdefault(kind, []).append(member)
        return found

    def _kind_of(self, parameter: Tensor, count: int) -> tuple[RoundKey, Member]:
        columns, degree, index, group = parameter.shape[-1], 1, 0, None
        if isinstance(parameter, DTensor):
            axis = parameter.device_mesh.ndim - 1  # the sharding dim; the dim before it replicates
            degree, index = parameter.device_mesh.size(axis), parameter.device_mesh.get_local_rank(axis)
            group = parameter.device_mesh.get_group(axis)
        rows, of_dim = parameter.numel() // columns, parameter.numel() // columns // parameter.shape[0]
        chunk, of_matrix = -(-parameter.shape[0] // degree) * of_dim, rows // count
        cut = self._cut.get(parameter)
        lengths = [of_matrix, columns]
        transposed = cut == 1
        if cut is not None:
            lengths[cut] *= self._parts[parameter in self._banks].degree
        dealt = matrix_round(count, lengths[0] * lengths[1], degree)
        if dealt.degree == 1:
            index, group = 0, None
        part = (columns, of_matrix) if transposed else (of_matrix, columns)
        uneven = parameter.shape[0] if parameter.shape[0] % degree else 0
        kind = RoundKey(dealt, part, chunk * columns, uneven, cut is not None, parameter in self._banks, group, index)
        return kind, Member(parameter, of_matrix, chunk, transposed, ADAMW_RMS * max(lengths) ** 0.5)

    def _update_whole(self, kind: RoundKey, members: Sequence[Member], rate: Tensor, scale: Tensor) -> None:
        """A round of matrices that this rank has unsharded, or of which TP ranks have parts."""
        gradients = self._gradients(members)
        count = kind.round.num_matrices
        parts = gradients[0].new_empty((len(members) * count, *kind.part), dtype=self.iteration_dtype)
        nesterov_(self._momenta(members), gradients, _as_stored(parts, members, count), MOMENTUM, scale)
        x = self._gathered(kind, parts)
        del parts
        newton_schulz_(x, self.num_steps)
        self._apply(members, [local(each.parameter) for each in members], _as_stored(self._own_part(kind, x), members, count), rate)

    def _update_dealt(self, kind: RoundKey, deal: "Deal", rate: Tensor, scale: Tensor) -> None:
        """Update a round of matrices of which each rank has some rows."""
        gradients = self._gradients(deal.members)
        sent = deal.outgoing(gradients[0], self.iteration_dtype)
        nesterov_(deal.rows(self._momenta(deal.members)), deal.rows(gradients), deal.views(sent), MOMENTUM, scale)
        arrived = deal.exchanged(sent)
        del sent  # memory before the rows are reordered: the iteration needs most then
        parts = deal.ordered(arrived)
        del arrived
        x = self._gathered(kind, parts)
        del parts
        newton_schulz_(x, self.num_steps)
        back = deal.packed(self._own_part(kind, x))
        del x
        returned = deal.handed_out(back)
        del back
        weights = deal.rows([local(each.parameter) for each in deal.members])
        self._apply([deal.members[piece.tensor] for piece in deal.sent], weights, returned, rate)

    def _apply(self, members: Sequence[Member], weights: list[Tensor], updates: list[Tensor], rate: Tensor) -> None:
        """Weight decay, and the update of each weight by its member's update."""
        decayed_add_(weights, updates, rate, self.param_groups[0]["weight_decay"], [member.scale for member in members])

    def _momenta(self, members: Sequence[Member]) -> list[Tensor]:
        return [local(self.state[member.parameter]["momentum"]) for member in members]

    @staticmethod
    def _gradients(members: Sequence[Member]) -> list[Tensor]:
        return [local(gradient_of(member.parameter, "a matrix")).contiguous() for member in members]

    def _gathered(self, kind: RoundKey, parts: Tensor) -> Tensor:
        """Whole matrices."""
        return self._parts[kind.is_bank].start_gather(parts).wait() if kind.cut else parts

    def _own_part(self, kind: RoundKey, x: Tensor) -> Tensor:
        """This rank's parts of orthogonalised matrices."""
        return x.narrow(1, self._parts[kind.is_bank].index * kind.part[0], kind.part[0]) if kind.cut else x


class Deal:
    """The exchange of a round: which rank has which rows, and which one orthogonalises which matrix.

    Attributes:
        members: The tensors.
        num_owners: Ranks that have matrices; the others compute with zeros.
        sent: This rank's pieces, by owner and matrix.
        received: The pieces of the matrices that this rank owns, by the rank that has them.
    """

    def __init__(self, kind: RoundKey, members: Sequence[Member], first_owner: int) -> None:
        """Distribute the matrices evenly over the ranks, beginning with `first_owner`."""
        self._kind, self.members, self._first = kind, members, first_owner
        self._own = kind.round.matrices(len(members))
        self.num_owners = -(-len(members) * kind.round.num_matrices // self._own)
        ranks = range(kind.round.degree)
        self.sent = sorted(self._pieces(kind.place))
        self.received = [[piece for piece in sorted(self._pieces(rank)) if piece.owner == kind.place] for rank in ranks]
        self._widths = [kind.part[0] if member.transposed else kind.part[1] for member in members]
        self._to = [sum(self._elements(piece) for piece in self.sent if piece.owner == rank) for rank in ranks]
        self._from = [sum(map(self._elements, pieces)) for pieces in self.received]

    def _pieces(self, rank: int) -> Iterator[Piece]:
        for tensor, member in enumerate(self.members):
            first, last = rank * member.share_rows, min((rank + 1) * member.share_rows, member.rows * self._kind.round.num_matrices)
            for matrix in range(self._kind.round.num_matrices):
                start, stop = max(first, matrix * member.rows), min(last, (matrix + 1) * member.rows)
                if start < stop:
                    place, slot = divmod(tensor * self._kind.round.num_matrices + matrix, self._own)
                    owner = (place + self._first) % self._kind.round.degree
                    yield Piece(owner, slot, tensor, start - first, stop - start, start - matrix * member.rows)

    def _elements(self, piece: Piece) -> int:
        return piece.num_rows * self._widths[piece.tensor]

    def rows(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """This rank's pieces of all matrices in its shards."""
        return [shards[each.tensor].view(-1, self._widths[each.tensor])[each.start :][: each.num_rows] for each in self.sent]

    def outgoing(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """A buffer for all pieces that this rank sends."""
        return like.new_empty(sum(self._to), dtype=dtype)

    def views(self, sent: Tensor) -> list[Tensor]:
        """The pieces in a buffer of `outgoing`."""
        return self._views(sent, self.sent)

    def exchanged(self, sent: Tensor) -> Tensor:
        """The pieces of this rank's matrices as the ranks send them, one after another, in a buffer [n, rows, cols]."""
        buffer = sent.new_empty((self._own, *self._kind.part))
        dist.all_to_all_single(buffer.view(-1)[: sum(self._from)], sent, self._from, self._to, group=self._kind.group)
        return buffer

    def ordered(self, buffer: Tensor) -> Tensor:
        """This rank's matrices, or their TP parts [n, rows, cols], assembled from received rows."""
        pieces = [piece for from_rank in self.received for piece in from_rank]
        if pieces and self._own == 1 and not self.members[pieces[0].tensor].transposed:
            return buffer  # the rows of one matrix arrive in order
        parts = torch.zeros_like(buffer)
        self._copy(self._places(parts, pieces), self._views(buffer.view(-1)[: sum(self._from)], pieces))
        return parts

    def packed(self, parts: Tensor) -> Tensor:
        """The pieces of this rank's matrices, by the rank that has them in its shards."""
        pieces = [piece for from_rank in self.received for piece in from_rank]
        back = parts.new_empty(sum(self._from))
        self._copy(self._views(back, pieces), self._places(parts, pieces))
        return back

    def handed_out(self, back: Tensor) -> list[Tensor]:
        """This rank's rows of all matrices, one tensor for each of `sent`."""
        found = back.new_empty(sum(self._to))
        dist.all_to_all_single(found, back, self._to, self._from, group=self._kind.group)
        return self._views(found, self.sent)

    def _views(self, flat: Tensor, pieces: Sequence[Piece]) -> list[Tensor]:
        """The pieces in a buffer in which they follow each other."""
        parts = _split(flat, [self._elements(piece) for piece in pieces])
        return [part.view(piece.num_rows, -1) for part, piece in zip(parts, pieces, strict=True)]

    def _places(self, parts: Tensor, pieces: Sequence[Piece]) -> list[Tensor]:
        """Places of pieces in this rank's matrices."""
        matrices = [parts[piece.slot].mT if self.members[piece.tensor].transposed else parts[piece.slot] for piece in pieces]
        return [matrix[piece.offset :][: piece.num_rows] for matrix, piece in zip(matrices, pieces, strict=True)]

    @staticmethod
    def _copy(places: list[Tensor], values: list[Tensor]) -> None:
        if places:
            torch._foreach_copy_(places, values)


def _as_stored(parts: Tensor, members: Sequence[Member], num_matrices: int) -> list[Tensor]:
    """The matrices of each member in `parts` [n, rows, cols], as its parameter has them."""
    found = _split(parts, num_matrices)
    return [each.mT if member.transposed else each for each, member in zip(found, members, strict=True)]


def _split(tensor: Tensor, sizes: int | list[int]) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = torch.split(tensor, sizes)
    return found
