"""First gradients while they are cast for accumulation, tensor by tensor."""

from collections.abc import Callable
from typing import Any

import pytest

from megaplan.budget.actions import accumulating_backward_peak, reducing_backward_points
from megaplan.budget.megarun import slot_chunks
from megaplan.budget.tape import cast_bytes, casting_experts, reducing_experts
from megaplan.hosts.megarun.sizes import NOTHING
from megaplan.inventory.build import build_inventory
from megaplan.layout.build import build_layout
from megaplan.schedules.states import FORWARD_AFTER_BACKWARD, FORWARDED
from megaplan.spec.models import Spec


def walked(sizes: list[int], wider: int, narrower: int) -> int:
    """All are there at first; each is cast to wider / narrower of its size, and then freed."""
    alive = most = sum(sizes)
    for size in sizes:
        alive += size * wider // narrower
        most = max(most, alive)
        alive -= size
    return most


@pytest.mark.parametrize("sizes", [[8], [8, 2, 64], [64, 2, 8], [2, 64, 64, 2]])
@pytest.mark.parametrize(("made", "whole"), [(2, 4), (4, 2), (2, 2)])
def test_the_largest_moment_is_that_of_the_walk(sizes: list[int], made: int, whole: int) -> None:
    """Wider, narrower and equally wide accumulated gradients; in one block or in several."""
    group = NOTHING._replace(made_bytes=made * sum(sizes), unsharded_bytes=whole * sum(sizes))
    named = {str(index): made * size for index, size in enumerate(sizes)}
    expected = walked([made * size for size in sizes], whole, made)
    assert cast_bytes([(named, group)]) == expected
    assert cast_bytes([({name: size}, group) for name, size in named.items()]) == expected


@pytest.mark.parametrize("grads", ["fp32", "bf16"])
def test_a_layer_is_cast_beside_the_gradient_of_its_input(grads: str, hybrid: Callable[..., Spec]) -> None:
    """The first layer's cast is the largest where parameters outweigh activations; in the parameters' own dtype there is no cast."""
    few: dict[str, Any] = {"batch.micro_batch_size": 1, "batch.seq_length": 16, "model.mlp.ffn_hidden_size": 8192, "model.features": {}}
    spec = hybrid({"mesh": {"pp": 2, "dp_shard": 2}, "precision.grads": grads, "precision.reduce": grads, **few})
    inventory = build_inventory(spec)
    first, _ = slot_chunks(spec, inventory, build_layout(spec, inventory, [(0, 5), (5, 10)]))
    assert first.policy.in_place == (grads == "bf16")
    found = accumulating_backward_peak(first, FORWARDED)
    assert found.where.startswith("cast of " if grads == "fp32" else "backward of ")
    if grads == "fp32":
        assert found.live is None
        assert found.total == first.before[found.unit] + found.gradients + found.communication + found.activations
        assert accumulating_backward_peak(first, FORWARD_AFTER_BACKWARD).where.startswith("backward of ")


def test_a_layer_is_cast_beside_the_gather_of_the_layer_before(hybrid: Callable[..., Spec]) -> None:
    """FSDP2 prefetches: where layers are gathered for their backward, the next one's all-gather output is there when gradients are cast."""
    few: dict[str, Any] = {"batch.micro_batch_size": 1, "batch.seq_length": 16, "model.mlp.ffn_hidden_size": 8192, "model.features": {}}
    spec = hybrid({"mesh": {"pp": 2, "dp_shard": 2}, "sharding.reshard_after_forward": True, "precision.grads": "fp32", **few})
    inventory = build_inventory(spec)
    _, last = slot_chunks(spec, inventory, build_layout(spec, inventory, [(0, 5), (5, 10)]))
    found = accumulating_backward_peak(last, FORWARDED)
    index = last.names.index(found.where.removeprefix("cast of "))
    assert last.ahead[index].flat_bytes > 0
    gathered = sum(unit.opens.gathered_bytes + unit.bank.gathered_bytes for unit in last.units[index:] if unit.layer)
    assert found.communication == last.root.gathered_bytes + gathered + last.ahead[index].flat_bytes


def test_the_last_stage_casts_beside_its_output(hybrid: Callable[..., Spec]) -> None:
    """torch's stage names the logits until its backward has returned; FSDP2 casts before that."""
    few: dict[str, Any] = {"batch.micro_batch_size": 1, "batch.seq_length": 16, "model.features": {}}
    spec = hybrid({"mesh": {"pp": 2, "dp_shard": 2}, "model.vocab_size": 50257, **few})
    inventory = build_inventory(spec)
    _, last = slot_chunks(spec, inventory, build_layout(spec, inventory, [(0, 5), (5, 10)]))
    found = accumulating_backward_peak(last, FORWARDED)
    assert found.where == "cast of the slot's own gradients"
    assert last.logits_bytes > 0
    assert found.activations == last.policy.boundary_bytes + last.logits_bytes


@pytest.mark.parametrize(("params", "grads"), [("fp32", "bf16"), ("bf16", "fp32")])
def test_a_banks_first_gradients_are_cast_one_after_another(params: str, grads: str, hybrid: Callable[..., Spec]) -> None:
    """To a narrower dtype the first cast is the largest point, to a wider one the last: all others have been cast by then."""
    given: dict[str, Any] = {"batch.micro_batch_size": 1, "batch.seq_length": 1, "model.moe.ffn_hidden_size": 4096, "model.features": {}}
    spec = hybrid(
        {"mesh": {"pp": 2, "dp_shard": 2}, "precision.params": params, "precision.grads": grads, "precision.reduce": grads, **given}
    )
    inventory = build_inventory(spec)
    first, _ = slot_chunks(spec, inventory, build_layout(spec, inventory, [(0, 5), (5, 10)]))
    index = first.names.index("layers.1")
    made = [size for name, size in first.units[index].block.gradients.items() if name.startswith("experts.")]
    alone = {"accumulates": False, "together": False, "frees": False}
    found = casting_experts(first.units[index], first=True, casts=True, **alone)
    assert found.where == "cast of {}.experts"
    assert found.gradients == walked(made, spec.precision.grads.bytes, spec.precision.params.bytes)
    assert casting_experts(first.units[index], first=False, casts=False, **alone).size < found.size
    together = casting_experts(first.units[index], first=True, casts=True, **{**alone, "together": True})
    assert together.gradients == sum(made) + sum(made) * spec.precision.grads.bytes // spec.precision.params.bytes


@pytest.mark.parametrize("later", [True, False])
def test_without_a_pipeline_a_bank_is_reduced_before_the_rest_of_its_layer_s_backward(later: bool, hybrid: Callable[..., Spec]) -> None:
    """Then its shards and, with replicas, their sums replace its gradients, and the reduction's input its gathered parameters."""
    gone = {f"model.{section}": None for section in ("attention", "mamba", "recurrent", "mlp")}
    many_tokens = {"model.moe.ffn_hidden_size": 8, "batch.micro_batch_size": 4, "batch.seq_length": 512}
    spec = hybrid({"model.pattern": "E", "model.features": {}, **gone, **many_tokens, "mesh": {"dp_shard": 2, "dp_replicate": 2}})
    inventory = build_inventory(spec)
    (chunk,) = slot_chunks(spec, inventory, build_layout(spec, inventory, [(0, 10)]))
    index = chunk.names.index("layers.9")  # the first to run backward: nothing of another layer's reduction is left
    storage = chunk.units[index].storage
    assert storage is not None
    before, after = (peak for peak in reducing_backward_points(chunk, later=later) if peak.where == "backward of layers.9")

    assert not any(name.startswith("experts.") for name in after.params)
    bank = storage.experts
    kept = bank.reduced_bytes if later or bank.recast_bytes else 0
    assert after.gradients - before.gradients == kept + (0 if later else bank.shard_bytes)
    assert after.gradients - before.gradients == reducing_experts(chunk.units[index], 0, later=later, replicated=True).left
    assert after.communication - before.communication == bank.reduce_bytes - bank.gathered_bytes
    assert bank.shard_bytes > 0
    assert bank.reduce_bytes > 0
