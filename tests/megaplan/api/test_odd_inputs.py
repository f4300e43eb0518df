"""Inputs that no one would choose, each of which once broke an answer: stages that share a budget, huge micro-batches, frozen regions."""

from itertools import product
from typing import Any

import pytest

from megaplan.budget.fit import largest_micro_batch
from megaplan.budget.peaks import build_budget
from megaplan.cost.replay import ReplayTimer
from megaplan.exporters.viewers import replayed_step
from megaplan.hosts.megatron.stages import even_sizes
from megaplan.inventory.build import build_inventory
from megaplan.layout.build import build_layout
from megaplan.partition.choose import choose_cuts
from megaplan.spec.models import Spec


def spec_of(model: dict[str, Any], **sections: Any) -> Spec:
    base = {"format": "megaplan.spec/1", "name": "odd", "batch": {"micro_batch_size": 1, "seq_length": 64}}
    return Spec.model_validate({**base, "model": {"hidden_size": 64, "vocab_size": 64, **model}, **sections})


MLP = {"pattern": "D", "num_layers": 8, "mlp": {"ffn_hidden_size": 64}}


def test_equal_stages_are_replayed_one_by_one() -> None:
    """Ranks of several stages may share a budget."""
    spec = spec_of(MLP, mesh={"pp": 4}, schedule={"kind": "gpipe", "num_microbatches": 2}, split={"mode": "equal"})
    inventory = build_inventory(spec)
    layout = build_layout(spec, inventory, choose_cuts(spec, inventory).spans)

    class Source:
        pass

    source: Any = Source()
    source.spec, source.inventory, source.layout = spec, inventory, layout
    found = replayed_step(source)
    budget = build_budget(spec, inventory, layout)
    assert len(budget.ranks) < 4, "two stages share one"
    for stage, held in enumerate(found.ranks):
        assert stage in held.ranks


@pytest.mark.parametrize("size", [1, 131_072])
def test_the_largest_micro_batch_fits_and_the_next_does_not(size: int) -> None:
    spec = spec_of({**MLP, "num_layers": 1}, batch={"micro_batch_size": size, "seq_length": 1})
    inventory = build_inventory(spec)
    layout = build_layout(spec, inventory, [(0, 1)])
    largest = largest_micro_batch(spec, inventory, layout)
    assert largest is not None
    assert largest >= 131_072

    def fits(count: int) -> bool:
        changed = spec.model_copy(update={"batch": spec.batch.model_copy(update={"micro_batch_size": count})})
        return build_budget(changed, inventory, layout).fits

    assert fits(largest)
    assert not fits(largest + 1)


def test_prediction_depths_with_experts_are_timed_by_their_own_mesh() -> None:
    """One timer serves all meshes of a search."""
    model = {
        "pattern": "AE",
        "num_layers": 2,
        "attention": {"kind": "gqa", "num_heads": 4, "num_kv_heads": 4, "head_dim": 16},
        "moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 64},
        "features": {"mtp": {"depth": 1, "ffn_hidden_size": 64, "experts": True}},
    }
    specs = [spec_of(model, mesh=mesh) for mesh in ({"dp_shard": 2}, {"dp_shard": 2, "ep": 2})]
    inventory = build_inventory(specs[0])
    shared = ReplayTimer(inventory, specs[0])
    for spec in specs:
        assert shared.step_ns(spec, [(0, 2)]) == ReplayTimer(inventory, spec).step_ns(spec, [(0, 2)])


def test_a_region_of_frozen_parameters_runs_nothing_again() -> None:
    model = {
        "pattern": "CA",
        "num_layers": 2,
        "short_convolution": {"conv_kernel": 3},
        "attention": {"kind": "gqa", "num_heads": 2, "num_kv_heads": 2, "head_dim": 8},
    }
    spec = spec_of(model, recompute={"default": "selective"}, lora={"rank": 4, "alpha": 1.0, "families": ["A"]})
    inventory = build_inventory(spec)
    assert build_budget(spec, inventory, build_layout(spec, inventory, [(0, 2)])).fits


def test_uneven_stages_of_any_numbers_give_sizes() -> None:
    """Sums that do not fit are refused by the caller, which compares them with the number of layers."""
    values = (None, 1, 3, 100)
    for layers, pp, per, first, last, virtual in product((1, 8), (1, 2, 3), values, values, values, values):
        arguments = {
            "num_layers_per_virtual_pipeline_stage": per,
            "decoder_first_pipeline_num_layers": first,
            "decoder_last_pipeline_num_layers": last,
            "num_virtual_stages_per_pipeline_rank": virtual,
            "account_for_embedding_in_pipeline_split": True,
        }
        sizes = even_sizes(arguments, layers, pp)
        assert sizes
        assert len(sizes) % pp == 0
