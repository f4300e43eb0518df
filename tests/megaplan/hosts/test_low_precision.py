"""Copies in 8 and 4 bits against numbers worked out by hand, and saved and temporary tensors of megarun's blocks under a recipe."""

from typing import Any, get_args

import pytest
from random_plans.choices import Scope
from random_plans.draw import draw

import megaplan
from megaplan.columns import Column
from megaplan.cost.data import shard_traffic
from megaplan.errors import MegaplanError
from megaplan.hosts.megarun.explain import gather_texts, plain_texts
from megaplan.hosts.megarun.ledger import block_ledger, block_variants, layer_calls
from megaplan.hosts.megarun.sizes import storage_sizes
from megaplan.hosts.megarun.storage import block_storage
from megaplan.hosts.values import BlockLedger
from megaplan.inventory.build import build_inventory
from megaplan.layout.step_time import planned_time
from megaplan.low_precision import GENERATIONS, Recipe, RecipeName, history_bytes
from megaplan.spec.local import BANKS, delayed_weights, packed_gather
from megaplan.spec.models import Spec

B, T, H, HEADS, KV, D, F = 2, 128, 256, 4, 2, 64, 512
ROWS, ELEMENTS = B * T, B * T * H
GQA = {"kind": "gqa", "num_heads": HEADS, "num_kv_heads": KV, "head_dim": D}


def spec_of(recipe: dict[str, Any] | None = None, **more: Any) -> Spec:
    model = {"pattern": "AD", "num_layers": 4, "hidden_size": H, "vocab_size": 512, "attention": GQA, "mlp": {"ffn_hidden_size": F}}
    values = {"format": "megaplan.spec/1", "name": "t", "model": model, "batch": {"micro_batch_size": B, "seq_length": T}, **more}
    return Spec.model_validate(values | ({"precision": {"recipe": recipe}} if recipe else {}))


def ledger_of(spec: Spec, layer: int) -> BlockLedger:
    inventory = build_inventory(spec)
    return block_ledger(spec, f"layers.{layer}", inventory.block(f"layers.{layer}"))


def saved(spec: Spec, layer: int) -> dict[str, int]:
    return {tensor.name: tensor.bytes for tensor in ledger_of(spec, layer).saved}


@pytest.mark.parametrize(
    ("recipe", "both", "column"),
    [
        (Recipe("fp8_current", "hopper"), 2 * 384 * 1024 + 8, 384 * 1024 + 4),
        (Recipe("fp8_current", "blackwell"), 384 * 1024 + 4, 384 * 1024 + 4),
        (Recipe("fp8_rowwise", "hopper"), 2 * 384 * 1024 + 4 * (384 + 1024), 384 * 1024 + 4 * 1024),
        (Recipe("fp8_blockwise", "hopper"), 2 * 384 * 1024 + 4 * (8 * 384 + 3 * 1024), 384 * 1024 + 4 * 3 * 1024),
        (Recipe("mxfp8", "blackwell"), 2 * 384 * 1024 + 2 * 384 * 32, 384 * 1024 + 384 * 32),
        (Recipe("nvfp4", "blackwell"), 384 * 1024 + 2 * (384 * 64 + 4), 384 * 512 + 384 * 64 + 4),
    ],
    ids=lambda value: f"{value.name}-{value.generation}" if isinstance(value, Recipe) else "",
)
def test_a_matrix_has_elements_and_scales(recipe: Recipe, both: int, column: int) -> None:
    assert (recipe.both_bytes(384, 1024), recipe.columnwise_bytes(384, 1024)) == (both, column)


def test_scales_are_padded_as_the_products_read_them() -> None:
    assert Recipe("mxfp8", "blackwell").rowwise_bytes(130, 160) == 130 * 160 + 256 * 8
    assert Recipe("nvfp4", "blackwell").columnwise_bytes(130, 160) == 65 * 160 + 256 * 12 + 4
    assert Recipe("fp8_blockwise", "hopper").rowwise_bytes(130, 200) == 130 * 200 + 4 * 2 * 132
    assert Recipe("fp8_blockwise", "hopper").rowwise_bytes(130, 200, weight=True) == 130 * 200 + 4 * 2 * 4


def test_delayed_scaling_remembers_the_maxima_of_five_roles() -> None:
    assert history_bytes(1024) == 4 * 5 * 1024 + 4 * 5


def test_numbers_of_delayed_scaling_are_a_histories_length_for_each_operand() -> None:
    """Four weights of attention and three of the MLP have them, in each of two layers, and a head: on each rank of a data group."""
    for head, weights in ((False, 14), (True, 15)):
        given = {"name": "fp8_delayed", "amax_history": 16, "head": head}
        delayed, current = (
            megaplan.estimate(spec_of(each, mesh={"dp_shard": 2}).as_document()) for each in (given, {"name": "fp8_current", "head": head})
        )
        more = delayed.columns[Column.ACTIVATIONS] - current.columns[Column.ACTIVATIONS]
        assert more == 3 * weights * 4 * (16 + 3)


def test_every_product_of_a_layer_has_numbers() -> None:
    """The weights that the plan counts are those that the runtime's calls multiply by, in every family."""
    found = set[str]()
    for seed in range(300):
        document = draw(seed, Scope.RUNTIME)
        document.setdefault("precision", {})["recipe"] = {"name": "fp8_delayed"}
        document.get("device", {}).pop("name", None)
        document.pop("lora", None)
        if "linear_attention" in document["model"] and seed % 3 == 0:
            document["model"]["linear_attention"] = {"kind": "mlstm", "num_heads": 16, "key_dim": 16, "value_dim": 16}
        try:
            loaded = megaplan.load(document)
        except MegaplanError:
            continue
        spec, inventory = loaded.spec, loaded.inventory
        for index, block in enumerate(inventory.layers):
            found.add(block.family)
            called = {weight for call in layer_calls(spec, inventory, index) for weight in call.weights}
            banks = {name for name, *_ in block.tensors if name in BANKS}
            assert {*delayed_weights(spec, inventory, f"layers.{index}")} == called | banks
    assert found >= {*"ACDEGMR"}


def test_a_dense_block_saves_its_activation_in_eight_bits_and_its_products_in_sixteen() -> None:
    wide, narrow = saved(spec_of(), 1), saved(spec_of({"name": "fp8_blockwise"}), 1)
    assert (narrow["down_proj.low"], narrow["down_proj.low_scales"]) == (ROWS * F, 4 * (ROWS // 128) * F)
    assert (narrow["gate"], narrow["up"]) == (wide["gate"], wide["up"]) == (2 * ROWS * F, 2 * ROWS * F)


@pytest.mark.parametrize(("name", "scales"), [("fp8_current", 1), ("fp8_rowwise", H)])
def test_linears_that_megarun_runs_keep_copies_with_their_scales_apart(name: str, scales: int) -> None:
    attention, dense = saved(spec_of({"name": name}), 0), saved(spec_of({"name": name}), 1)
    assert (attention["q_proj.low"], attention["q_proj.low_scales"]) == (ELEMENTS, 4 * scales)
    assert not {"normed", "k_proj.low", "o_proj.low"} & set(attention)
    assert attention["attention"] == 2 * B * T * HEADS * D
    assert dense["down_proj.low"] == ROWS * F
    assert dense["down_proj.low_scales"] == 4 * (1 if scales == 1 else F)
    assert not {"normed", "activation"} & set(dense)


def test_attention_in_eight_bits_keeps_its_operands_and_not_its_output() -> None:
    """The output projection keeps the copy of the output then, which attention keeps in 16 bits otherwise."""
    narrow = saved(spec_of({"name": "fp8_current", "attention": True}), 0)
    assert [narrow[f"attention.{name}_low"] for name in "qkv"] == [ROWS * HEADS * D, ROWS * KV * D, ROWS * KV * D]
    assert (narrow["attention.scales"], narrow["lse"]) == (4 * 3, 4 * ROWS * HEADS)
    assert (narrow["o_proj.low"], narrow["o_proj.low_scales"]) == (ROWS * HEADS * D, 4)
    assert not {"q", "k", "v", "attention"} & set(narrow)
    assert planned_time(spec_of({"name": "fp8_current", "attention": True}), [(0, 4)]) == (
        "attention's products of eight-bit operands are emulated in fp32"
    )


def test_a_column_parallel_linear_keeps_its_own_tokens_with_the_scales_of_all() -> None:
    narrow = saved(spec_of({"name": "fp8_rowwise"}, mesh={"tp": 2}), 0)
    assert (narrow["q_proj.low"], narrow["q_proj.low_scales"]) == (ELEMENTS // 2, 4 * H)


def test_an_input_that_two_calls_read_is_kept_once_in_sixteen_bits() -> None:
    """Two copies would be as large, with two sets of scales."""
    latent = {
        "kind": "mla",
        "num_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
    }
    document = spec_of({"name": "fp8_current"}).as_document()
    document["model"]["attention"] = latent
    narrow = saved(Spec.model_validate(document), 0)
    assert narrow["normed"] == 2 * ELEMENTS
    assert {name for name in narrow if name.endswith(".low")} == {"kv_up.low"}


def test_what_a_product_holds_inside_is_workspace() -> None:
    """In backward of a row-parallel linear: the input's transpose and the gradient's, and nothing of the weight."""
    ledger = ledger_of(spec_of({"name": "fp8_current"}), 1)
    inside = {tensor.name: tensor for tensor in ledger.backward_live if ".in_" in tensor.name}
    (name,) = inside
    assert name in ("gate_proj.in_weight_gradients", "down_proj.in_weight_gradients")
    assert inside[name].column is Column.WORKSPACE


@pytest.mark.parametrize(
    ("recipe", "covered"),
    [
        ({"name": "fp8_current", "first_last_bf16": (1, 1)}, [False, True, True, False]),
        ({"name": "fp8_current", "families": ("D",)}, [False, True, False, True]),
    ],
)
def test_layers_that_a_recipe_leaves_out_keep_sixteen_bits(recipe: dict[str, Any], covered: list[bool]) -> None:
    spec = spec_of(recipe)
    assert [any(name.endswith(".low") for name in saved(spec, layer)) for layer in range(4)] == covered
    made = block_variants(spec, build_inventory(spec))
    assert len({made[f"layers.{layer}"] for layer in range(4)}) == (4 if "families" not in recipe else 2)


def test_gathered_weights_of_a_recipe_are_of_one_byte() -> None:
    plain, kept, gathered = (
        megaplan.estimate(spec_of(recipe, mesh={"dp_shard": 2}).as_document()).columns[Column.COMMUNICATION]
        for recipe in (None, {"name": "fp8_current"}, {"name": "fp8_current", "param_gather": True})
    )
    assert plain == kept > gathered


def test_weights_whose_shards_cut_a_block_are_gathered_as_they_are() -> None:
    """And layers that keep 16 bits; one gather brings the elements of both products where one serves both."""
    b200, reshard = {"name": "b200"}, {"reshard_after_forward": True}

    def gathered(name: str, degree: int, *, reshard_after_forward: bool = True, **recipe: Any) -> int:
        sharding = {**reshard, "reshard_after_forward": reshard_after_forward}
        given = {"name": name, "param_gather": True, **recipe}
        spec = spec_of(given, mesh={"dp_shard": degree}, sharding=sharding, device=b200)
        sizes, block = storage_sizes(spec), build_inventory(spec).layers[1]
        assert sizes.packs is not None
        return block_storage(sizes, block, packed=sizes.packs.covers("layers.1", block.family)).dense.gathered_bytes

    whole = storage_sizes(spec_of(mesh={"dp_shard": 2}))
    wide = block_storage(whole, build_inventory(spec_of()).layers[1]).dense.gathered_bytes
    weights = wide - 2 * 256  # all except the norm
    assert gathered("fp8_current", 2) == gathered("fp8_delayed", 2) == weights // 2 + 2 * 256
    scales = 4 * (2 * F + H)  # of each row of gate, up and down
    assert gathered("fp8_rowwise", 2) == weights // 2 + scales + 2 * 256
    assert gathered("fp8_rowwise", 2, reshard_after_forward=False) == weights + 2 * scales + 2 * 256
    assert gathered("mxfp8", 2) == weights // 2 * 33 // 32 + 2 * 256
    assert gathered("mxfp8", 2, reshard_after_forward=False) == weights * 33 // 32 + 2 * 256
    assert [gathered("fp8_blockwise", degree) for degree in (2, 32)] == [weights // 2 + 2 * 256] * 2
    assert gathered("nvfp4", 2) == weights * 9 // 32 + 2 * 256
    assert gathered("nvfp4", 2, first_last_bf16=(2, 0)) == wide
    assert gathered("mxfp8", 32) == wide  # shards of 16 and 8 rows
    assert gathered("nvfp4", 32) == wide - (gates := 2 * weights // 3) + gates * 9 // 32


def test_banks_are_packed_as_the_rows_of_all_their_matrices() -> None:
    """Bytes by hand: a rank's 4 of 8 experts with gate, up and down of 64 × 256, gathered over the two ranks that share them."""
    moe = {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 64}
    model = {"pattern": "E", "num_layers": 2, "hidden_size": H, "vocab_size": 512, "moe": moe}
    elements = 3 * 4 * 64 * H
    for name, expected, maxima in (
        ("fp8_current", elements, 3 * 4),
        ("fp8_delayed", elements, 0),
        ("fp8_rowwise", elements + 4 * 4 * (2 * 64 + H), 4 * 4 * (2 * H + 64)),
        ("mxfp8", elements * 33 // 32, 0),
        ("nvfp4", elements * 9 // 16, 3 * 4 * 4),
        ("fp8_blockwise", elements, 3 * 4 * 4 * 2),  # two blocks per matrix
    ):
        given = {"name": name, "param_gather": True}
        spec = spec_of(given, model=model, mesh={"dp_shard": 4, "ep": 2}, sharding={"reshard_after_forward": True}, device={"name": "b200"})
        stored = block_storage(storage_sizes(spec), build_inventory(spec).layers[0], packed=True)
        assert (stored.experts.gathered_bytes, stored.maxima_bytes) == (expected, maxima)
        plain = spec_of(
            {"name": name}, model=model, mesh=spec.mesh.model_dump(), sharding={"reshard_after_forward": True}, device={"name": "b200"}
        )
        (_, gathered), (_, whole) = (shard_traffic(each, build_inventory(each)) for each in (spec, plain))
        assert whole - gathered == 2 * 2 * 2 * (2 * elements - expected)  # two layers, of two expert ranks, for forward and backward


def test_explain_lists_what_is_packed_and_why_the_rest_is_not() -> None:
    given = {"name": "nvfp4", "param_gather": True, "first_last_bf16": (1, 0)}
    spec = spec_of(given, mesh={"dp_shard": 32}, sharding={"reshard_after_forward": True}, device={"name": "b200"})
    packs, inventory = packed_gather(spec), build_inventory(spec)
    assert packs is not None
    packed, *whole = gather_texts(spec, inventory)
    for letter in {block.family for block in inventory.layers[1:]}:
        block = next(each for each in inventory.layers[1:] if each.family == letter)
        for tensor in block.tensors:
            fits = packs.shard_bytes(letter, tensor.name, tensor.shape) is not None
            assert (f"{letter} {tensor.name} (" in packed) == fits
            assert fits or not tensor.name.endswith("proj.weight") or any(f"{letter} {tensor.name} (" in line for line in whole)
    assert any("first_last_bf16" in line for line in whole)
    assert gather_texts(spec_of(None, mesh={"dp_shard": 32}), inventory) == []


@pytest.mark.parametrize(("params", "own", "plain"), [("bf16", "fp32", True), ("bf16", "fp16", True), ("fp32", "bf16", False)])
def test_an_own_dtype_that_is_not_bf16_keeps_plain_products(params: str, own: str, plain: bool) -> None:
    precision = {"params": params, "families": {"A": own}, "recipe": {"name": "fp8_current"}}
    spec = spec_of(precision=precision)
    inventory = build_inventory(spec)
    assert [bool(layer_calls(spec, inventory, index)) for index in range(4)] == [not plain, True] * 2
    assert plain_texts(spec, inventory) == ([f"A: products in {own}, as without a recipe"] if plain else [])
    assert any(name.endswith(".low") for name in saved(spec, 0)) != plain


@pytest.mark.parametrize(
    ("recipe", "more", "code", "key"),
    [
        ({"name": "mxfp8"}, {}, "MP507", "precision.recipe.name"),
        ({"name": "fp8_current"}, {"device": {"name": "a100-80gb"}}, "MP507", "precision.recipe.name"),
        ({"name": "fp8_current", "families": ("M",)}, {}, "MP721", "precision.recipe.families"),
        ({"name": "fp8_current", "first_last_bf16": (3, 2)}, {}, "MP723", "precision.recipe.first_last_bf16"),
        ({"name": "fp8_delayed", "first_last_bf16": (1, 0)}, {"host": {"name": "megatron"}}, "MP724", "precision.recipe.first_last_bf16"),
        ({"name": "fp8_rowwise", "attention": True}, {}, "MP905", "precision.recipe.attention"),
        ({"name": "fp8_delayed", "attention": True}, {}, "MP905", "precision.recipe.attention"),
        ({"name": "fp8_current", "attention": True}, {"mesh": {"cp": 2}}, "MP905", "precision.recipe.attention"),
    ],
)
def test_what_a_recipe_cannot_be_with_is_refused(recipe: dict[str, Any], more: dict[str, Any], code: str, key: str) -> None:
    with pytest.raises(MegaplanError) as caught:
        megaplan.load(spec_of(recipe, **more).as_document())
    assert [(found.code, found.location.key) for found in caught.value.diagnostics] == [(code, key)]


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"mlp": {"ffn_hidden_size": 520}}, "mlp.ffn_hidden_size / tp = 520"),
        ({"attention": {**GQA, "head_dim": 36}}, "attention.num_kv_heads · head_dim / tp = 72"),
    ],
)
def test_widths_divide_by_what_tensor_cores_read(section: dict[str, Any], said: str) -> None:
    document = spec_of({"name": "fp8_current"}).as_document()
    document["model"] |= section
    with pytest.raises(MegaplanError) as caught:
        megaplan.load(document)
    assert {found.code for found in caught.value.diagnostics} == {"MP508"}
    assert any(said in found.detail for found in caught.value.diagnostics)


def test_every_recipe_is_of_some_generation() -> None:
    assert set(GENERATIONS) == set(get_args(RecipeName))
    assert all(GENERATIONS.values())
