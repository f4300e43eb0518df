"""Owned elements over all ranks, and how the ledger is shared and how fast it is built."""

from math import prod
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from megaplan.inventory.build import build_inventory
from megaplan.inventory.tensors import Owner, ParamTensor
from megaplan.spec.models import Mesh, Spec

PLANS = Path(__file__).parents[3] / "plans"
POWERS = st.sampled_from([1, 2, 4])


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    """Legal specs and meshes: TP divides heads, groups and widths, EP the experts, ETP the expert width."""
    tp, ep, etp = draw(POWERS), draw(POWERS), draw(st.sampled_from([1, 2]))
    ranks = tp * ep * etp
    mesh = {
        "pp": 1,
        "tp": tp,
        "ep": ep,
        "etp": etp,
        "cp": 1,
        "dp_shard": ranks // tp * draw(st.sampled_from([1, 3])),
        "dp_replicate": draw(st.integers(1, 2)),
        "vocab_parallel": draw(st.booleans()),
    }
    times = st.integers(1, 3).map(lambda n: n * tp)
    width = st.integers(1, 24)
    kv_heads = draw(times)
    gqa = {
        "kind": "gqa",
        "num_heads": kv_heads * draw(st.integers(1, 3)),
        "num_kv_heads": kv_heads,
        "head_dim": draw(width),
        "bias": draw(st.booleans()),
        "qk_norm": draw(st.booleans()),
    }
    mla = {
        "kind": "mla",
        "num_heads": draw(times),
        "q_lora_rank": draw(st.none() | width),
        "kv_lora_rank": draw(width),
        "qk_nope_head_dim": draw(width),
        "qk_rope_head_dim": (rotated := draw(width)),
        "v_head_dim": draw(width),
        "indexer": {"num_heads": draw(width), "head_dim": rotated + draw(width), "layers": [0]},
    }
    groups = draw(times)
    hidden = groups * 8
    mamba2 = {
        "kind": "mamba2",
        "num_heads": groups * draw(st.integers(1, 3)),
        "head_dim": draw(width),
        "state_dim": draw(width),
        "num_groups": groups,
        "conv_bias": draw(st.booleans()),
    }
    mamba3 = {"kind": "mamba3", "head_dim": 8, "state_dim": (state := draw(width)), "num_groups": groups}
    mamba3 |= {"mimo_rank": draw(st.integers(1, 3)), "num_angles": draw(st.integers(0, state // 2))}
    activation = st.sampled_from(["swiglu", "relu2", "gelu"])
    model = {
        "pattern": "".join(draw(st.permutations("AMERD"))),
        "num_layers": 5,
        "hidden_size": hidden,
        "vocab_size": tp * draw(width),
        "tie_embeddings": draw(st.booleans()),
        "attention": draw(st.sampled_from([gqa, mla])),
        "mamba": draw(st.sampled_from([mamba2, mamba3])),
        "moe": {
            "num_experts": ep * draw(st.integers(1, 3)),
            "top_k": 1,
            "ffn_hidden_size": etp * draw(width),
            "shared_ffn_hidden_size": draw(st.sampled_from([0, tp])),
            "activation": draw(activation),
        },
        "recurrent": {"kind": "m2rnn", "num_heads": draw(times), "key_dim": draw(width), "value_dim": draw(width)},
        "mlp": {"ffn_hidden_size": draw(times), "activation": draw(activation)},
        "features": {"relation_bias": {"num_relations": 3}, "mtp": {"depth": 1, "ffn_hidden_size": draw(times)}},
    }
    batch = {"micro_batch_size": 1, "seq_length": 8}
    return Spec.model_validate({"format": "megaplan.spec/1", "name": "m", "model": model, "mesh": mesh, "batch": batch})


def shard(length: int, parts: tuple[int, ...], degree: int, index: int) -> list[int]:
    """Positions along the sharded dim that rank `index` of `degree` holds: an equal run of every part."""
    positions, start = [], 0
    for part in parts or (length,):
        run, rest = divmod(part, degree)
        assert rest == 0, f"{degree} does not divide the part {part} of {parts or length}"
        positions += range(start + index * run, start + (index + 1) * run)
        start += part
    assert start == length
    return positions


def held(tensor: ParamTensor, mesh: Mesh, rank: int) -> tuple[list[int], int]:
    """(positions along the first sharded dim, elements) that a rank owns, from its coordinates alone."""
    if tensor.owner is Owner.TENSOR_PARALLEL:
        dim = tensor.tp_dim
        assert dim is not None
        positions = shard(tensor.shape[dim], tensor.tp_parts, mesh.tp, rank % mesh.tp)
        return positions, len(positions) * prod(tensor.shape) // tensor.shape[dim]
    if tensor.owner is Owner.EXPERT_PARALLEL:
        dim = tensor.tp_dim
        assert dim is not None
        experts = shard(tensor.shape[0], (), mesh.ep, rank // mesh.etp % mesh.ep)
        columns = shard(tensor.shape[dim], (), mesh.etp, rank % mesh.etp)
        return experts, len(experts) * len(columns) * prod(tensor.shape) // (tensor.shape[0] * tensor.shape[dim])
    return list(range(tensor.shape[0])), prod(tensor.shape)


@pytest.mark.requirement("R-16", "R-17", "R-40")
@settings(max_examples=60)
@given(specs())
def test_owned_elements_over_ranks_are_family_times_replicas(spec: Spec) -> None:
    """Over all ranks every tensor is held a whole number of times: all ranks, ranks / tp, or ranks / (ep · etp); every row alike."""
    mesh = spec.mesh
    divisor = {Owner.REPLICATED: 1, Owner.TENSOR_PARALLEL: mesh.tp, Owner.EXPERT_PARALLEL: mesh.ep * mesh.etp}
    for name, tensor in build_inventory(spec).tensors():
        copies: dict[int, int] = {}
        total = 0
        for rank in range(mesh.world_size):
            positions, elements = held(tensor, mesh, rank)
            assert elements == tensor.local_elements(mesh.tp, mesh.ep, mesh.etp), name
            total += elements
            for position in positions:
                copies[position] = copies.get(position, 0) + 1
        replicas = mesh.world_size // divisor[tensor.owner]
        assert total == prod(tensor.shape) * replicas, name
        assert len(set(copies.values())) == 1, name


@pytest.mark.requirement("R-16", "R-40")
@settings(max_examples=30)
@given(specs())
def test_expert_parallel_shrinks_banks_only(spec: Spec) -> None:
    """EP as large as the number of experts leaves one of each bank, and leaves every other tensor unsharded; TP never touches a bank."""
    for name, tensor in build_inventory(spec).tensors():
        bank = ".experts." in name
        assert bank == (tensor.owner is Owner.EXPERT_PARALLEL)
        experts = tensor.shape[0] if bank else 2
        assert tensor.local_elements(1, experts, 1) == (tensor.elements // experts if bank else tensor.elements)
        if bank:
            assert tensor.local_elements(2, 1, 1) == tensor.elements


def test_names_are_unique_and_blocks_are_shared() -> None:
    """Full names are unique; 52 layers are five distinct blocks, A with and without indexer apart."""
    inventory = build_inventory(load("nam56r-8xh200"))
    names = [name for name, _ in inventory.tensors()]
    assert len(names) == len(set(names))
    assert len({id(block) for block in inventory.layers}) == 5
    assert inventory.layers[0] is inventory.layers[16]
    assert inventory.layers[0] is not inventory.layers[4]


def test_a_letter_without_its_section_is_named() -> None:
    """A spec that skipped the rules fails with the missing section's key, not with an attribute error."""
    spec = load("llama-3.1-8b")
    unchecked = spec.model_copy(update={"model": spec.model.model_copy(update={"mlp": None})})
    with pytest.raises(ValueError, match=r"model\.mlp"):
        build_inventory(unchecked)


def load(name: str) -> Spec:
    return Spec.model_validate(yaml.safe_load((PLANS / f"{name}.yaml").read_text()))
