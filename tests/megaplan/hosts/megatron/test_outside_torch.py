"""Buffers that a dispatcher's library takes from the driver, and that all uses of usable bytes count them."""

from random import Random

import pytest
from megatron_hybrid import spec_of

import megaplan
from megaplan.budget.fit import largest_micro_batch
from megaplan.budget.megatron import megatron_reserve
from megaplan.budget.peaks import StagePeaks
from megaplan.budget.values import device_budget, spec_device
from megaplan.hosts.megatron.run import MegatronRun, setting_of
from megaplan.hosts.megatron.workspaces import all_to_all_bytes, hybrid_ep_bytes
from megaplan.importers.megatron.spec import import_megatron
from megaplan.inventory.build import build_inventory
from megaplan.layout.build import build_layout
from megaplan.partition.memory import Memory
from megaplan.spec.host import device_of
from megaplan.spec.models import Spec

FLEX = "host.moe_dispatcher=flex"
MIB = 2**20
MOE = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --ffn-hidden-size 512 --seq-length 512 --max-position-embeddings 512 "
    "--vocab-size 1024 --bf16 --micro-batch-size 1 --global-batch-size 512 --num-experts 64 --moe-router-topk 2 --use-distributed-optimizer"
)


def experts(more: str, device: str, gpus: int) -> Spec:
    found = import_megatron(f"{MOE} {more}", "launch", [f"device.name={device}"], gpus)
    return megaplan.estimate(found.document).job.spec


def buffers(more: str, device: str, gpus: int) -> float:
    """MiB of the item in the device's reserve."""
    return sum(item.bytes for item in megatron_reserve(experts(more, device, gpus)) if item.name == "nccl_all_to_all") / MIB


def test_hybridep_takes_its_buffers_from_the_driver() -> None:
    plain, flex = (spec_device(spec_of(FLEX, *more), 8) for more in ((), ("host.moe_flex_backend=hybridep",)))
    rows = 1024 * 2 * (2 * 256 + 4 * 8 + 4 * 2)  # tokens of both ranks: channels, a score an expert, a scale for 128 channels
    assert plain.usable_bytes - flex.usable_bytes == rows
    assert {item.name: item.bytes for item in flex.reserve}["hybrid_ep"] == rows


def test_hybridep_between_nodes_has_two_buffers_and_three_of_its_own_tokens() -> None:
    spec = spec_of(FLEX, "host.moe_flex_backend=hybridep")
    row = 2 * 256 + 4 * 4
    assert hybrid_ep_bytes(MegatronRun(spec, build_inventory(spec)).at, 1) == 1024 * (2 * (2 * row + 4 * 2) + 3 * row)


@pytest.mark.parametrize(
    ("more", "device", "gpus", "mib"),
    [
        ("--expert-model-parallel-size 64", "gb200", 64, 63 * 32 * 12),  # published: 23.6 GiB on 64 ranks of one domain
        ("--expert-model-parallel-size 4", "gb200", 4, 3 * 32 * 12),  # published: 1.15 GB
        ("--expert-model-parallel-size 8", "h100-sxm", 8, 7 * 32 * 12),  # published: 32 channels to each of 7 peers
        ("--expert-model-parallel-size 16", "h100-sxm", 16, 7 * 4 * 12),  # over a network as few channels as its adapter needs
        ("--expert-model-parallel-size 64", "h100-sxm", 64, 7 * 4 * 12),
        ("--expert-model-parallel-size 4 --expert-tensor-parallel-size 2", "h100-sxm", 8, 3 * 32 * 12),
        ("--expert-model-parallel-size 1", "h100-sxm", 8, 0),
        ("--expert-model-parallel-size 8", "mi300x", 8, 0),  # another library
    ],
)
def test_an_all_to_all_connects_all_its_peers_on_channels_of_their_own(more: str, device: str, gpus: int, mib: int) -> None:
    assert buffers(f"{more} --moe-token-dispatcher-type alltoall", device, gpus) == mib


def test_other_dispatchers_and_dense_models_connect_no_peers() -> None:
    parts = "--expert-model-parallel-size 8"
    assert buffers(f"{parts} --moe-token-dispatcher-type allgather", "h100-sxm", 8) == 0
    assert buffers(f"{parts} --moe-token-dispatcher-type flex --moe-enable-deepep --moe-router-dtype fp32", "h100-sxm", 8) == 0
    dense = import_megatron(MOE.partition(" --num-experts")[0], "launch", ["device.name=h100-sxm"], 8)
    assert megatron_reserve(megaplan.estimate(dense.document).job.spec) == ()


@pytest.mark.parametrize("seed", range(6))
def test_channels_of_all_rounds_are_at_most_those_that_there_are(seed: int) -> None:
    """Between domains no rank has more than a share of its channels for each of the peers that it serves at once."""
    draw = Random(seed)
    device = draw.choice(["h100-sxm", "h200", "a100-sxm-80gb", "b200", "gb200"])
    ep = 2 ** draw.randint(1, 6)
    spec = experts(f"--moe-token-dispatcher-type alltoall --expert-model-parallel-size {ep}", device, 128)
    domain = device_of(spec.device).domain.value
    channels = all_to_all_bytes(setting_of(spec), device_of(spec.device)) / (12 * MIB * (min(ep, domain) - 1))
    assert channels == int(channels)
    assert channels * (-(-ep // 8) if ep > domain else 1) <= 32


@pytest.mark.parametrize("dispatcher", ["host.moe_dispatcher=alltoall", "host.moe_flex_backend=hybridep"])
def test_searches_splits_and_the_largest_micro_batch_have_the_budgets_usable_bytes(dispatcher: str) -> None:
    spec = spec_of(*([FLEX] if "hybridep" in dispatcher else []), dispatcher)
    inventory = build_inventory(spec)
    layout = build_layout(spec, inventory, ((0, 8), (8, 16)))
    usable = spec_device(spec, spec.mesh.world_size).usable_bytes
    assert usable < device_budget(device_of(spec.device), spec.mesh.world_size).usable_bytes
    assert {peak + left for peak, left in Memory(spec, inventory).peaks(((0, 8), (8, 16)))} == {usable}
    size = largest_micro_batch(spec, inventory, layout)
    assert size is not None
    for more, fits in ((size, True), (size + 1, False)):
        changed = spec_of(*([FLEX] if "hybridep" in dispatcher else []), dispatcher, f"batch.micro_batch_size={more}")
        usable = spec_device(changed, spec.mesh.world_size).usable_bytes
        assert (max(StagePeaks(changed, inventory).of(layout, range(spec.mesh.pp))) <= usable) is fits
