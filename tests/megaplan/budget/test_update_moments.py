"""The reported place of a rank at the peak of each phase agrees with the job, and is the largest of all candidates."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megaplan.budget.init import InitPeak
from megaplan.budget.rank import Persistent, rank_cells
from megaplan.budget.step import StepPeak
from megaplan.budget.stored import RankStorage, Updates
from megaplan.budget.values import NO_BYTES, Budget
from megaplan.columns import Column, Phase
from megaplan.hosts.megarun.sizes import LastPeak
from megaplan.hosts.megarun.streams import Reserving
from megaplan.spec.models import Spec


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("overrides", [{}, {"mesh.dp_shard": 3}, {"precision.grads": "bf16"}, {"precision.params": "fp32"}], ids=str)
def test_newton_schulz_is_named_where_muon_runs_alone(
    optimizer: str, overrides: dict[str, Any], hybrid: Callable[..., Spec], budget_of: Callable[..., Budget]
) -> None:
    for rank in budget_of(hybrid({"optimizer": {"matrix": optimizer}, **overrides})).ranks:
        named = [phase for phase, text in rank.peak_places.items() if "Newton-Schulz" in text]
        assert set(named) <= ({Phase.FIRST_OPTIMIZER, Phase.OPTIMIZER} if optimizer == "muon" else set())
        columns = [rank.cells[phase][Column.MATRIX_OPTIMIZER] for phase in (Phase.INIT, Phase.FIRST_FORWARD_BACKWARD)]
        assert columns == [0, 0]


@pytest.mark.parametrize("pattern", ["D", "M"])
def test_nothing_is_padded_where_shards_are_even(pattern: str, hybrid: Callable[..., Spec], budget_of: Callable[..., Budget]) -> None:
    """Nothing is padded in specs without rotary tables either, where only parameters exist."""
    sections = {"D": "mlp", "M": "mamba"}
    gone = {
        f"model.{name}": None
        for letter, name in (*sections.items(), ("A", "attention"), ("E", "moe"), ("R", "recurrent"))
        if letter != pattern
    }
    spec = hybrid({"model.pattern": pattern, "model.features": {}, **gone, "mesh": {"dp_shard": 2}})
    for rank in budget_of(spec).ranks:
        assert rank.peak_places[Phase.INIT] == "parameters in place"
        assert rank.cells[Phase.INIT][Column.WORKSPACE] == 0


@dataclass(frozen=True)
class Sizes:
    """A made-up rank: what its optimizers hold and need for a moment, in bytes that tell them apart."""

    shards: int
    dropped: int
    matrix: int
    other: int
    scratch: int
    momenta: int
    cast: int
    made_matrix: int
    made_other: int
    made_scratch: int
    padding: int
    buffers: int
    moved: int


def made_up(random: Random) -> Sizes:
    """Small numbers, so that ties and every order come up; the parts of a whole are not larger than it."""
    few = [0, 1, 2, 3, 5, 8]
    shards, matrix, other = (random.choice(few) for _ in range(3))
    momenta = random.randint(0, matrix)
    made_matrix, made_other = random.randint(0, matrix - momenta), random.randint(0, other)
    rest = [random.choice(few) for _ in range(6)]
    return Sizes(shards, random.randint(0, shards), matrix, other, rest[0], momenta, rest[1], made_matrix, made_other, *rest[2:])


def test_a_phase_is_as_large_as_the_largest_of_its_moments() -> None:
    """Every moment that an update has, with what is alive then: gradients, moments made, scratch."""
    random = Random(8)
    for offload in [0.0] * 500 + [0.5] * 100:
        sizes = made_up(random)
        empty = (0, 0, 0)
        stored = cast("RankStorage", SimpleNamespace(resident_bytes=empty, shard_bytes=sizes.shards, offload=offload))
        persistent = Persistent(stored, sizes.dropped, (), sizes.buffers, 0, 0, 0, 0, Reserving(0, 0, 0, 0, (), 0, False))
        adamw = LastPeak(sizes.made_matrix, sizes.made_other, sizes.made_scratch, sizes.cast)
        init = InitPeak(empty, sizes.buffers, sizes.padding, "a short shard")
        buffer = sizes.moved if offload else 0
        updates = Updates(sizes.matrix, sizes.other, adamw, sizes.momenta, sizes.scratch, 0, 0, buffer)
        cells, where = rank_cells(persistent, StepPeak(0, "step", NO_BYTES.copy(), 0), init, updates)
        found = {phase: sum(columns.values()) - columns[Column.OVERHEAD] for phase, columns in cells.items()}
        moments = sizes.matrix + sizes.other
        assert (found[Phase.INIT], where[Phase.INIT]) == (sizes.buffers + sizes.padding, "a short shard")
        updating = sizes.buffers + moments + sizes.shards + buffer + max(sizes.cast, sizes.scratch - sizes.dropped)
        assert found[Phase.OPTIMIZER] == updating
        by_adamw = moments - sizes.momenta - sizes.made_matrix - sizes.made_other + sizes.made_scratch
        by_muon = moments - sizes.dropped + sizes.scratch
        first = sizes.buffers + sizes.shards + max(by_adamw, by_muon)
        assert found[Phase.FIRST_OPTIMIZER] == (updating if offload else first)  # all state is made before an update with its buffer
        assert found[Phase.FORWARD_BACKWARD] - found[Phase.FIRST_FORWARD_BACKWARD] == moments
        if by_adamw == by_muon:
            assert "Newton-Schulz" not in where[Phase.FIRST_OPTIMIZER]  # the earlier of two equal moments
        assert min(min(columns.values()) for columns in cells.values()) >= 0
