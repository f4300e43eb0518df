"""Properties of every budget, and budgets worked out by hand."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megaplan.budget.values import Budget
from megaplan.columns import Basis, Column, Phase
from megaplan.inventory.build import build_inventory
from megaplan.spec.models import Spec


def variants() -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            "mesh.pp": st.sampled_from([1, 2, 5]),
            "mesh.dp_shard": st.integers(1, 5),
            "mesh.dp_replicate": st.integers(1, 2),
            "batch.micro_batch_size": st.integers(1, 3),
            "schedule.num_microbatches": st.integers(5, 9),
            "sharding.reshard_after_forward": st.booleans(),
            "model.tie_embeddings": st.booleans(),
            "precision.params": st.sampled_from(["bf16", "fp32"]),
        }
    )


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(overrides=variants())
def test_cells_add_up_and_every_rank_is_named_once(
    overrides: dict[str, Any], hybrid: Callable[..., Spec], budget_of: Callable[..., Budget]
) -> None:
    spec = hybrid(overrides)
    budget = budget_of(spec)
    assert sorted(rank for group in budget.ranks for rank in group.ranks) == list(range(spec.mesh.world_size))
    assert [group.peak_bytes for group in budget.ranks] == sorted((group.peak_bytes for group in budget.ranks), reverse=True)
    for group in budget.ranks:
        assert list(group.cells) == list(Phase)
        assert all(set(cells) == set(Column) for cells in group.cells.values())
        assert all(isinstance(size, int) and size >= 0 for cells in group.cells.values() for size in cells.values())
        assert group.peak_bytes == max(group.phases.values()) == sum(group.columns.values())
        assert group.headroom_bytes == budget.device.usable_bytes - group.peak_bytes
        assert group.allocated_bytes == group.peak_bytes - group.columns[Column.OVERHEAD]
    assert len({str(group.cells) for group in budget.ranks}) == len(budget.ranks)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(overrides=variants())
def test_phases_hold_what_their_names_say(overrides: dict[str, Any], hybrid: Callable[..., Spec], budget_of: Callable[..., Budget]) -> None:
    """No optimizer state before the first update, no gradients before the first backward, none of a microbatch during an update."""
    states = (Column.MATRIX_OPTIMIZER, Column.OTHER_OPTIMIZER)
    for group in budget_of(hybrid(overrides)).ranks:
        cells = group.cells
        assert all(cells[phase][column] == 0 for phase in (Phase.INIT, Phase.FIRST_FORWARD_BACKWARD) for column in states)
        assert all(cells[Phase.OPTIMIZER][column] > 0 for column in states)
        assert cells[Phase.INIT][Column.GRADIENTS] == cells[Phase.INIT][Column.COMMUNICATION] == 0
        assert cells[Phase.OPTIMIZER][Column.ROUTING] == cells[Phase.OPTIMIZER][Column.FEATURE_ACTIVATIONS] == 0
        first, steady = cells[Phase.FIRST_FORWARD_BACKWARD], cells[Phase.FORWARD_BACKWARD]
        assert {column: steady[column] for column in Column if column not in (*states, Column.OVERHEAD)} == {
            column: first[column] for column in Column if column not in (*states, Column.OVERHEAD)
        }


def plain(overrides: dict[str, Any]) -> Spec:
    """Two D layers of 16 and ffn 32, vocabulary 64, all fp32: layer 16 + 3·512 = 1552 elements, head and embedding 1024, norm 16."""
    model = {"pattern": "D", "num_layers": 2, "hidden_size": 16, "vocab_size": 64, "mlp": {"ffn_hidden_size": 32}}
    values: dict[str, Any] = {
        "format": "megaplan.spec/1",
        "name": "t",
        "model": model,
        "batch": {"micro_batch_size": 1, "seq_length": 8},
        "precision": dict.fromkeys(("params", "grads", "master", "moments", "reduce"), "fp32"),
    }
    for key, value in overrides.items():
        section, name = key.split(".")
        values.setdefault(section, {})[name] = value
    return Spec.model_validate(values)


def test_states_of_one_process_by_hand(budget_of: Callable[..., Budget]) -> None:
    budget = budget_of(plain({"host.cuda_graphs": "none"}))  # whose gradients stay
    rank = budget.ranks[0]
    parameters = 2 * 1552 + 2 * 1024 + 16
    matrices, others = 2 * 3 * 512, 2 * 16 + 2 * 1024 + 16
    assert budget.parameters == rank.parameters == parameters
    cells = rank.cells[Phase.OPTIMIZER]
    assert cells[Column.REPLICATED_PARAMS] == 4 * others
    assert cells[Column.TENSOR_PARALLEL_PARAMS] == 4 * matrices
    assert cells[Column.GRADIENTS] == 4 * matrices  # AdamW has dropped the others
    assert cells[Column.MATRIX_OPTIMIZER] == 4 * matrices
    assert cells[Column.OTHER_OPTIMIZER] == 2 * 4 * others + 5 * 4  # five AdamW tensors with a step counter each
    assert cells[Column.ACTIVATIONS] == 2 * 8 * 8  # ids and labels, int64 [1, 8] each
    # the four gate and up matrices, 32 × 16, are a round: two buffers of 512 elements each, x xᵀ and its polynomial of 16²
    assert cells[Column.WORKSPACE] - rank.cells[Phase.FORWARD_BACKWARD][Column.WORKSPACE] == 4 * 4 * 2 * (512 + 256)
    assert rank.peak_places[Phase.OPTIMIZER] == "Newton-Schulz of the largest matrix"


def test_newton_schulz_of_two_shards_by_hand(budget_of: Callable[..., Budget]) -> None:
    """Each rank has two of four matrices; AdamW drops the shards of groups that have no matrix."""
    rank = budget_of(plain({"mesh.dp_shard": 2})).ranks[0]
    cells = rank.cells[Phase.OPTIMIZER]
    assert rank.peak_places[Phase.OPTIMIZER] == "Newton-Schulz of the largest matrix"
    assert cells[Column.GRADIENTS] == 4 * 1552
    assert cells[Column.WORKSPACE] - rank.cells[Phase.FORWARD_BACKWARD][Column.WORKSPACE] == 2 * 4 * 2 * (512 + 256)


def test_forward_backward_of_two_replicas_by_hand(budget_of: Callable[..., Budget]) -> None:
    """One microbatch of 8 tokens: parameters outweigh activations, so the peak is the reduction of the last layer, the first to reduce."""
    rank = budget_of(plain({"mesh.dp_replicate": 2})).ranks[0]
    assert rank.peak_places[Phase.FORWARD_BACKWARD] == "reduction of layers.1"
    cells = rank.cells[Phase.FORWARD_BACKWARD]
    # head and final norm have their gradients; the layer's were copied into the reduce-scatter's input and freed, its output is there
    assert cells[Column.GRADIENTS] == 4 * (1024 + 16 + 1552)
    # input and (if a tensor is not sharded) quotient of the reduction; layer 0 and the slot's own parameters are gathered, layer 1 no more
    assert cells[Column.COMMUNICATION] == 4 * (2 * 1552 + 1552 + 2064)
    # layer 0: its input and normed 512 each, rstd 32, gate, up, act 1024 each; the gradient of layer 1's input 512; ids and labels 64 each
    assert cells[Column.ACTIVATIONS] == 512 + 512 + 32 + 3 * 1024 + 512 + 128


def test_one_process_has_no_buffers(budget_of: Callable[..., Budget]) -> None:
    """Alone there is nothing to gather or reduce: the peak is the last backward, when all gradients are there."""
    rank = budget_of(plain({})).ranks[0]
    assert rank.peak_places[Phase.FORWARD_BACKWARD] == "backward of embedding"
    assert rank.cells[Phase.FORWARD_BACKWARD][Column.COMMUNICATION] == 0
    assert rank.cells[Phase.FORWARD_BACKWARD][Column.GRADIENTS] == 4 * (2 * 1552 + 2 * 1024 + 16)


def test_a_second_step_of_an_update_by_hand(budget_of: Callable[..., Budget]) -> None:
    """pp 2, two microbatches, rank 0: in one step only the last backward meets gradients; in a second one both microbatches' do."""
    small = {"mesh.pp": 2, "schedule.num_microbatches": 2}
    once, twice = (budget_of(plain({**small, "schedule.steps_per_update": steps})).of_rank(0) for steps in (1, 2))
    assert once.peak_places[Phase.FORWARD_BACKWARD] == "backward of layers.0, 1 microbatches in flight"
    assert twice.peak_places[Phase.FORWARD_BACKWARD] == "backward of layers.0, 2 microbatches in flight"
    first, again = (rank.cells[Phase.FORWARD_BACKWARD] for rank in (once, twice))
    # the other microbatch: input, normed and stage output 512 each, rstd 32, gate, up, act 1024 each; ids of two more, int64 [1, 8] each
    assert again[Column.ACTIVATIONS] - first[Column.ACTIVATIONS] == 3 * 512 + 32 + 3 * 1024 + 2 * 64
    assert again[Column.GRADIENTS] == first[Column.GRADIENTS]


def test_steps_of_an_update_share_receive_buffers(budget_of: Callable[..., Budget]) -> None:
    """Eight microbatches in two steps: under gpipe the activation buffers of four; under 1f1b one for each in flight, as without steps."""
    for kind, grown in (("gpipe", (0, 4)), ("1f1b", (0, 0))):
        whole, halved = (
            budget_of(
                plain(
                    {
                        "mesh.pp": 2,
                        "schedule.kind": kind,
                        "schedule.num_microbatches": 8 // steps,
                        "schedule.steps_per_update": steps,
                    }
                )
            )
            for steps in (1, 2)
        )
        for rank in (0, 1):
            cells, fewer = (budget.of_rank(rank).cells[Phase.OPTIMIZER] for budget in (whole, halved))
            assert cells[Column.COMMUNICATION] - fewer[Column.COMMUNICATION] == grown[rank] * 8 * 16 * 4  # of [1, 8, 16] in fp32
            assert cells[Column.ACTIVATIONS] == fewer[Column.ACTIVATIONS]  # ids or labels of all eight


def test_uneven_shards_by_hand(budget_of: Callable[..., Budget]) -> None:
    """dp_shard 3: 16 rows are chunks of 6, 6, 4; 32 of 11, 11, 10; 64 of 22, 22, 20. Shards are padded, moments are not."""
    budget = budget_of(plain({"mesh.dp_shard": 3}))
    assert [group.ranks for group in sorted(budget.ranks, key=lambda group: group.ranks)] == [(0, 1), (2,)]
    first, last = (budget.of_rank(rank).cells[Phase.OPTIMIZER] for rank in (0, 2))
    # per layer: norm 6 of 16 rows, gate and up 11 rows of 16, down 6 rows of 32; outside: embedding and head 22 rows of 16, norm 6
    padded = 2 * (6 + 2 * 11 * 16 + 6 * 32) + 2 * 22 * 16 + 6
    for cells in (first, last):
        assert cells[Column.REPLICATED_PARAMS] + cells[Column.TENSOR_PARALLEL_PARAMS] == 4 * padded
        assert cells[Column.GRADIENTS] == 4 * (padded - 2 * 22 * 16 - 6)  # Newton-Schulz runs when AdamW has dropped its own
    assert first[Column.MATRIX_OPTIMIZER] == 4 * 2 * (2 * 11 * 16 + 6 * 32)
    assert last[Column.MATRIX_OPTIMIZER] == 4 * 2 * (2 * 10 * 16 + 4 * 32)
    assert last[Column.OTHER_OPTIMIZER] == 2 * 4 * (2 * 4 + 2 * 20 * 16 + 4) + 5 * 4


def test_pipeline_by_hand(budget_of: Callable[..., Budget]) -> None:
    """pp 2, four microbatches of 512 tokens, bf16 with fp32 gradients: receive buffers, in-flight counts, whole gradients."""
    spec = plain({"mesh.pp": 2, "schedule.num_microbatches": 4, "precision.params": "bf16", "batch.seq_length": 512})
    budget = budget_of(spec)
    first, last = (budget.of_rank(rank) for rank in (0, 1))
    assert first.peak_places[Phase.FORWARD_BACKWARD] == "backward of layers.0, 2 microbatches in flight"
    boundary, width = 512 * 16 * 2, 512 * 32 * 2
    # one chunk at an end of the pipeline: a gradient or an activation to receive, and what the slot holds gathered
    assert first.cells[Phase.FORWARD_BACKWARD][Column.COMMUNICATION] == boundary + 2 * (1552 + 1024)
    assert last.cells[Phase.FORWARD_BACKWARD][Column.COMMUNICATION] == boundary + 2 * (1552 + 1024 + 16)
    # a layer keeps normed, rstd, gate, up, act; rank 0 also its input, the embedding's output, and the stage's output
    kept = boundary + 512 * 4 + 3 * width + boundary + boundary
    # of its two microbatches one runs backward at the activation: act is done with, d.act, d.gate and d.up are there; d.out lies in a
    # receive buffer; token ids are 4 · 512 · 8 B
    assert first.cells[Phase.FORWARD_BACKWARD][Column.ACTIVATIONS] == 2 * kept - width + 3 * width + 4 * 512 * 8
    # whole gradients in fp32, and down_proj's [16, 32] in bf16
    assert first.cells[Phase.FORWARD_BACKWARD][Column.GRADIENTS] == 4 * (1552 + 1024) + 2 * 512


@pytest.mark.requirement("R-47")
def test_a_peak_can_lie_in_the_update(budget_of: Callable[..., Budget]) -> None:
    """Square experts in bf16, orthogonalised in fp32: a round of all layers needs more than a layer's reduction; a long sequence more."""
    model = {
        "pattern": "E",
        "num_layers": 8,
        "hidden_size": 1024,
        "vocab_size": 64,
        "moe": {"num_experts": 16, "top_k": 1, "ffn_hidden_size": 1024, "activation": "relu2"},
    }
    values = {
        "format": "megaplan.spec/1",
        "name": "t",
        "model": model,
        "mesh": {"dp_shard": 4},
        "sharding": {"reshard_after_forward": True},
        "precision": dict.fromkeys(("params", "grads", "master", "moments", "reduce"), "bf16"),
        "optimizer": {"newton_schulz_dtype": "fp32"},
    }
    phases = {
        length: budget_of(Spec.model_validate({**values, "batch": {"micro_batch_size": 1, "seq_length": length}})).worst.peak_phase
        for length in (8, 65536)
    }
    assert phases == {8: Phase.FIRST_OPTIMIZER, 65536: Phase.FORWARD_BACKWARD}


@pytest.mark.requirement("R-45")
def test_the_reserve_is_itemised_with_a_basis_and_a_source(hybrid: Callable[..., Spec], budget_of: Callable[..., Budget]) -> None:
    device = budget_of(hybrid()).device
    assert {item.name: item.basis for item in device.reserve} == {"cuda_context": Basis.MEASURED, "nccl": Basis.MODELLED}
    assert all(item.bytes > 0 and item.source for item in device.reserve)
    assert device.capacity_basis is Basis.PUBLISHED
    assert device.usable_bytes == device.capacity_bytes - sum(item.bytes for item in device.reserve)


def test_first_stage_of_the_flagship_peaks_above_the_last(nam56r: Callable[..., Spec], budget_of: Callable[..., Budget]) -> None:
    """Known from real runs: under interleaved 1F1B the first rank holds more than the last, which has more parameters."""
    budget = budget_of(nam56r())
    first, last = budget.of_rank(0), budget.of_rank(7)
    assert last.parameters > first.parameters
    assert first.peak_bytes > 1.1 * last.peak_bytes
    assert budget.parameters == 4_726_404_962
    assert budget.active_parameters == 3_030_857_570
    assert budget.fits


def test_a_tied_head_is_resident_on_both_ends(hybrid: Callable[..., Spec], budget_of: Callable[..., Budget]) -> None:
    """Counted once in the model, held twice in a pipeline."""
    features = {"model.features": {}}
    tied, untied = (budget_of(hybrid({**features, "model.tie_embeddings": flag})) for flag in (True, False))
    assert untied.parameters - tied.parameters == 512 * 64
    for rank in range(4):
        assert tied.of_rank(rank).parameters == untied.of_rank(rank).parameters
        assert tied.of_rank(rank).cells[Phase.INIT] == untied.of_rank(rank).cells[Phase.INIT]
    alone = budget_of(hybrid({**features, "model.tie_embeddings": True, "mesh.pp": 1}))
    assert alone.of_rank(0).parameters == build_inventory(hybrid({**features, "model.tie_embeddings": True})).parameters
