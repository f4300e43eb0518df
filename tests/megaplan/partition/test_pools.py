"""Mixed pools: stages on several types of devices, each with its own rates and its own memory."""

import json
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any

import pytest

import megaplan
from megaplan.cost.values import LayerTime, ModelTimes
from megaplan.layout.build import spans_of
from megaplan.partition.bounds import StepBound
from megaplan.partition.constraints import Constraints
from megaplan.partition.paths import paths_of
from megaplan.partition.step import Pipeline, StepTimes
from megaplan.partition.values import equal_cuts
from megaplan.plan.make import plan_text
from megaplan.schedules import KINDS, SPLIT_BACKWARD, actions, link, num_copies, placement

SPEC = Path(__file__).parents[3] / "plans" / "tiny-hybrid-pp2.yaml"
SINGLE = ("1f1b", "gpipe")
RATES = ("memory_bytes_per_second", "node_bytes_per_second", "network_bytes_per_second")


def pools(*devices: dict[str, Any], count: int = 1) -> str:
    return f"pools={json.dumps([{'count': count, 'device': device} for device in devices])}"


def sized(spec: Path = SPEC, *, pp: int = 2, kind: str = "1f1b", device: str = "h100-sxm", dp: int = 1) -> list[str]:
    vpp = 1 if kind in SINGLE else 2
    mesh = {"pp": pp, "vpp": vpp, "dp_shard": dp}
    return [f"mesh={json.dumps(mesh)}", f"schedule={{kind: {kind}, num_microbatches: {2 * pp}}}", f"device={{name: {device}}}"]


@pytest.mark.parametrize("device", ["h100-sxm", "h200"])
@pytest.mark.parametrize("kind", ["1f1b", "zbv", "interleaved_1f1b"])
def test_equal_devices_are_one(kind: str, device: str) -> None:
    """A pool of the same device changes no cut, no byte of any rank, no term of the step."""
    texts = sized(kind=kind, device=device, dp=2)
    alone, pooled = megaplan.split(SPEC, *texts), megaplan.split(SPEC, *texts, pools({"name": device}, count=2))
    assert pooled.cuts.spans == alone.cuts.spans
    assert pooled.cuts.certificate.value == alone.cuts.certificate.value
    assert pooled.step_time == alone.step_time
    one, other = (megaplan.estimate(found.plan).budget for found in (alone, pooled))
    assert [one.of_rank(rank)._replace(ranks=()) for rank in range(4)] == [other.of_rank(rank)._replace(ranks=()) for rank in range(4)]
    assert [pool.ranks for pool in other.pools] == [(0, 2), (2, 4)]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if num_copies(placement(kind)) == 1])  # pools refuse two copies
def test_no_cuts_are_below_the_bound(kind: str) -> None:
    """Compared with every split of small stacks whose slots have their own rates."""
    random, pp, vpp = Random(5), 2, 1 if kind in SINGLE else 2
    shares = []

    def one(top: int, factor: int) -> LayerTime:
        return LayerTime(*(factor * random.randint(0, top) for _ in range(3)))

    orders = actions(kind, pp, vpp, 4)
    paths = paths_of(orders, placement(kind), vpp, whole=kind not in SPLIT_BACKWARD)
    for _ in range(20):
        num_layers, p2p = random.randint(5, 8), random.choice((0, 3))
        devices = [
            ModelTimes(tuple(one(20, factor) for _ in range(num_layers)), one(10, factor), one(40, factor), (p2p,))
            for factor in random.sample((1, 2, 3), 2)
        ]
        slots = [devices[slot % 2] for slot in range(pp * vpp)]
        step = StepTimes(slots, link(orders, pp * vpp), paths)
        steps = [step.of(cuts) for cuts in combinations(range(1, num_layers), pp * vpp - 1)]
        bound = StepBound(slots, Constraints(), placement(kind), paths).lower_bound(max(steps), 4)
        assert bound <= min(steps)
        shares.append(bound / min(steps))
    assert sum(shares) / len(shares) > 0.6


@pytest.mark.parametrize(("kind", "pp", "dp"), [("1f1b", 2, 1), ("1f1b", 4, 2), ("zbv", 2, 2), ("gpipe", 2, 4)])
def test_a_faster_second_device_never_slows_the_step(kind: str, pp: int, dp: int) -> None:
    random = Random(7)
    own = sized(kind=kind, pp=pp, dp=dp)
    slots = pp * (1 if kind in SINGLE else 2)
    spans = spans_of(equal_cuts(9, slots), 9)
    manual = f"split={json.dumps({'mode': 'manual', 'reason': 'test', 'spans': spans})}"
    for _ in range(4):
        figures: dict[str, int] = {"memory_bytes_per_second": 10**11, "node_bytes_per_second": 10**10, "network_bytes_per_second": 10**9}
        flops, before = 10**12, float("inf")
        for _ in range(5):
            device = {"name": "a100-80gb", "peak_flops": {"fp32": flops}, **figures}
            found = megaplan.estimate(SPEC, *own, manual, pools(device, count=dp * pp // 2)).step_time
            assert not isinstance(found, str)
            assert found.seconds <= before
            before = found.seconds
            flops *= random.choice((1, 4))
            figures[random.choice(RATES)] *= random.choice((2, 20))


def test_each_stage_has_its_own_capacity() -> None:
    """The second device's memory decides what its stage holds, and moves the cut; the first one's room is no help."""
    texts = sized()
    roomy = megaplan.split(SPEC, *texts, pools({"name": "h100-sxm"}))
    peak = megaplan.estimate(roomy.plan).budget.of_rank(1).peak_bytes
    small = {"name": "h100-sxm", "capacity": peak - 1, "reserve": {"cuda_context": 0, "nccl": 0, "driver": 0}}
    kept = [f"split={json.dumps({'mode': 'manual', 'reason': 'test', 'spans': roomy.cuts.spans})}"]
    tight = megaplan.estimate(SPEC, *texts, *kept, pools(small))
    assert not tight.fits
    assert tight.worst.ranks == (1,)
    assert tight.worst.headroom_bytes == -1
    assert tight.budget.of_rank(0).fits
    moved = megaplan.split(SPEC, *texts, pools(small))
    assert moved.plan.estimates.fits
    assert moved.cuts.spans[1][0] > roomy.cuts.spans[1][0]


def test_a_plan_of_manual_cuts_on_two_devices_is_read_back(tmp_path: Path) -> None:
    """A plan names the objective that cuts would have; it refuses pools only where cuts are searched."""
    texts = *sized(), "split={mode: manual, reason: test, spans: [[0, 4], [4, 9]]}", pools({"name": "h100-sxm"})
    (tmp_path / "plan.json").write_text(plan_text(megaplan.split(SPEC, *texts).plan))
    assert megaplan.estimate(str(tmp_path / "plan.json")).budget == megaplan.estimate(SPEC, *texts).budget


def test_the_slower_device_gets_fewer_layers() -> None:
    """Weighted cuts are no longer than equal ones, and a stage on the slower device takes less of the model."""
    slow = {"name": "a100-80gb", "peak_flops": {"fp32": 2 * 10**12}, "memory_bytes_per_second": 10**11}
    found = megaplan.split(SPEC, *sized(pp=4), pools(slow, count=2))
    pipeline = Pipeline(found.job.spec, found.job.inventory)
    assert found.cuts.certificate.value <= pipeline.step.of(equal_cuts(9, 4))
    sizes = [stop - start for start, stop in found.cuts.spans]
    assert sum(sizes[2:]) < sum(sizes[:2])
    assert len(set(pipeline.costs.own)) == 2


@pytest.mark.parametrize(
    ("code", "texts"),
    [
        ("MP509", [pools({"name": "a100-80gb"}, count=2)]),
        ("MP509", ["mesh={pp: 2, dp_shard: 2}", pools({"name": "a100-80gb"})]),
        ("MP504", [pools({"name": "abacus"})]),
        ("MP510", [pools({"name": "a100-80gb"}), "split.objective=bottleneck"]),
        ("MP510", [pools({"name": "a100-80gb"}), "host={name: torchtitan}"]),
        ("MP510", [pools({"name": "a100-80gb"}), "schedule.num_microbatches=40000"]),
        ("MP507", [pools({"name": "a100-80gb"}), "precision={recipe: {name: fp8_current}}"]),
    ],
)
def test_what_pools_refuse(code: str, texts: list[str]) -> None:
    with pytest.raises(megaplan.MegaplanError) as caught:
        megaplan.estimate(SPEC, *texts)
    assert code in {found.code for found in caught.value.diagnostics}
