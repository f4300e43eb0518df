"""Action orders against the installed torch's own schedule objects."""

from types import SimpleNamespace
from typing import Any

import pytest

from megaplan.schedules import KINDS, actions, placement, slots_of_rank

pytestmark = pytest.mark.runtime

CONFIGS = [
    *[("gpipe", pp, 1, m) for pp, m in ((1, 4), (2, 1), (4, 7))],
    *[("1f1b", pp, 1, m) for pp, m in ((1, 4), (2, 2), (2, 5), (4, 4), (4, 7), (8, 16))],
    *[
        (kind, pp, vpp, m)
        for kind in ("interleaved_1f1b", "interleaved_zero_bubble", "looped_bfs")
        for pp in (2, 3, 4, 8)
        for vpp in (2, 3, 4)
        for m in (pp // 2, pp, pp + 1, 2 * pp, 2 * pp + 2, 5 * pp)
    ],
    *[("interleaved_zero_bubble", pp, 1, m) for pp in (2, 4, 8) for m in (pp // 2, pp, 3 * pp)],
    *[("zbv", pp, 2, m) for pp in (2, 3, 4, 8) for m in (1, pp, 2 * pp - 1, 2 * pp, 5 * pp)],
    *[("dualpipev", pp, 2, m) for pp in (2, 3, 4, 8) for m in (2 * pp, 2 * pp + 1, 5 * pp)],
]
CLASSES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "looped_bfs": "ScheduleLoopedBFS",
    "interleaved_zero_bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}


def torch_order(kind: str, pp: int, vpp: int, num_microbatches: int) -> list[list[str]]:
    """Computations of each rank as torch orders them, waits and communication left out."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")

    def stage(rank: int, chunk: int) -> Any:
        index, last = slots_of_rank(placement(kind), rank, pp, vpp)[chunk], pp * vpp - 1
        return SimpleNamespace(
            stage_index=index,
            num_stages=pp * vpp,
            group_size=pp,
            group_rank=rank,
            submod=None,
            is_first=index == 0,
            is_last=index == last,
            has_backward=False,
            group=None,
        )

    build = getattr(schedules, CLASSES[kind])
    if placement(kind) == "single":
        order = build(stage(0, 0), num_microbatches)._get_pipeline_order()
    else:
        order = build([stage(0, chunk) for chunk in range(vpp)], num_microbatches).pipeline_order
    computed = [[str(action) for action in order[rank] if action is not None] for rank in range(pp)]
    return [[text for text in rank if "REDUCE_GRAD" not in text] for rank in computed]


@pytest.mark.requirement("R-26")
@pytest.mark.parametrize(("kind", "pp", "vpp", "num_microbatches"), CONFIGS)
def test_order_is_torchs(kind: str, pp: int, vpp: int, num_microbatches: int) -> None:
    rounds = max(1, num_microbatches // pp)
    if kind in ("interleaved_1f1b", "interleaved_zero_bubble") and num_microbatches % rounds:
        with pytest.raises(ValueError, match="multiple of the number of rounds"):
            torch_order(kind, pp, vpp, num_microbatches)
        return
    expected = torch_order(kind, pp, vpp, num_microbatches)
    if kind == "1f1b" and f"{pp - 1}F{num_microbatches}" in expected[-1]:
        # torch numbers the last rank's forwards from 1 in its exported order, and runs them from 0.
        expected[-1] = [f"{pp - 1}F{int(text.split('F')[1]) - 1}" if "F" in text else text for text in expected[-1]]
    assert [[str(action) for action in rank] for rank in actions(kind, pp, vpp, num_microbatches)] == expected


def test_torch_refuses_fewer_microbatches_than_stages() -> None:
    with pytest.raises(ValueError, match="greater than"):
        torch_order("1f1b", 4, 1, 3)


def test_all_schedules_are_compared() -> None:
    assert {kind for kind, *_ in CONFIGS} == set(KINDS) - {"dualpipe", "paired_1f1b"} == set(CLASSES)  # tests/megaplan/schedules
