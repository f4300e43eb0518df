"""Axes that may shard each tensor, and the optimizer group of each."""

from dataclasses import dataclass

import pytest

from megaplan.inventory.build import build_inventory
from megaplan.inventory.tensors import Block, Group, Init, Outside, Owner, ParamTensor
from megaplan.spec.models import Spec

REPLICATED, TENSOR, EXPERT = Owner.REPLICATED, Owner.TENSOR_PARALLEL, Owner.EXPERT_PARALLEL
MLA = {"kind": "mla", "num_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
GQA = {"kind": "gqa", "num_heads": 8, "num_kv_heads": 4, "head_dim": 8, "bias": True, "qk_norm": True}
MAMBA2 = {"kind": "mamba2", "head_dim": 16, "state_dim": 8, "num_groups": 4}
MAMBA3 = {"kind": "mamba3", "head_dim": 16, "state_dim": 8, "num_groups": 4, "mimo_rank": 2, "num_angles": 3}
SECTIONS: dict[str, object] = {
    "moe": {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 32, "shared_ffn_hidden_size": 16},
    "recurrent": {"kind": "m2rnn", "num_heads": 4, "key_dim": 8, "value_dim": 8},
    "mlp": {"ffn_hidden_size": 48},
}


def make_spec(pattern: str, mesh: dict[str, object] | None = None, **sections: object) -> Spec:
    model = {"pattern": pattern, "num_layers": len(pattern), "hidden_size": 64, "vocab_size": 96, **sections}
    batch = {"micro_batch_size": 1, "seq_length": 16}
    return Spec.model_validate({"format": "megaplan.spec/1", "name": "m", "model": model, "mesh": mesh or {}, "batch": batch})


def layer(letter: str, **sections: object) -> Block:
    return build_inventory(make_spec(letter, **{**SECTIONS, **sections})).layers[0]


@dataclass(frozen=True)
class Row:
    """Expected owner, sharded dim and group of one tensor."""

    owner: Owner
    tp_dim: int | None
    group: Group


def rows(column: str = "", row: str = "", per_head: str = "", fixed_matrix: str = "", fixed: str = "") -> dict[str, Row]:
    table = {name: Row(TENSOR, 0, Group.MATRIX) for name in column.split()}
    table |= {name: Row(TENSOR, 1, Group.MATRIX) for name in row.split()}
    table |= {name: Row(TENSOR, 0, Group.OTHER) for name in per_head.split()}
    table |= {name: Row(REPLICATED, None, Group.MATRIX) for name in fixed_matrix.split()}
    return table | {name: Row(REPLICATED, None, Group.OTHER) for name in fixed.split()}


INDEXED = {**MLA, "indexer": {"num_heads": 2, "head_dim": 8, "layers": [0]}}
BANK_IN, BANK_OUT = Row(EXPERT, 1, Group.MATRIX), Row(EXPERT, 2, Group.MATRIX)
TABLE: dict[str, tuple[Block, dict[str, Row]]] = {
    "gqa": (
        layer("A", attention=GQA),
        rows(
            "q_proj.weight k_proj.weight v_proj.weight",
            "o_proj.weight",
            "q_proj.bias k_proj.bias v_proj.bias",
            "",
            "norm.weight q_norm.weight k_norm.weight",
        ),
    ),
    "mla": (
        layer("A", attention=INDEXED),
        rows(
            "q_up.weight kv_up.weight",
            "o_proj.weight",
            "",
            "q_down.weight kv_down.weight indexer.q_up.weight indexer.k_proj.weight indexer.head_weights.weight",
            "norm.weight q_latent_norm.weight kv_latent_norm.weight indexer.k_norm.weight indexer.k_norm.bias",
        ),
    ),
    "mla without q-LoRA": (
        layer("A", attention={**MLA, "q_lora_rank": None}),
        rows("q_proj.weight kv_up.weight", "o_proj.weight", "", "kv_down.weight", "norm.weight kv_latent_norm.weight"),
    ),
    "moe": (
        layer("E"),
        {
            **rows("shared.gate_proj.weight shared.up_proj.weight", "shared.down_proj.weight", "", "", "norm.weight router.weight"),
            "experts.gate_proj": BANK_IN,
            "experts.up_proj": BANK_IN,
            "experts.down_proj": BANK_OUT,
        },
    ),
    "mamba2": (
        layer("M", mamba=MAMBA2),
        rows(
            "",
            "out_proj.weight",
            "in_proj.weight conv1d.weight conv1d.bias dt_bias A_log D gated_norm.weight",
            "",
            "norm.weight",
        ),
    ),
    "mamba3": (
        layer("M", mamba=MAMBA3),
        rows(
            "",
            "out_proj.weight",
            "in_proj.weight B_bias C_bias mimo_x mimo_z mimo_o D dt_bias",
            "",
            "norm.weight angle_proj.weight B_norm.weight C_norm.weight",
        ),
    ),
    "m2rnn": (
        layer("R"),
        rows(
            "v_proj.weight forget_proj.weight gate_proj.weight",
            "out_proj.weight",
            "conv_v.weight conv_v.bias state_map D dt_bias A_log gated_norm.weight",
            "qk_proj.weight",
            "norm.weight conv_qk.weight conv_qk.bias",
        ),
    ),
    "mlp": (layer("D"), rows("gate_proj.weight up_proj.weight", "down_proj.weight", "", "", "norm.weight")),
    "ungated mlp": (
        layer("D", mlp={"ffn_hidden_size": 48, "activation": "relu2"}),
        rows("up_proj.weight", "down_proj.weight", "", "", "norm.weight"),
    ),
}


@pytest.mark.requirement("R-5", "R-16", "R-17", "R-39", "R-60")
@pytest.mark.parametrize("kind", TABLE)
def test_owner_and_group_of_every_tensor(kind: str) -> None:
    """Each family's tensors have exactly the owner, sharded dim and optimizer group of the table; none is missing, none is new."""
    block, expected = TABLE[kind]
    assert {t.name: Row(t.owner, t.tp_dim, t.group) for t in block.tensors} == expected


@pytest.mark.requirement("R-60")
@pytest.mark.parametrize(
    ("kind", "matrices"),
    [
        ("gqa", {"q_proj.weight": 4, "k_proj.weight": 4, "v_proj.weight": 4, "o_proj.weight": 1}),
        ("mla", {"q_down.weight": 1, "q_up.weight": 1, "kv_down.weight": 1, "kv_up.weight": 1, "o_proj.weight": 1}),
        ("moe", {"experts.gate_proj": 8, "experts.up_proj": 8, "experts.down_proj": 8, "shared.up_proj.weight": 1}),
        ("m2rnn", {"qk_proj.weight": 2, "v_proj.weight": 1, "out_proj.weight": 1}),
    ],
)
def test_matrices_that_muon_treats_alone(kind: str, matrices: dict[str, int]) -> None:
    """QKV by kv-head group, banks by expert, MLA's matrices whole; every group has whole rows."""
    by_name = {t.name: t for t in TABLE[kind][0].tensors}
    assert {name: by_name[name].num_matrices for name in matrices} == matrices
    assert all(tensor.shape[0] % tensor.num_matrices == 0 for tensor in by_name.values())


@pytest.mark.parametrize("kind", TABLE)
def test_init_follows_the_role(kind: str) -> None:
    """Norm scales start at one, biases of projections at zero, what MIMO ranks sum at one over their number, and only projections back
    into the residual are scaled by depth.
    """
    for tensor in TABLE[kind][0].tensors:
        last = tensor.name.removesuffix(".weight").rsplit(".", 1)[-1]
        if last.endswith("norm") or last in {"B_bias", "C_bias", "D", "mimo_z"}:
            assert tensor.init is Init.ONES, tensor.name
        elif last in {"mimo_x", "mimo_o"}:
            assert tensor.init is Init.RANK_MEAN, tensor.name
        elif tensor.name.endswith(".bias"):
            assert tensor.init is Init.ZEROS, tensor.name
        elif last in {"dt_bias", "A_log"}:
            assert tensor.init.value == last.lower(), tensor.name
        elif last.startswith("conv"):
            assert tensor.init is Init.CONV, tensor.name
        else:
            out = last in {"o_proj", "out_proj", "down_proj"}
            assert tensor.init is (Init.NORMAL_OUT if out else Init.NORMAL), tensor.name


ALL_FEATURES = {
    "ngram": {"num_tables": 2, "num_rows": 30, "dim": 4},
    "structure": {"num_categories": 5, "bottleneck": 4},
    "platform": {"num_categories": 3, "bottleneck": 4},
    "relation_bias": {"num_relations": 6},
    "mtp": {"depth": 2, "ffn_hidden_size": 32},
}


@pytest.mark.requirement("R-16", "R-60")
@pytest.mark.parametrize("vocab_parallel", [False, True])
def test_tensors_outside_the_stack(vocab_parallel: bool) -> None:
    """Embeddings, their projections and the head are AdamW's and replicated; only `vocab_parallel` shards the vocabulary's two."""
    spec = make_spec("A", {"vocab_parallel": vocab_parallel}, attention=GQA, features=ALL_FEATURES)
    inventory = build_inventory(spec)
    names = "embedding ngram structure platform relation_bias final_norm head mtp.0 mtp.1"
    assert [name for name, _ in inventory.outside] == names.split()
    assert inventory.block("mtp.0") is inventory.block("mtp.1")
    for name, block in inventory.outside:
        for tensor in block.tensors:
            if block.family in {Outside.EMBEDDING, Outside.HEAD}:
                assert (tensor.owner, tensor.tp_dim) == ((TENSOR, 0) if vocab_parallel else (REPLICATED, None))
            elif block.family is Outside.RELATION_BIAS:
                assert (tensor.owner, tensor.tp_dim) == (TENSOR, 1)  # one column a head
            elif block.family is not Outside.MTP:
                assert tensor.owner is REPLICATED, name
            if block.family is not Outside.MTP:
                assert tensor.group is Group.OTHER, name


@pytest.mark.requirement("R-60")
def test_an_mtp_depth_is_an_a_block_an_mlp_and_a_projection() -> None:
    """The depth's A block has the layers' rules without the indexer; its projection is Muon's; its norms are AdamW's."""
    spec = make_spec("A", attention=INDEXED, features={"mtp": {"depth": 1, "ffn_hidden_size": 32}})
    inventory = build_inventory(spec)
    depth = {t.name: t for t in inventory.block("mtp.0").tensors}
    of_layer = {f"attention.{t.name}": t for t in inventory.layers[0].tensors if not t.name.startswith("indexer.")}

    def facts(tensor: ParamTensor) -> tuple[object, ...]:
        return tensor.shape, tensor.owner, tensor.tp_dim, tensor.group, tensor.init, tensor.num_matrices

    assert {name: facts(depth[name]) for name in of_layer} == {name: facts(tensor) for name, tensor in of_layer.items()}
    rest = {name: (depth[name].shape, depth[name].group) for name in depth if name not in of_layer}
    assert rest == {
        "mlp.norm.weight": ((64,), Group.OTHER),
        "mlp.up_proj.weight": ((32, 64), Group.MATRIX),
        "mlp.down_proj.weight": ((64, 32), Group.MATRIX),
        "proj.weight": ((64, 128), Group.MATRIX),
        "hidden_norm.weight": ((64,), Group.OTHER),
        "embedding_norm.weight": ((64,), Group.OTHER),
        "output_norm.weight": ((64,), Group.OTHER),
    }


def test_mamba3_of_rank_one_has_no_mimo_projections() -> None:
    """The single-input form has neither mimo_x, mimo_z nor mimo_o; without angles there is no angle projection."""
    names = {t.name for t in layer("M", mamba={**MAMBA3, "mimo_rank": 1, "num_angles": 0}).tensors}
    assert not {"mimo_x", "mimo_z", "mimo_o", "angle_proj.weight"} & names
    assert {"B_bias", "C_bias", "in_proj.weight"} <= names


@pytest.mark.requirement("R-17")
def test_mamba3_shards_each_mimo_rank_s_b_and_c_on_its_own() -> None:
    """in_proj rows are z, x, one B per rank, one C per rank, dt, A, trapezoid gate: a cut across ranks would mix their groups."""
    projection = next(t for t in TABLE["mamba3"][0].tensors if t.name == "in_proj.weight")
    assert projection.tp_parts == (128, 128, 32, 32, 32, 32, 8, 8, 8)
    assert projection.shape == (sum(projection.tp_parts), 64)


def test_mamba2_takes_its_own_head_count_and_conv_bias() -> None:
    """`num_heads` overrides expand; `conv_bias: false` removes the bias."""
    tensors = {t.name: t for t in layer("M", mamba={**MAMBA2, "num_heads": 12, "conv_bias": False}).tensors}
    assert tensors["in_proj.weight"].shape == (2 * 192 + 2 * 32 + 12, 64)
    assert tensors["in_proj.weight"].tp_parts == (192, 192, 32, 32, 12)
    assert tensors["conv1d.weight"].shape == (192 + 64, 4)
    assert "conv1d.bias" not in tensors
