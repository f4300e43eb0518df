"""Muon deals matrices out: every one is orthogonalised once, a rank's products fall with the ranks, nothing is lost on the way."""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megaplan.inventory.tensors import ROUND_ELEMENTS, matrix_round
from megarun.optim import muon
from megarun.optim.muon import Deal, Member, Muon, RoundKey, orthogonalise

pytestmark = pytest.mark.runtime


def dealt(shape: tuple[int, int], count: int, degree: int, num_tensors: int, first: int = 0) -> list[Deal]:
    """A round of equal tensors [count · rows, columns] as each of the ranks sees it."""
    rows, columns = shape
    share = -(-count * rows // degree)
    found = []
    for rank in range(degree):
        kind = RoundKey(matrix_round(count, rows * columns, degree), shape, share * columns, 0, False, False, None, rank)
        member = Member(torch.empty(0), rows, share, False, 1.0)
        found.append(Deal(kind, [member] * num_tensors, first))
    return found


def exchanged(deals: list[Deal], give: Callable[[Deal], list[Tensor]], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls a method of every rank whose one collective is an all-to-all: first for what it sends, then with what it receives."""
    sent: list[tuple[Tensor, list[int]]] = []

    class SentError(Exception):
        pass

    def note(_: Tensor, value: Tensor, __: list[int], splits: list[int], **___: Any) -> None:
        sent.append((value.clone(), splits))
        raise SentError

    monkeypatch.setattr(muon.dist, "all_to_all_single", note)
    for deal in deals:
        with pytest.raises(SentError):
            give(deal)
    results = []
    for rank, deal in enumerate(deals):

        def receive(out: Tensor, _: Tensor, splits: list[int], __: list[int], rank: int = rank, **___: Any) -> None:
            parts = [value.split(to)[rank] for value, to in sent]
            assert [len(part) for part in parts] == splits
            out.copy_(torch.cat(parts))

        monkeypatch.setattr(muon.dist, "all_to_all_single", receive)
        results.append(give(deal))
    return results


@pytest.mark.parametrize("seed", range(12))
def test_every_matrix_goes_to_one_rank_and_comes_back(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random shapes, uneven shares and shares that end inside a matrix; a wrong place or order changes a value."""
    draw = random.Random(seed)
    rows, columns, degree, num = draw.randint(1, 7), draw.randint(1, 5), draw.randint(2, 5), draw.randint(1, 4)
    count = draw.choice([n for n in range(1, 7) if n % degree])
    deals = dealt((rows, columns), count, degree, num, first=draw.randint(0, 9))
    whole = torch.arange(num * count * rows * columns, dtype=torch.float32).view(num, count * rows, columns)
    shares = [
        [each[rank * deal.members[0].share_rows :][: deal.members[0].share_rows] for each in whole] for rank, deal in enumerate(deals)
    ]

    def collected(deal: Deal) -> Tensor:
        shards = list(shares[deals.index(deal)])
        sent = deal.outgoing(shards[0], torch.float32)
        for place, rows_of in zip(deal.views(sent), deal.rows(shards), strict=True):
            place.copy_(rows_of)
        return deal.ordered(deal.exchanged(sent))

    gathered = exchanged(deals, collected, monkeypatch)
    owned = [matrix for parts in gathered for matrix in parts if matrix.any()]
    expected = [matrix for matrix in whole.view(-1, rows, columns) if matrix.any()]
    assert sorted(map(torch.Tensor.tolist, owned)) == sorted(map(torch.Tensor.tolist, expected))
    assert len({len(parts) for parts in gathered}) == 1
    back = [deal.packed(-parts) for deal, parts in zip(deals, gathered, strict=True)]
    returned = exchanged(deals, lambda deal: deal.handed_out(back[deals.index(deal)]), monkeypatch)
    for rank, (deal, pieces) in enumerate(zip(deals, returned, strict=True)):
        for piece, found in zip(deal.sent, pieces, strict=True):
            assert torch.equal(found, -shares[rank][piece.tensor][piece.start :][: piece.num_rows])


@pytest.mark.parametrize("shape", [(1024, 1024), (4096, 1024), (64, 8192)])
def test_products_of_a_rank_fall_with_the_ranks(shape: tuple[int, int]) -> None:
    """96 matrices: a rank's rounds contain its share in total, plus at most one matrix per round."""
    elements = shape[0] * shape[1]
    for degree in (1, 2, 4, 8, 16, 32, 96):
        rounds = matrix_round(1, elements, degree)
        matrices, left = 0, 96
        while left:
            together = min(left, rounds.num_tensors)
            matrices, left = matrices + rounds.matrices(together), left - together
        assert matrices == 96 // degree
        assert rounds.matrices(min(96, rounds.num_tensors)) * elements <= ROUND_ELEMENTS


def test_remainders_are_dealt_to_other_ranks_in_turn() -> None:
    """Single matrices of several kinds are not all on the first rank: the next round begins behind the last owner."""
    owners, first = Counter[int](), 0
    for _ in range(8):
        deal = dealt((3, 5), 1, 4, 1, first)[0]
        owners.update(piece.owner for piece in deal.sent)
        first += deal.num_owners
    assert owners == dict.fromkeys(range(4), 2)


def test_a_bank_of_whole_experts_is_not_sent() -> None:
    """Shares are whole matrices: each rank has its own."""
    assert matrix_round(16, 64, 4) == matrix_round(4, 64, 1)
    assert matrix_round(6, 64, 4).degree == 4


def test_one_round_launches_a_few_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty equal tensors: momenta, updates and casts in one operation, the steps in one, and decays and additions in one."""
    parameters = [nn.Parameter(torch.randn(8, 6)) for _ in range(20)]
    for parameter in parameters:
        parameter.grad = torch.randn(8, 6)
    seen = Counter[str]()

    class Counting(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[name-defined,misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen[str(func).removesuffix(".default")] += 1
            return func(*args, **(kwargs or {}))

    options = {"lr": 0.02, "weight_decay": 0.1, "moments_dtype": torch.float32, "iteration_dtype": torch.bfloat16, "num_steps": 5}
    optimizer = Muon([(parameter, 1) for parameter in parameters], **options)
    optimizer.step()
    with Counting():
        optimizer.step()
    own = {name: number for name, number in seen.items() if name.startswith("megakernels.")}
    assert own == {"megakernels.nesterov_": 1, "megakernels.newton_schulz_": 1, "megakernels.decayed_add_": 1}
    assert not [name for name in seen if "_foreach" in name]


def test_the_spectrum_of_a_decaying_gradient_is_flattened_in_bf16() -> None:
    """Singular values that fall as 1 / i, as gradients' do: all end between 0.6 and 1.3 after five steps, as in fp32."""
    torch.manual_seed(0)
    for shape in ((48, 96), (96, 48)):
        u, _, v = torch.linalg.svd(torch.randn(shape), full_matrices=False)
        gradient = (u * (1 / torch.arange(1, 49))) @ v
        for dtype in (torch.float32, torch.bfloat16):
            found = orthogonalise(gradient[None].to(dtype), 5)[0].float()
            along = torch.linalg.diagonal((u.mT @ found @ v.mT)[None])[0]  # the part along each singular direction
            assert float(along.min()) > 0.6
            assert float(along.max()) < 1.3
            off = u.mT @ found @ v.mT - along.diag()
            assert float(off.abs().max()) < (1e-4 if dtype is torch.float32 else 0.05)
