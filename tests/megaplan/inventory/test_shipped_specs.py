"""The specs in plans/: they parse, they match their descriptions, and the demo's variants train on the same batch."""

from pathlib import Path

import pytest
import yaml

from megaplan.inventory.build import build_inventory
from megaplan.spec.models import Spec

PLANS = Path(__file__).parents[3] / "plans"
WORLD_SIZES = {"tiny-hybrid": 1, "tiny-hybrid-pp2": 2, "tiny-hybrid-dp2": 2, "llama-3.1-8b-rl": 16}
NAMES = sorted(path.stem for path in PLANS.glob("*.yaml"))


def load(name: str) -> Spec:
    return Spec.model_validate(yaml.safe_load((PLANS / f"{name}.yaml").read_text()))


def tokens_per_step(spec: Spec) -> int:
    sequences = spec.batch.micro_batch_size * spec.schedule.num_microbatches * spec.mesh.dp_replicate * spec.mesh.dp_shard
    return sequences * spec.batch.seq_length


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_spec_is_named_after_its_file(name: str) -> None:
    spec = load(name)
    assert spec.name == name
    assert spec.mesh.world_size == WORLD_SIZES.get(name, 8)


def test_the_demo_has_every_letter_and_is_small() -> None:
    spec = load("tiny-hybrid")
    assert set(spec.model.pattern) == set("AMERD")
    assert 1_000_000 < build_inventory(spec).parameters < 2_000_000


@pytest.mark.parametrize("variant", ["tiny-hybrid-pp2", "tiny-hybrid-dp2"])
def test_the_demo_s_variants_train_the_same_model_on_the_same_batch(variant: str) -> None:
    """Only the mesh, the objective of cuts, and for two data ranks the number of microbatches differ from the one-process demo."""
    base, spec = load("tiny-hybrid"), load(variant)
    assert tokens_per_step(spec) == tokens_per_step(base)
    changed = {key for key, value in spec.as_document().items() if value != base.as_document()[key]}
    assert changed == ({"name", "mesh", "split"} if variant.endswith("pp2") else {"name", "mesh", "schedule"})


def test_the_equal_baseline_differs_in_the_split_only() -> None:
    weighted, equal = load("nam56r-8xh200").as_document(), load("nam56r-8xh200-equal").as_document()
    assert {key for key in weighted if weighted[key] != equal[key]} == {"name", "split"}
    assert equal["split"]["mode"] == "equal"
