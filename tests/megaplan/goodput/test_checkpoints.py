"""Bytes of checkpoints: per rank and in total, on the device's host, and their times by class of storage."""

import pytest

import megaplan
from megaplan.budget.peaks import build_budget
from megaplan.goodput.checkpoints import CheckpointSizes, checkpoint_sizes, storage_times
from megaplan.inventory.tensors import Group

PLANS = ("tiny-hybrid-pp2", "nam56r-8xh200", "llama-3.1-8b", "mixtral-8x7b")


def sizes_of(source: str, *changes: str) -> tuple[megaplan.LoadedJob, CheckpointSizes]:
    job = megaplan.load(source, *changes)
    budget = build_budget(job.spec, job.inventory, job.layout)
    return job, checkpoint_sizes(job.spec, job.inventory, job.layout, budget)


@pytest.mark.parametrize("name", PLANS)
def test_bytes_of_ranks_stages_and_nodes_sum_to_the_whole(name: str) -> None:
    job, sizes = sizes_of(f"plans/{name}.yaml")
    world = job.spec.mesh.world_size
    assert len(sizes.rank_bytes) == len(sizes.rank_host_bytes) == world
    assert sum(sizes.rank_bytes) == sum(stage.bytes for stage in sizes.stages) == sizes.whole_bytes
    assert sum(sizes.node_host_bytes) == sum(sizes.rank_host_bytes)
    assert max(sizes.rank_bytes) == sizes.largest_rank_bytes


@pytest.mark.parametrize("change", ["optimizer.matrix=adamw", "optimizer.matrix=muon"])
def test_megarun_saves_parameters_moments_and_step_counters(change: str) -> None:
    job, sizes = sizes_of("plans/llama-3.1-8b.yaml", change)
    tensors = [tensor for _, tensor in job.inventory.tensors()]
    by_muon = [tensor for tensor in tensors if tensor.group is Group.MATRIX and job.spec.optimizer.uses_muon]
    moments = 2 * sum(tensor.elements for tensor in tensors) - sum(tensor.elements for tensor in by_muon)
    assert sizes.whole_bytes == 4 * job.inventory.parameters + 4 * moments + 4 * (len(tensors) - len(by_muon))


def test_cuts_and_meshes_do_not_change_the_whole() -> None:
    wholes = {
        sizes_of("plans/tiny-hybrid-pp2.yaml", *changes)[1].whole_bytes
        for changes in ([], ["mesh.dp_shard=2"], ["mesh.dp_replicate=2"], ["mesh.pp=1", "schedule.kind=1f1b"], ["mesh.tp=2"])
    }
    assert len(wholes) == 1


def test_megatron_saves_its_16_bit_parameters_too() -> None:
    job, sizes = sizes_of(
        "plans/llama-3.1-8b.yaml", "host={name: megatron, model: gpt}", "optimizer.matrix=adamw", "recompute.default=none"
    )
    assert sizes.whole_bytes == pytest.approx(14 * job.inventory.parameters, rel=1e-6)
    assert sizes.rank_host_bytes == sizes.rank_bytes


def test_replicas_take_host_memory_and_are_written_once() -> None:
    _, one = sizes_of("plans/tiny-hybrid.yaml")
    _, two = sizes_of("plans/tiny-hybrid.yaml", "mesh.dp_replicate=2")
    assert two.whole_bytes == one.whole_bytes
    assert sum(two.rank_host_bytes) == 2 * sum(one.rank_host_bytes)


def test_a_state_is_at_least_what_its_ranks_write() -> None:
    """Padding and replicas add to a rank's state."""
    for name in PLANS:
        _, sizes = sizes_of(f"plans/{name}.yaml")
        assert sum(sizes.rank_host_bytes) >= 0.999 * sizes.whole_bytes


def test_a_given_bandwidth_is_that_of_the_runs_own_class() -> None:
    job, sizes = sizes_of("plans/llama-3.1-8b.yaml", "run={storage: s3, node_bandwidth: 1GB/s, total_bandwidth: 2GB/s}")
    given = storage_times(job.spec, sizes)
    default = storage_times(megaplan.load("plans/llama-3.1-8b.yaml").spec, sizes)
    assert given["s3"].write_seconds > default["s3"].write_seconds
    assert given["parallel"] == default["parallel"]
    assert given["s3"].write_seconds == pytest.approx(sizes.whole_bytes / 1e9 + sizes.largest_rank_bytes / 1.43e9)
    assert [name for name, each in default.items() if not each.survives] == ["local"]
