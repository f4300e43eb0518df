"""Copies of saved tensors to host memory lengthen the step if the next layer is shorter (`host.activation_offload`)."""

from random import Random
from typing import Any

import pytest

import megaplan
from megaplan.cost.replay import ReplayTimer
from megaplan.cost.times import model_times
from megaplan.hosts.megarun.ledger import block_ledger
from megaplan.inventory.build import build_inventory
from megaplan.inventory.tensors import Block
from megaplan.spec.models import Spec

SECTIONS = {
    "attention": {"kind": "gqa", "num_heads": 8, "num_kv_heads": 4, "head_dim": 64},
    "mlp": {"ffn_hidden_size": 1536},
    "moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 256},
}
OF_LETTER = {"A": "attention", "D": "mlp", "E": "moe"}


def drawn(seed: int, letters: list[str] | None = None) -> Spec:
    """A small model, the same for each seed except for the letters of its offloaded layers."""
    draw = Random(seed)
    pattern = "".join(draw.choices("ADE", k=draw.randint(4, 9)))
    document: dict[str, Any] = {
        "format": "megaplan.spec/1",
        "name": "offload",
        "model": {"pattern": pattern, "num_layers": len(pattern), "hidden_size": 512, "vocab_size": 4096},
        "mesh": {"pp": draw.choice((1, 2)), "tp": draw.choice((1, 2))},
        "schedule": {"kind": "1f1b", "num_microbatches": 4},
        "batch": {"micro_batch_size": 1, "seq_length": 1024},
        "recompute": {"default": draw.choice(("none", "selective"))},
        "device": {"name": draw.choice(("h200", "h100-sxm")), "host_bytes_per_second": 10**9, "efficiency_percent": {"host": 100}},
        "host": {"cuda_graphs": "none"},
    }
    document["model"] |= {OF_LETTER[letter]: SECTIONS[OF_LETTER[letter]] for letter in sorted(set(pattern))}
    own = draw.sample(sorted(set(pattern)), draw.randint(1, len(set(pattern))))
    document["host"] |= {"activation_offload": own if letters is None else letters}
    return megaplan.load(document).spec


def kept_bytes(spec: Spec, index: int, block: Block) -> int:
    """The tensors that the ledger lists, and the input, which a norm keeps."""
    stream = spec.batch.seq_length // spec.mesh.tp * spec.model.hidden_size * spec.precision.activations.bytes
    return stream + sum(tensor.bytes for tensor in block_ledger(spec, f"layers.{index}", block).saved)


@pytest.mark.parametrize("seed", range(12))
def test_layers_wait_for_what_the_next_one_does_not_hide(seed: int) -> None:
    """Over a link of a byte in a nanosecond, in the sums of a step, its layers' times and its terms."""
    spec, bare = drawn(seed), drawn(seed, [])
    inventory, timer = build_inventory(spec), ReplayTimer(build_inventory(spec), spec)
    plain, waits = model_times(bare, inventory).layers, 0
    for index, block in enumerate(inventory.layers[:-1]):
        if block.family in spec.host.activation_offload:
            copy_ns, after = kept_bytes(spec, index, block), plain[index + 1]
            waits += max(0, copy_ns - after.forward_ns) + max(0, copy_ns - after.backward_ns)
    assert timer.sums(spec).total - ReplayTimer(inventory, bare).sums(bare).total == waits > 0
    assert sum(each.total_ns for each in timer.times(spec).layers) == sum(each.total_ns for each in plain) + waits
    assert timer.times(spec).layers == model_times(spec, inventory).layers
    layers, slots = spec.model.num_layers, spec.mesh.pp
    spans = [(layers * slot // slots, layers * (slot + 1) // slots) for slot in range(slots)]
    terms = timer.terms(spec, spans)
    assert sum(terms.values()) == pytest.approx(timer.step_ns(spec, spans), abs=len(terms))
    assert terms["exposed transfers"] >= spec.schedule.num_microbatches * waits // slots


def test_an_estimate_waits_for_a_slow_link_and_not_for_a_fast_one() -> None:
    def step(*overrides: str) -> float:
        found = megaplan.estimate("plans/tiny-hybrid.yaml", "host.cuda_graphs=none", "batch.seq_length=4096", *overrides).step_time
        assert not isinstance(found, str)
        return found.seconds

    offloads = "host.activation_offload=[A, D, E, M, R]"
    assert step(offloads, "device.host_bytes_per_second=1000000000") > 2 * step()
    assert step(offloads, "device.host_bytes_per_second=100000000000000") == step()
