"""`post_training.rollout.device`: a rollout pool on another type of device than training."""

from pathlib import Path

import pytest

import megaplan

SPEC = Path(__file__).parents[3] / "plans" / "llama-3.1-8b-rl.yaml"
SPLIT = "post_training.placement=split"


def on(device):
    return f"post_training.rollout.device={device}"


def test_the_device_of_training_changes_nothing():
    """A pool of 16 leaves the nodes of training with either, so that the links are the same."""
    assert megaplan.rl(SPEC, SPLIT, on("{name: h100-sxm}")) == megaplan.rl(SPEC, SPLIT)


def test_the_rollout_has_its_own_rates_and_memory():
    one, other = megaplan.rl(SPEC, SPLIT), megaplan.rl(SPEC, SPLIT, on("{name: h20}"))
    assert other.device == "h100-sxm + h20"
    seconds = [{phase.name: phase.seconds.value for phase in found.times} for found in (one, other)]
    assert seconds[0]["training"] == seconds[1]["training"]
    assert seconds[0]["rollout"] != seconds[1]["rollout"]
    rooms = [{phase.name: phase.headroom_bytes + phase.total_bytes for phase in found.memory} for found in (one, other)]
    assert rooms[0]["training"] == rooms[1]["training"]
    assert rooms[0]["rollout"] < rooms[1]["rollout"]


def test_more_bandwidth_never_slows_generation():
    before = float("inf")
    for rate in (10**12, 2 * 10**12, 8 * 10**12):
        found = megaplan.rl(SPEC, SPLIT, on(f"{{name: h20, memory_bytes_per_second: {rate}}}"))
        assert found.iteration_seconds.value <= before
        before = found.iteration_seconds.value


def test_a_slow_adapter_of_the_rollout_slows_the_sync():
    slow = megaplan.rl(SPEC, SPLIT, on("{name: h100-sxm, network_bytes_per_second: 1000000000}"))
    sync = [next(phase.seconds.value for phase in found.times if phase.name == "sync") for found in (megaplan.rl(SPEC, SPLIT), slow)]
    assert sync[1] > 2 * sync[0]


@pytest.mark.parametrize(
    ("code", "texts"),
    [
        ("MP850", [on("{name: h20}")]),
        ("MP504", [SPLIT, on("{name: abacus}")]),
        ("MP506", [SPLIT, on("{name: a100-80gb}"), "post_training.rollout.dtype=fp8"]),
    ],
)
def test_what_is_refused(code, texts):
    with pytest.raises(megaplan.MegaplanError) as caught:
        megaplan.rl(SPEC, *texts)
    assert code in {found.code for found in caught.value.diagnostics}
