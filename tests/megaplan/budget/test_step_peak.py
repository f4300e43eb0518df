"""The peak of a step is the largest of all its moments: what is passed over could not be it, and cells are the whole."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from megaplan.budget import step
from megaplan.budget.chunk import Chunk
from megaplan.budget.occupancy import FORWARD, FORWARDED, REDUCE, Occupancy
from megaplan.budget.values import Budget
from megaplan.spec.models import Spec

SCHEDULES = [("1f1b", 4, 1, 4), ("1f1b", 4, 1, 9), ("gpipe", 4, 1, 6), ("interleaved_1f1b", 2, 2, 4), ("looped_bfs", 2, 2, 4)]
VARIANTS = [
    {},
    {"sharding.reshard_after_forward": True},
    {"precision.grads": "bf16"},
    {"precision.grads": "bf16", "batch.micro_batch_size": 1, "batch.seq_length": 16, "model.mlp.ffn_hidden_size": 8192},
    {"mesh.ep": 2},
    {"model.vocab_size": 65536},
]


@pytest.mark.parametrize(("kind", "pp", "vpp", "m"), SCHEDULES)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_nothing_larger_is_passed_over(
    kind: str,
    pp: int,
    vpp: int,
    m: int,
    variant: dict[str, Any],
    hybrid: Callable[..., Spec],
    budget_of: Callable[..., Budget],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of every rank, where a reduction is the largest (a wide MLP, one short row) too; no forward or reduction is above its bound."""
    found, checked = step.step_peak, []

    def checking(chunks: Sequence[Chunk], moments: Sequence[Occupancy], lingering: step.Lingering) -> step.StepPeak:
        peak, largest = found(chunks, moments, lingering), 0
        for moment in moments:
            chunk, state = chunks[moment.chunk], moment.states[moment.chunk]
            running = step._peak(chunk, moment.step, state).total
            aside = step._beside(chunks, moment) + lingering.at(moment.step, state)
            largest = max(largest, running + aside)
            if moment.step is FORWARD:
                assert running <= chunk.forward_bound + (chunk.unsharded_bytes if state > FORWARDED else 0), moment
            elif moment.step is REDUCE:
                assert running <= chunk.reduce_bound, moment
            if len(chunks) == 1 and moment.step in (FORWARD, REDUCE):
                assert running + aside <= step._ceiling(chunk, max(each.counts[0] for each in moments), lingering), moment
            checked.append(moment)
        assert peak.total == largest == sum(peak.cells.values())
        return peak

    monkeypatch.setattr("megaplan.budget.megarun.step_peak", checking)
    mesh, schedule = {"pp": pp, "vpp": vpp, "dp_shard": 2}, {"kind": kind, "num_microbatches": m}
    budget_of(hybrid({"mesh": mesh, "schedule": schedule, **variant}))
    assert len(checked) > pp * vpp
