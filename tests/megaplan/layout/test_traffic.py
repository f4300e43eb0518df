"""Traffic by axis: equal to formulas of other modules and to sums by hand, and the same in text, JSON, diff and report."""

import json
from fractions import Fraction
from pathlib import Path

import pytest

import megaplan
from megaplan.cli.main import run
from megaplan.cost.step.data import data_traffic
from megaplan.layout.step_time import step_to_time
from megaplan.layout.traffic import FABRIC, NETWORK, traffic_of
from megaplan.spec.traffic import expert_traffic_bytes, tensor_traffic_bytes

ROOT = Path(__file__).parents[3]
LLAMA, MIXTRAL = str(ROOT / "plans/llama-3.1-8b.yaml"), str(ROOT / "plans/mixtral-8x7b.yaml")


class Checked:
    """A spec as the warnings about crossing groups see it."""

    def __init__(self, spec):
        self.spec = spec

    def count(self, letter):
        pattern = self.spec.model.pattern
        return (pattern * self.spec.model.num_layers)[: self.spec.model.num_layers].count(letter)


def rows_of(source, *changes):
    job = megaplan.load(source, *changes)
    rows = traffic_of(job.spec, job.inventory, job.spans)
    found = {}
    for row in rows:
        assert row.total_bytes == row.rank_bytes * job.spec.mesh.world_size
        assert (row.axis, row.what, row.link) not in found
        found[row.axis, row.what, row.link] = row
    assert [row.rank_bytes for row in rows] == sorted((row.rank_bytes for row in rows), reverse=True)
    return job, found


def test_fsdp_sends_what_a_sum_by_hand_gives():
    job, rows = rows_of(LLAMA, "mesh.pp=1", "mesh.dp_shard=8", "sharding.reshard_after_forward=true", "schedule.kind=1f1b")
    count, params = job.spec.schedule.num_microbatches, job.inventory.parameters
    assert rows["dp_shard", "parameters", FABRIC].rank_bytes == pytest.approx(2 * count * params * 2 * 7 / 8, rel=1e-6)
    assert rows["dp_shard", "gradients", FABRIC].rank_bytes == pytest.approx(count * params * 4 * 7 / 8, rel=1e-6)
    assert len(rows) == 2


def test_replicas_all_reduce_their_shards_over_the_network():
    job, rows = rows_of(LLAMA, "mesh.pp=1", "mesh.dp_shard=8", "mesh.dp_replicate=2", "schedule.kind=1f1b")
    expected = 2 * job.spec.schedule.num_microbatches * job.inventory.parameters / 8 * 4 / 2
    assert rows["dp_replicate", "gradients", NETWORK].rank_bytes == pytest.approx(expected, rel=1e-6)
    assert ("dp_shard", "gradients", FABRIC) in rows


def test_tensor_groups_send_what_the_warning_about_them_says():
    job, rows = rows_of(LLAMA, "mesh.tp=2", "mesh.dp_shard=2", "mesh.vocab_parallel=false", "recompute.default=none")
    row, mesh = rows["tp", "activations", FABRIC], job.spec.mesh
    assert row.rank_bytes * mesh.tp * mesh.pp == tensor_traffic_bytes(Checked(job.spec))


def test_expert_groups_send_what_the_warning_about_them_says():
    job, rows = rows_of(MIXTRAL)
    row, mesh = rows["ep", "routed rows", FABRIC], job.spec.mesh
    assert row.rank_bytes * mesh.tp * mesh.pp == expert_traffic_bytes(Checked(job.spec))


@pytest.mark.parametrize(("per_node", "link"), [(8, FABRIC), (2, NETWORK)])
def test_gathered_tokens_are_what_the_warning_about_them_says(per_node, link):
    changes = ("mesh.ep=4", "mesh.etp=2", "mesh.tp=2", "mesh.dp_shard=4", "host.moe_dispatcher=allgather", f"device.per_node={per_node}")
    job, rows = rows_of(MIXTRAL, *changes)
    row, mesh = rows["ep", "gathered tokens", link], job.spec.mesh
    assert row.ranks == 8
    assert row.rank_bytes * mesh.tp * mesh.pp == expert_traffic_bytes(Checked(job.spec))


def test_rows_that_leave_a_node_are_a_row_of_their_own():
    _, inside = rows_of(MIXTRAL)
    _, split = rows_of(MIXTRAL, "device.per_node=2")
    whole = inside["ep", "routed rows", FABRIC].rank_bytes
    near, far = (split["ep", "routed rows", link].rank_bytes for link in (FABRIC, NETWORK))
    assert near + far == whole
    assert Fraction(far, near) == 2


@pytest.mark.parametrize("changes", [("host.name=megatron",), ("host.name=megatron", "mesh.pp=1", "mesh.dp_shard=8", "schedule.kind=1f1b")])
def test_a_fitted_host_sends_what_its_step_is_timed_with(changes):
    job, rows = rows_of(LLAMA, *changes)
    work = step_to_time(job.spec, job.spans, job.inventory)
    reduced, gathered = data_traffic(work)
    ranks, pp = work.mesh.dp, job.spec.mesh.pp
    for what, payload in (("gradients", reduced), ("parameters", gathered)):
        assert rows["dp", what, FABRIC].rank_bytes == pytest.approx(payload / pp * (ranks - 1) / ranks, rel=1e-6)


def test_one_device_and_hosts_without_a_model_of_their_step():
    assert rows_of(str(ROOT / "plans/tiny-hybrid.yaml"))[1] == {}
    _, rows = rows_of(LLAMA, "mesh.cp=2", "mesh.dp_shard=2")
    assert {axis for axis, _, _ in rows} == {"dp_shard", "pp", "cp"}


def test_text_json_and_diff_show_the_same_rows(capsys):
    found = megaplan.estimate(LLAMA)
    assert run(["estimate", LLAMA]) == 0
    text = capsys.readouterr().out
    for row in found.parts.traffic:
        assert f"{row.axis} {row.what}" in text
    assert run(["estimate", LLAMA, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["traffic"]
    assert rows == [row._asdict() for row in found.parts.traffic]
    plans = [str(ROOT / f"plans/{name}.json") for name in ("llama-3.1-8b", "llama-3.1-8b-rl")]
    assert run(["diff", *plans, "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["traffic"]["before"] == rows
    assert document["post_training"]["before"] is None
    assert document["post_training"]["after"] == json.loads(json.dumps(megaplan.rl(plans[1]).__dict__, default=lambda each: each.__dict__))
    for shape in ("text", "markdown"):
        assert run(["diff", *plans, "--format", shape]) == 1
        shown = capsys.readouterr().out
        assert "dp_shard gradients" in shown
        assert "iteration" in shown
