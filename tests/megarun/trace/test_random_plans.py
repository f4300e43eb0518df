"""Random plans of fixed seeds: every distinct rank is traced and compared with its estimate.

`make accuracy-random` takes any seed and larger plans.
"""

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))  # random_plans

from random_plans.alone import Bench
from random_plans.choices import SMALL, Scope
from random_plans.draw import draw
from random_plans.examine import NOTED, OK, Verdict, negative_cells, past_tolerance, prepare
from random_plans.shrink import shrink

from megaplan.columns import Column, Phase
from megarun.trace.compare import RankComparison
from megarun.trace.values import RankTrace

pytestmark = pytest.mark.runtime
SEEDS, IN_LANE = range(30), 14
"""Seeds, and those of them that the lane of random seeds takes; the others are slow."""
SECONDS = 240


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(SECONDS)


@pytest.mark.random_seeds
@pytest.mark.parametrize("seed", [pytest.param(seed, marks=pytest.mark.slow if seed >= IN_LANE else ()) for seed in SEEDS])
def test_estimate_is_what_the_runtime_allocates(seed: int, bench: Bench) -> None:
    """Peak, phases and columns within today's tolerances; what megarun does not build is noted; nothing crashes."""
    verdict = bench.examine(draw(seed, Scope.RUNTIME, SMALL))
    assert verdict.outcome in (OK, NOTED), "\n".join(
        line for failure in verdict.failures for line in (failure.key, f"rank {failure.rank}", *failure.said)
    )


def test_most_of_the_seeds_are_traced() -> None:
    """No test traces a refused spec."""
    refused = [found for seed in SEEDS if isinstance(found := prepare(draw(seed, Scope.RUNTIME, SMALL)), Verdict)]
    assert len(refused) <= len(SEEDS) // 10


def test_a_cell_that_is_off_is_found() -> None:
    """Cells by column and sign, in a phase that is itself within tolerance; and a phase without such a column, and a negative cell."""
    prepared = prepare(draw(0, Scope.RUNTIME, SMALL))
    assert isinstance(prepared, tuple)
    rank = prepared[1].ranks[0]
    exact = {phase: {**cells, Column.OVERHEAD: 0} for phase, cells in rank.cells.items()}

    def compared(column: Column, less: int) -> list[str]:
        cells = {phase: dict(own) for phase, own in exact.items()}
        cells[Phase.OPTIMIZER][column] -= less
        trace = RankTrace(rank.ranks[0], cells, rows={}, kept=(), differences=(), num_events=0)
        return [failure.key for failure, _, _ in past_tolerance(RankComparison(rank, trace))]

    assert compared(Column.WORKSPACE, 0) == []
    assert compared(Column.WORKSPACE, 2**22) == ["column optimizer workspace over"]
    assert compared(Column.WORKSPACE, -(2**22)) == ["column optimizer workspace under"]
    exact[Phase.INIT][Column.ROUTING] = -8
    (failure,) = negative_cells(prepared[1]._replace(ranks=(rank._replace(cells=exact),)))
    assert failure.key == "negative init routing"


def test_a_spec_shrinks_to_what_makes_it_fail() -> None:
    """Everything that the failure does not need goes."""

    def fails(spec: dict[str, Any]) -> bool:
        return spec.get("mesh", {}).get("dp_shard", 1) > 1 and "D" in spec["model"]["pattern"]

    document = next(spec for seed in range(1000) if fails(spec := draw(seed, Scope.RUNTIME)) and spec["mesh"].get("pp", 1) > 2)
    small = shrink(document, fails, seconds=60)
    assert small["mesh"] == {"dp_shard": 2}
    assert small["model"]["pattern"] == "D"
    assert small["model"]["num_layers"] == 1
    assert set(small) == {"format", "name", "model", "mesh", "batch", "schedule"}
