"""Degrees compared with sharded sizes, groups compared with nodes, and the bytes that warnings state."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spec_samples import Accepted, edited

from megaplan.errors import MegaplanError, Severity
from megaplan.inventory.build import build_inventory
from megaplan.inventory.tensors import Owner
from megaplan.spec.load import load_spec_text
from megaplan.spec.traffic import crossing_groups

SHAPES = st.fixed_dictionaries(
    {
        "heads": st.sampled_from([4, 6, 8, 12]),
        "kv_heads": st.sampled_from([1, 2, 4]),
        "groups": st.sampled_from([1, 2, 4]),
        "recurrent": st.sampled_from([4, 6, 8]),
        "width": st.sampled_from([96, 100, 90]),
        "experts": st.sampled_from([4, 6, 8]),
        "tp": st.sampled_from([1, 2, 3, 4]),
        "ep": st.sampled_from([1, 2, 3, 4]),
        "etp": st.sampled_from([1, 2]),
    }
)


@pytest.mark.requirement("R-30")
@settings(max_examples=150)
@given(SHAPES)
def test_an_accepted_mesh_divides_every_sharded_tensor(shape: dict[str, int]) -> None:
    """The rules and the parameter ledger agree: each part of each tensor falls into equal shards, or the spec is refused."""
    edits = [
        ("num_heads: 4, num_kv_heads: 2", f"num_heads: {shape['heads']}, num_kv_heads: {shape['kv_heads']}"),
        ("num_groups: 2", f"num_groups: {shape['groups']}"),
        ("kind: m2rnn, num_heads: 4", f"kind: m2rnn, num_heads: {shape['recurrent']}"),
        ("mlp: {ffn_hidden_size: 96}", f"mlp: {{ffn_hidden_size: {shape['width']}}}"),
        ("num_experts: 16, top_k: 2", f"num_experts: {shape['experts']}, top_k: 2, shared_ffn_hidden_size: {shape['width']}"),
        ("  mlp:", "  features: {mtp: {depth: 1, ffn_hidden_size: 96}, relation_bias: {num_relations: 3}}\n  mlp:"),
        ("tp: 1\n  ep: 1\n  etp: 1", f"tp: {shape['tp']}\n  ep: {shape['ep']}\n  etp: {shape['etp']}"),
        ("dp_shard: 2", "dp_shard: 12"),
        ("seq_length: 128", "seq_length: 144"),
    ]
    try:
        spec = load_spec_text(edited(*edits)).spec
    except MegaplanError as error:
        codes = {found.code for found in error.diagnostics if found.severity is Severity.ERROR}
    else:
        codes = set()
        for name, tensor in build_inventory(spec).tensors():
            if tensor.owner is Owner.EXPERT_PARALLEL:
                assert tensor.shape[0] % spec.mesh.ep == 0, name
                assert tensor.tp_dim is not None, name
                assert tensor.shape[tensor.tp_dim] % spec.mesh.etp == 0, name
            elif tensor.tp_dim is not None:
                for part in tensor.tp_parts or (tensor.shape[tensor.tp_dim],):
                    assert part % spec.mesh.tp == 0, name
    assert codes <= {"MP201", "MP203", "MP205", "MP701", "MP703"}


@pytest.mark.requirement("R-31")
def test_ep_is_no_factor_of_the_world_size(accepted: Accepted) -> None:
    mesh = accepted(overrides=["mesh.dp_shard=8", "mesh.ep=8"]).spec.mesh
    assert (mesh.world_size, mesh.efsdp) == (16, 1)


@pytest.mark.parametrize(
    ("world_size", "degree", "per_node", "crossing"),
    [(8, 8, 8, 0), (16, 8, 8, 0), (16, 16, 8, 1), (64, 16, 8, 4), (24, 3, 8, 2), (24, 6, 8, 2), (6, 6, 8, 0), (4096, 1, 8, 0)],
)
def test_groups_that_leave_a_node_are_counted(world_size: int, degree: int, per_node: int, crossing: int) -> None:
    nodes = [{rank // per_node for rank in range(start, start + degree)} for start in range(0, world_size, degree)]
    assert crossing_groups(world_size, degree, per_node) == crossing == sum(len(group) > 1 for group in nodes)


@pytest.mark.requirement("R-37")
def test_tensor_groups_across_nodes_warn_with_bytes(accepted: Accepted) -> None:
    """5 collectives of 2 A, 2 M, 2 R and 2 D; each moves (tp − 1) payloads of 2 · 128 positions · 64 wide · 2 bytes in a group."""
    (found,) = (item for item in accepted(overrides=["mesh.tp=2", "device.per_node=1"]).diagnostics if item.code == "MP209")
    assert found.severity is Severity.WARNING
    assert "mesh.tp = 2, device.per_node = 1, and 4 of 4 groups have ranks on several nodes" in found.detail
    total = 5 * 8 * 4 * (2 - 1) * (2 * 128 * 64 * 2)
    assert f"send {total / 2**20:.2f} MiB per step: 5 collectives · 8 blocks · 4 microbatches · (2 − 1) · 2 · 128 · 64 ·" in found.detail


@pytest.mark.requirement("R-37")
def test_expert_groups_across_nodes_warn_with_bytes(accepted: Accepted) -> None:
    """Dispatch and combine, forward and backward: 4 exchanges of top_k rows per token, all except 1 / ep of them to other ranks."""
    overrides = ["mesh.dp_shard=8", "mesh.ep=8", "device.per_node=4"]
    (found,) = (item for item in accepted(overrides=overrides).diagnostics if item.code == "MP210")
    assert "mesh.ep · mesh.etp = 8, device.per_node = 4, and 2 of 2 groups have ranks on several nodes" in found.detail
    total = 4 * 2 * 4 * 2 * (2 * 128 * 64 * 2) * 7 // 8
    assert f"send {total / 2**20:.2f} MiB per step under balanced routing: 4 exchanges · 2 blocks · 4 microbatches" in found.detail


@pytest.mark.requirement("R-37")
def test_groups_within_a_node_are_silent(accepted: Accepted) -> None:
    for overrides in (["mesh.tp=2", "device.per_node=2"], ["mesh.tp=2", "mesh.dp_shard=1", "mesh.pp=1", "device.per_node=4"]):
        assert not {item.code for item in accepted(overrides=overrides).diagnostics} & {"MP209", "MP210"}


@pytest.mark.requirement("R-33")
def test_context_parallelism_is_accepted_with_every_family() -> None:
    assert load_spec_text(edited(("cp: 1", "cp: 2"))).spec.mesh.cp == 2
