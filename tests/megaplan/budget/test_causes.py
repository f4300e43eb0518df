"""One test for each cause that random plans found: each fails if the cause is reintroduced."""

from collections.abc import Callable
from math import prod
from typing import Any

import pytest

from megaplan.budget.actions import accumulating_backward_peak, forward_peak
from megaplan.budget.forwards import Gathers, forward_segment
from megaplan.budget.init import SlotInit, init_peak
from megaplan.budget.megarun import slot_chunks
from megaplan.budget.tape import Ahead, backward_gathers, backward_point, expert_phases
from megaplan.budget.values import Budget, checked
from megaplan.columns import Column, Phase
from megaplan.dtypes import DType
from megaplan.hosts.megarun.ledger import block_bytes
from megaplan.hosts.megarun.products import ROUTERS
from megaplan.hosts.megarun.sizes import Cast, Uneven, last_peak, storage_sizes
from megaplan.hosts.megarun.storage import BlockStorage, block_storage
from megaplan.hosts.megarun.towers import RotaryTable
from megaplan.inventory.build import build_inventory
from megaplan.layout.build import build_layout
from megaplan.schedules.states import FORWARDED, UNTOUCHED
from megaplan.spec.local import local_dims
from megaplan.spec.models import Spec

DENSE = {"model.pattern": "D", "model.num_layers": 2}
ONLY_DENSE = {f"model.{section}": None for section in ("attention", "mamba", "moe", "recurrent")} | {"model.features": {}}
GQA = {"kind": "gqa", "num_heads": 4, "num_kv_heads": 2, "head_dim": 4}
MIB = 2**20
RESHARDED = Gathers(gathers=True, frees=True, ahead=False, again=False)


@pytest.fixture
def dense(hybrid: Callable[..., Spec]) -> Callable[..., Spec]:
    """Two dense layers, with changes."""
    return lambda changes: hybrid({**DENSE, **ONLY_DENSE, **changes})


def test_gpipe_still_names_its_last_output_when_it_reduces(dense: Callable[..., Spec], budget_of: Callable[..., Budget]) -> None:
    """The last rank reduces beside the logits and the gradient that it has sent; 1F1B's frame names the same."""
    sizes = {"mesh.dp_shard": 8, "batch.micro_batch_size": 1, "schedule.num_microbatches": 1, "model.mlp": {"ffn_hidden_size": 8192}}
    spec = dense({"schedule.kind": "gpipe", "model.hidden_size": 1024, "model.vocab_size": 32768, **sizes})
    last = max(budget_of(spec).ranks, key=lambda rank: rank.coordinate["pp"])
    assert "reduction" in last.peak_places[Phase.FORWARD_BACKWARD]
    tokens, width = spec.batch.seq_length, spec.precision.params.bytes
    inputs = 2 * tokens * DType.INT64.bytes // 2  # labels
    assert last.cells[Phase.FORWARD_BACKWARD][Column.ACTIVATIONS] == tokens * (32768 + 1024) * width + inputs


@pytest.mark.parametrize(("kernels", "copies"), [("reference", 3), ("triton", 2)])
def test_a_tied_embedding_on_one_rank_has_two_gradients_and_their_sum(
    kernels: str, copies: int, dense: Callable[..., Spec], budget_of: Callable[..., Budget]
) -> None:
    """A head's gradient is a transposed view, so that the sum is a third tensor; head and loss in one operation pass on no view."""
    large = {"model.hidden_size": 1024, "model.vocab_size": 65536, "model.tie_embeddings": True, "mesh.pp": 1, "mesh.dp_shard": 8}
    small = {"batch.micro_batch_size": 1, "batch.seq_length": 64, "schedule.num_microbatches": 1, "model.mlp": {"ffn_hidden_size": 64}}
    spec = dense({**large, **small, "host.kernels": kernels})
    cells = budget_of(spec).worst.cells[Phase.FIRST_FORWARD_BACKWARD]
    weight = 65536 * 1024 * spec.precision.params.bytes
    assert cells[Column.GRADIENTS] // weight == copies


def uneven(rows: int, degree: int, row_bytes: int) -> Uneven:
    """A matrix of which AdamW keeps two fp32 moments, in fp32."""
    return Uneven(rows, -(-rows // degree), degree, 2 * row_bytes, row_bytes, expert=False, matrix=True)


def test_adamw_s_first_step_counts_what_the_rank_holds() -> None:
    """A rank without rows has no moments of a matrix to make, and nothing to cast."""
    short = uneven(rows=3, degree=5, row_bytes=400)
    casts = [Cast(400, 804, matrix=True, uneven=short), Cast(100, 204, matrix=False)]
    assert last_peak(casts, 0, 0).largest_bytes == 400
    empty = last_peak(casts, 4, 0)
    assert (empty.largest_bytes, empty.matrix_bytes) == (100, 0)
    assert casts[0].at(4, 0) == (0, 4)


def test_casts_and_moments_of_every_rank_add_up(dense: Callable[..., Spec], budget_of: Callable[..., Budget]) -> None:
    """Ranks that hold nothing of some tensors have no column below zero, whose sum would be right all the same."""
    narrow = {"precision": {"params": "bf16", "grads": "bf16", "reduce": "bf16"}, "optimizer.matrix": "adamw"}
    spec = dense({**narrow, "mesh.dp_shard": 5, "model.mlp": {"ffn_hidden_size": 3}, "model.vocab_size": 7})
    for rank in budget_of(spec).ranks:
        assert min(size for cells in rank.cells.values() for size in cells.values()) == 0


def test_negative_bytes_are_a_defect() -> None:
    cells: Any = {phase: dict.fromkeys(Column, 0) for phase in Phase}
    assert checked(cells) is cells
    cells[Phase.OPTIMIZER][Column.MATRIX_OPTIMIZER] = -4_866_048
    with pytest.raises(RuntimeError, match="matrix_optimizer_bytes = -4,866,048"):
        checked(cells)


def storage_of(spec: Spec, name: str) -> BlockStorage:
    return block_storage(storage_sizes(spec), build_inventory(spec).block(name))


def test_slots_are_built_one_after_another(dense: Callable[..., Spec]) -> None:
    """Two slots have a matrix of 3 rows on 2 ranks: the second rank's short shards are padded when later slots hold nothing."""
    spec = dense({"model.mlp": {"ffn_hidden_size": 3, "activation": "gelu"}, "mesh.dp_shard": 2})
    storage = storage_of(spec, "layers.0")
    row = spec.model.hidden_size * 4
    up, down, norm = 2 * row, 32 * 3 * 4, spec.model.hidden_size // 2 * 4  # shards: 2 of 3 rows, 32 of 64 rows, half a scale
    slots = [SlotInit(storage.resident_bytes, [storage], [True], 0, ())] * 2
    whole = up + down + norm
    assert init_peak(slots, 0, 0).total == 2 * whole
    second = init_peak(slots, 1, 0)
    assert second.total == whole + up + row + down + norm  # the last slot's matrix in both forms
    assert (second.scratch_bytes, second.where) == (row, "padding of a short shard")
    assert init_peak(slots[:1], 1, 0).total == up + row + down + norm
    with_tables = [slots[0]._replace(buffer_bytes=64, tables=(RotaryTable(36, 100 * MIB), RotaryTable(12, 50 * MIB))), slots[1]]
    tables = init_peak(with_tables, 1, 0)  # while the first is computed, the second does not exist
    assert (tables.total, tables.buffer_bytes, tables.scratch_bytes) == (whole + 100 + 100 * MIB, 100, 100 * MIB)


def test_every_family_multiplies_with_the_library(hybrid: Callable[..., Spec]) -> None:
    """So that each rank has the library's workspace: a linear, or the router, whichever kernels are chosen."""
    for kernels in ("reference", "triton"):
        spec = hybrid({"host.kernels": kernels})
        inventory, dims = build_inventory(spec), local_dims(spec)
        for index, block in enumerate(inventory.layers):
            ops = block_bytes(spec, dims, f"layers.{index}", block).part.replay.program.graph.ops
            assert any(op.late or op.name in ROUTERS for op in ops), block.family


def test_no_product_has_run_when_the_first_embedding_does(dense: Callable[..., Spec], budget_of: Callable[..., Budget]) -> None:
    """A rank's first forwards are its highest, before the library has a workspace, if the vocabulary is large and weights are frozen."""
    large = {"model.hidden_size": 1024, "model.vocab_size": 65536, "mesh.pp": 1, "mesh.dp_shard": 2, "batch.seq_length": 1}
    spec = dense({**large, "batch.micro_batch_size": 1, "schedule.num_microbatches": 1, "lora": {"rank": 3, "alpha": 16.0}})
    worst = budget_of(spec).worst
    assert worst.peak_places[Phase.FIRST_FORWARD_BACKWARD] == "gathering of layers.0"
    assert worst.cells[Phase.FIRST_FORWARD_BACKWARD][Column.WORKSPACE] == 0
    assert worst.cells[Phase.FORWARD_BACKWARD][Column.WORKSPACE] == 64 * MIB


def test_a_later_forward_finds_nothing_of_an_earlier_gather(hybrid: Callable[..., Spec]) -> None:
    """The slot's own group is gathered once a step: its output is beside the first layer's gather in the first forward alone."""
    spec = hybrid({"mesh": {"pp": 2, "dp_shard": 4}, "sharding.reshard_after_forward": True, "model.vocab_size": 65536})
    inventory = build_inventory(spec)
    first = slot_chunks(spec, inventory, build_layout(spec, inventory, [(0, 5), (5, 10)]))[0]
    layer = first.names.index("layers.0")
    gather = forward_segment(first.units[layer], RESHARDED).gather
    assert gather is not None
    fresh, later = forward_peak(first, UNTOUCHED), forward_peak(first, FORWARDED)
    assert fresh.where == "gathering of layers.0"
    assert fresh.total == first.before[layer] + first.root.gathered_bytes + first.root.flat_bytes + gather.size
    assert later.total < fresh.total
    assert later.communication <= first.root.gathered_bytes + 2 * max(
        unit.opens.gathered_bytes + unit.bank.gathered_bytes for unit in first.units
    )


def test_what_exists_before_the_first_product_is_compared_without_the_workspace(
    hybrid: Callable[..., Spec], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fill of a one-rank mesh's own group is the largest with the workspace there, and a layer's forward, which has it, without."""
    monkeypatch.setattr(Spec, "has_whole_state", False)
    few = {"batch.micro_batch_size": 1, "batch.seq_length": 16, "model.vocab_size": 65536}
    spec = hybrid({"mesh": {"pp": 2}, "precision": {"params": "bf16", "master": "fp32"}, **few})
    inventory = build_inventory(spec)
    first = slot_chunks(spec, inventory, build_layout(spec, inventory, [(0, 5), (5, 10)]))[0]
    fill = forward_peak(first, UNTOUCHED)
    assert fill.where == "gathering of the slot's own parameters"
    layer = forward_peak(first, UNTOUCHED, fill.total)
    assert layer.where.startswith("forward of layers.")
    assert 0 < layer.total < fill.total
    between = (fill.total - layer.total) // 2
    assert forward_peak(first, UNTOUCHED, between).total == fill.total - between


@pytest.mark.parametrize(("params", "beside"), [("bf16", 2), ("fp32", 0)])
def test_a_one_rank_mesh_fills_parameters_from_casts(
    hybrid: Callable[..., Spec], params: str, beside: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cast is freed once the next one is made: two casts are alive before a tensor gets its moments, one when all have them.

    FSDP2 has such meshes where only banks are shared.
    """
    monkeypatch.setattr(Spec, "has_whole_state", False)
    spec = hybrid({"mesh": {"pp": 2}, "sharding.reshard_after_forward": True, "precision": {"params": params, "master": "fp32"}})
    inventory = build_inventory(spec)
    first = slot_chunks(spec, inventory, build_layout(spec, inventory, [(0, 5), (5, 10)]))[0]
    for name, unit in zip(first.names, first.units, strict=True):
        if not unit.layer or unit.storage is None:
            continue
        tensors = sorted(inventory.layers[int(name.removeprefix("layers."))].tensors, key=lambda tensor: "." not in tensor.name)
        sizes = [prod(tensor.shape) for tensor in tensors if not tensor.name.startswith("experts.")]
        moments = [sum(sizes[:place]) + sizes[place] + sizes[max(place - 1, 0)] for place in range(1, len(sizes))]
        moments += [sum(sizes[: place + 1]) + size for place, size in enumerate(sizes)]
        gather = forward_segment(unit, RESHARDED).gather
        assert gather is not None
        assert gather.communication - unit.storage.dense.gathered_bytes == (max(moments) - sum(sizes)) * beside


def test_the_last_parameter_of_a_slot_is_fsdp2s(hybrid: Callable[..., Spec]) -> None:
    """The head of the slot's own group; prediction depths, which stand behind it, are separate groups."""
    spec = hybrid({"model.features": {"mtp": {"depth": 2, "ffn_hidden_size": 64}}, "mesh": {"dp_shard": 2}})
    inventory = build_inventory(spec)
    (only,) = slot_chunks(spec, inventory, build_layout(spec, inventory, [(0, 10)]))
    assert only.names[-1] == "head"
    assert only.root.last_made_bytes == only.units[-1].storage.dense.last_made_bytes > 0  # type: ignore[union-attr]
    last = dict(inventory.blocks())["mtp.1"].tensors[-1]
    assert last.name == "output_norm.weight"
    depth = only.units[only.names.index("mtp.1")]
    assert depth.storage.dense.last_made_bytes == prod(last.shape) * 2  # type: ignore[union-attr]


def test_experts_are_in_flight_until_their_operation_and_then_the_layer_before(hybrid: Callable[..., Spec]) -> None:
    """FSDP2 gathers one group ahead: in a backward the layer's own bank first, and the layer before from the bank's operation on."""
    moe = {"num_experts": 2, "top_k": 1, "ffn_hidden_size": 8, "shared_ffn_hidden_size": 4096}
    changes = {"model.pattern": "E", "model.num_layers": 2, "model.moe": moe}
    changes |= {"mesh": {"dp_shard": 2}, "sharding.reshard_after_forward": True}
    spec = hybrid({**changes, **{f"model.{section}": None for section in ("attention", "mamba", "mlp", "recurrent")}, "model.features": {}})
    inventory = build_inventory(spec)
    (only,) = slot_chunks(spec, inventory, build_layout(spec, inventory, [(0, 2)]))
    index = only.names.index("layers.1")
    unit, ahead = only.units[index], only.ahead[index]
    assert unit.storage is not None
    early, (during,) = expert_phases(unit.block.part.replay, takes=True)
    most, running = (max(unit.block.point_bytes(point, point.params) for point in points) for points in (early, [during]))
    assert most > running + ahead.flat_bytes > running  # the shared expert
    found = backward_point(unit, "layers.1", ahead, accumulates=False, fetches=True, takes=True)
    assert found.communication == unit.storage.experts.flat_bytes - unit.storage.experts.gathered_bytes
    assert found.size == most + found.communication + unit.input_bytes


@pytest.mark.parametrize("master", ["bf16", "fp32"])
def test_the_layer_before_is_gathered_from_a_cast(dense: Callable[..., Spec], master: str) -> None:
    """A cast of the shard is alive beside the output where parameters are stored wider than used; the last layer's after the loss."""
    stored = {"precision": {"params": "bf16", "grads": "bf16", "master": master, "moments": master}}
    spec = dense({"mesh": {"dp_shard": 2}, "sharding.reshard_after_forward": True, "host.kernels": "reference", **stored})
    inventory = build_inventory(spec)
    (only,) = slot_chunks(spec, inventory, build_layout(spec, inventory, [(0, 2)]))
    index = only.names.index("layers.1")
    unit, storage = only.units[index], only.units[index - 1].storage
    assert storage is not None
    shard = storage.dense.flat_bytes // 2
    gathered = storage.dense.flat_bytes + shard
    before = Ahead(storage.dense.flat_bytes, gathered if master == "fp32" else 0)
    assert only.ahead[index] == only.ahead[-1] == before
    own, *ahead = backward_gathers(unit, "layers.1", before)
    assert own[1] == storage.dense.flat_bytes
    assert [size for _, size in ahead] == ([gathered] if master == "fp32" else [])
    (head,) = [*backward_gathers(only.units[-1], "head", before)] or [None]
    assert (head and (head[0].op, head[1])) == (("head", gathered) if master == "fp32" else None)
    assert [*backward_gathers(only.units[-2], "final_norm", before)] == []


def test_a_gather_stands_before_an_operation_without_the_storages_of_the_operation(dense: Callable[..., Spec]) -> None:
    """The layer before the head is gathered when the loss has run backward: the head's product has no scratch yet."""
    spec = dense({"mesh": {"dp_shard": 2}, "sharding.reshard_after_forward": True, "host.kernels": "triton"})
    inventory = build_inventory(spec)
    (only,) = slot_chunks(spec, inventory, build_layout(spec, inventory, [(0, 2)]))
    scratch = {"slice", "sum", "product"}
    assert scratch <= set(only.units[-1].block.part.replay.backward[0].storages)
    ((before, _),) = backward_gathers(only.units[-1], "head", only.ahead[-1])
    assert not scratch & set(before.storages)


def test_the_cast_of_a_first_depth_stands_beside_what_it_passes_on(dense: Callable[..., Spec]) -> None:
    """The gradients of embedding and head wait for the embedding's own backward."""
    depth = {"model.features": {"mtp": {"depth": 1, "ffn_hidden_size": 16}}, "model.attention": GQA}
    few = {"model.hidden_size": 1024, "model.vocab_size": 512, "batch": {"micro_batch_size": 1, "seq_length": 16}}
    spec = dense({**depth, **few, "mesh": {}, "schedule.num_microbatches": 2, "precision": {"params": "bf16", "grads": "fp32"}})
    inventory = build_inventory(spec)
    (only,) = slot_chunks(spec, inventory, build_layout(spec, inventory, [(0, 2)]))
    peak = accumulating_backward_peak(only, UNTOUCHED)
    assert peak.where == "cast of mtp.0"
    made = inventory.block("mtp.0").elements * DType.BF16.bytes
    assert peak.gradients == made + 2 * made + 2 * 512 * 1024 * DType.BF16.bytes + 1024 * DType.BF16.bytes


@pytest.mark.parametrize("kernels", ["reference", "triton"])
def test_a_depth_does_not_name_what_its_attention_block_did(kernels: str, nam56r: Callable[..., Spec]) -> None:
    """The block's forward returns before the depth's; so latent attention's queries before rotation are gone by the MLP."""
    spec = nam56r({"host": {"kernels": kernels}})
    inventory = build_inventory(spec)
    moments = block_bytes(spec, local_dims(spec), "mtp.0", inventory.block("mtp.0")).part.replay.forward
    queries = {"attention.q_flat"}
    at = {moment.op: queries & set(moment.storages) for moment in moments}
    assert at["attention.residual"] == queries
    assert not any(at[name] for name in ("mlp.norm", "output_norm"))
