"""Totals to the unit: the flagship block by block, and public models against their published totals."""

from pathlib import Path

import pytest
import yaml

from megaplan.inventory.build import build_inventory
from megaplan.inventory.tensors import Inventory
from megaplan.spec.models import Spec

HERE = Path(__file__).parent
PLANS = HERE.parents[2] / "plans"
PUBLIC = yaml.safe_load((HERE / "public_models.yaml").read_text())


def plan_spec(name: str) -> Spec:
    return Spec.model_validate(yaml.safe_load((PLANS / f"{name}.yaml").read_text()))


def model_spec(model: dict[str, object]) -> Spec:
    return Spec.model_validate(
        {"format": "megaplan.spec/1", "name": "m", "model": model, "batch": {"micro_batch_size": 1, "seq_length": 16}}
    )


@pytest.fixture(scope="module")
def nam56r() -> Inventory:
    return build_inventory(plan_spec("nam56r-8xh200"))


@pytest.mark.requirement("R-4")
def test_nam56r_totals(nam56r: Inventory) -> None:
    """The flagship's total, active and stack parameters are the published ones."""
    assert nam56r.parameters == 4_726_404_962
    assert nam56r.active_parameters == 3_030_857_570
    assert sum(block.elements for block in nam56r.layers) == 3_958_612_928
    assert len(nam56r.layers) == 52


BLOCKS = {
    "layers.0": 7_401_088,
    "layers.4": 7_401_088 + 290_944,
    "layers.1": 110_161_408,
    "layers.2": 107_954_144,
    "layers.11": 8_206_360,
    "embedding": 234_881_024,
    "head": 234_881_024,
    "ngram": 128_899_296,
    "structure": 230_978,
    "mtp.0": 168_896_128,
    "final_norm": 3_584,
}


@pytest.mark.parametrize(("name", "parameters"), BLOCKS.items())
def test_nam56r_block(nam56r: Inventory, name: str, parameters: int) -> None:
    assert nam56r.block(name).elements == parameters


@pytest.mark.requirement("R-15")
def test_the_indexer_is_on_the_named_global_layers(nam56r: Inventory) -> None:
    """Layers are counted from 0 over the whole model: nine of the 13 A layers have an indexer."""
    with_indexer = [i for i, block in enumerate(nam56r.layers) if any(t.name.startswith("indexer.") for t in block.tensors)]
    assert with_indexer == [4, 8, 12, 20, 24, 28, 36, 40, 44]


@pytest.mark.parametrize("name", PUBLIC)
def test_public_model_total(name: str) -> None:
    total, model = PUBLIC[name]
    assert build_inventory(model_spec(model)).parameters == total


def test_mixtral_active_parameters() -> None:
    assert build_inventory(plan_spec("mixtral-8x7b")).active_parameters == 12_879_925_248


def test_dense_models_are_wholly_active() -> None:
    inventory = build_inventory(plan_spec("llama-3.1-8b"))
    assert inventory.active_parameters == inventory.parameters


def test_a_tied_head_counts_once() -> None:
    """Tying removes exactly one vocab × hidden matrix and the head block."""
    model = PUBLIC["Llama-3.2-1B"][1]
    tied, untied = build_inventory(model_spec(model)), build_inventory(model_spec({**model, "tie_embeddings": False}))
    assert untied.parameters - tied.parameters == 128_256 * 2048
    assert (tied.tied, untied.tied) == (True, False)
    assert "head" not in dict(tied.outside)


@pytest.mark.requirement("R-4")
def test_the_name_is_not_the_architecture() -> None:
    """Two names, one model; another depth under the same pattern, another model."""
    spec = plan_spec("nam56r-8xh200")
    assert build_inventory(spec) == build_inventory(spec.model_copy(update={"name": "other"}))
    deeper = spec.model.model_copy(update={"num_layers": 53})
    assert build_inventory(spec.model_copy(update={"model": deeper})).parameters == 4_726_404_962 + 7_401_088  # layer 52 is an A


FEATURES: dict[str, tuple[dict[str, int], int]] = {
    "ngram": ({"num_tables": 2, "num_rows": 100, "dim": 4}, 100 * 4 + 64 * 8),
    "structure": ({"num_categories": 7, "bottleneck": 8}, 7 * 8 + 64 * 8 + 2),
    "platform": ({"num_categories": 5, "bottleneck": 8}, 5 * 8 + 64 * 8 + 2),
    "relation_bias": ({"num_relations": 9}, 9 * 4),
    "mtp": ({"depth": 2, "ffn_hidden_size": 96}, 2 * (64 + 64 * (64 + 2 * 32 + 64) + 64 + 2 * 64 * 96 + 2 * 64 * 64 + 3 * 64)),
}


@pytest.mark.requirement("R-6")
@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_is_counted(feature: str) -> None:
    """Each optional feature adds the parameters of its own formula, and nothing else."""
    section, added = FEATURES[feature]
    model = {
        "pattern": "A",
        "num_layers": 2,
        "hidden_size": 64,
        "vocab_size": 32,
        "attention": {"kind": "gqa", "num_heads": 4, "num_kv_heads": 2, "head_dim": 16},
    }
    plain = build_inventory(model_spec(model))
    assert build_inventory(model_spec({**model, "features": {feature: section}})).parameters == plain.parameters + added


@pytest.mark.parametrize("depth", [1, 2])
def test_experts_of_prediction_depths_are_active_as_those_of_layers(depth: int) -> None:
    """A depth with experts is idle in as many of them as a layer; other families have nothing that is idle."""
    moe = {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 32, "activation": "relu2"}
    model = {
        "pattern": "AEM",
        "num_layers": 6,
        "hidden_size": 64,
        "vocab_size": 128,
        "attention": {"kind": "gqa", "num_heads": 4, "num_kv_heads": 4, "head_dim": 16},
        "mamba": {"kind": "mamba2", "head_dim": 16, "state_dim": 16, "num_groups": 1},
        "moe": moe,
        "features": {"mtp": {"depth": depth, "ffn_hidden_size": 32, "experts": True}},
    }
    inventory = build_inventory(model_spec(model))
    idle_of_a_layer = (8 - 2) * 2 * 64 * 32
    assert inventory.parameters - inventory.active_parameters == (2 + depth) * idle_of_a_layer
