"""`--set`: its changes, the positions of its findings, and its refusals."""

import re
import shlex
from random import Random

import pytest
from spec_samples import SAMPLE, Accepted, Refused

from megaplan.errors import Diagnostic, MegaplanError
from megaplan.spec import other_names
from megaplan.spec.fields import all_keys
from megaplan.spec.load import load_spec_text
from megaplan.spec.models import Spec


def test_values_are_read_as_yaml(accepted: Accepted) -> None:
    overrides = (
        "mesh.pp=1", "training.learning_rate=3e-4", "split.pin=[]", "model.attention.window_size=64", "name=other", "serving=null",
        "model.features.mtp={depth: 1, ffn_hidden_size: 128}", "recompute.blocks.A=selective",
    )  # fmt: skip
    spec = accepted(overrides=overrides).spec
    assert (spec.mesh.pp, spec.training.learning_rate, spec.name, spec.serving) == (1, 3e-4, "other", None)
    assert spec.model.features.mtp is not None
    assert spec.model.features.mtp.depth == 1
    assert spec.model.attention is not None
    assert spec.model.attention.window_size == 64
    assert spec.recompute.blocks == {"A": "selective"}


def test_an_aliased_section_changes_at_one_place_only(accepted: Accepted) -> None:
    edits = [("  mlp: {ffn", "  features: {structure: &s {num_categories: 5, bottleneck: 8}, platform: *s}\n  mlp: {ffn")]
    features = accepted(*edits, overrides=["model.features.structure.bottleneck=16"]).spec.model.features
    assert features.structure is not None
    assert features.platform is not None
    assert (features.structure.bottleneck, features.platform.bottleneck) == (16, 8)


def test_a_finding_points_at_the_argument(refused: Refused) -> None:
    found = refused(overrides=["mesh.ep=6", "mesh.dp_shard=6", "mesh.pp=1"])[0]
    assert (found.code, found.location.file, found.location.line, found.location.key) == ("MP203", "--set mesh.ep=6", None, "mesh.ep")


def test_a_type_error_below_an_overridden_section_points_at_it(refused: Refused) -> None:
    (found,) = refused(overrides=["mesh={tp: x}"])
    assert (found.code, found.location.file, found.location.key) == ("MP124", "--set mesh={tp: x}", "mesh.tp")


@pytest.mark.parametrize(
    ("argument", "code", "detail", "hint"),
    [
        ("mesh.tp", "MP140", "'mesh.tp' is not KEY=VALUE", "--set mesh.tp=8"),
        ("=8", "MP140", "'=8' is not KEY=VALUE", "--set mesh.tp=8"),
        ("split.spans[0]=1", "MP140", "is not KEY=VALUE", "--set mesh.tp=8"),
        ("model.attention={indexer: {loss_coefficient: 0.1}}", "MP122", "attention has no key kind", "--set model.attention.kind=mla"),
        ("mesh.tpp=8", "MP141", "'tpp' is not a key of mesh; its keys are pp, vpp,", "--set mesh.tp=8"),
        ("tp=8", "MP141", "'tp' is not a key of a spec", "--set mesh.tp=8"),
        ("lr=1e-4", "MP141", "'lr' is not a key of a spec", "--set training.learning_rate=1e-4"),
        ("gpus=8", "MP141", "'gpus' is not a key of a spec", "--gpus 8"),
        ("seq=8192", "MP141", "'seq' is not a key of a spec", "--set batch.seq_length=8192"),
        ("optimizer.matrix=AdamW", "MP123", "'AdamW'", "--set optimizer.matrix=adamw"),
        ("mesh.tp.x=8", "MP141", "'x' is not a key of mesh.tp", None),
        ("model.attention.kv_lora_rank=8", "MP141", "is not a key of model.attention", "kv_lora_rank is a key of kind mla"),
        ("recompute.blocks.Z=full", "MP141", "its keys are A, M, E, R, D, G and C", None),
        ("mesh.tp=", "MP142", "mesh.tp has no value after '='", "--set mesh.tp=null"),
        ("mesh.tp=[1", "MP142", "'[1': did not find expected ',' or ']'", None),
        ("mesh.tp=!!int 4", "MP142", "has the tag", None),
        ("mesh.tp=1\x07", "MP142", "U+0007", None),
        ("mesh.tp=eight", "MP124", "mesh.tp = 'eight' (text)", None),
    ],
)
def test_a_wrong_argument(refused: Refused, argument: str, code: str, detail: str, hint: str | None) -> None:
    (found,) = refused(overrides=[argument])
    assert found.code == code
    assert found.location.file is not None
    assert found.location.file.startswith("--set ")
    assert detail in found.detail
    assert hint is None or hint in found.hints


SECTIONS = ("", "mesh.", "device.", "batch.", "model.", "model.moe.", "training.", "host.", "precision.")
NAMES = (
    "memory",
    "vram",
    "efficiency",
    "network",
    "lr",
    "seq",
    "dp",
    "heads",
    "experts",
    "dropout",
    "bandwidth",
    "steps",
    "node",
    "kernel",
)


WRONG_TYPES = {"MP123", "MP124", "MP125", "MP126", "MP127", "MP128", "MP130", "MP141"}


def refusals(override: str) -> list[Diagnostic]:
    """Faults of an override."""
    try:
        load_spec_text(SAMPLE, "sample.yaml", [override])
    except MegaplanError as error:
        return list(error.diagnostics)
    return []


@pytest.mark.parametrize("value", ["80GB", "8", "0.5", "true", "half", "null", "[1, 2]"])
def test_a_hint_for_an_unknown_key_is_a_key_that_takes_the_value(value: str) -> None:
    """A pasted hint is neither another unknown key nor a value of the wrong type."""
    unknown = [found for section in SECTIONS for name in NAMES for found in refusals(f"{section}{name}={value}") if found.code == "MP141"]
    assert len(unknown) > 100
    for hint in {hint for found in unknown for hint in found.hints if hint.startswith("--set ")}:
        (override,) = shlex.split(hint)[1:]
        assert not WRONG_TYPES & {found.code for found in refusals(override)}, hint


@pytest.mark.parametrize("key", ["device.memory", "device.vram", "device.hbm", "memory", "device.capacity"])
@pytest.mark.parametrize(("size", "num_bytes"), [("80GB", 80_000_000_000), ("40 GiB", 40 * 2**30)])
def test_a_size_of_memory_is_the_devices_capacity_in_bytes(
    refused: Refused, accepted: Accepted, key: str, size: str, num_bytes: int
) -> None:
    (found,) = refused(overrides=[f"{key}={size}"])
    assert found.hints[0] == f"--set device.capacity={num_bytes}"
    assert accepted(overrides=[found.hints[0].removeprefix("--set ")]).spec.device.capacity == num_bytes


@pytest.mark.parametrize(
    ("given", "num_bytes"),
    [("capacity_gib=300", 300 * 2**30), ("memory_gb=79.5", 79_500_000_000), ("memory_bytes=80000000000", 80_000_000_000)],
)
def test_a_number_whose_key_names_its_unit_is_the_capacity_in_bytes(refused: Refused, given: str, num_bytes: int) -> None:
    (found,) = refused(overrides=[f"device.{given}"])
    assert found.hints[0] == f"--set device.capacity={num_bytes}"


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("model.moe.num_experts_per_token=2", ["model.moe.top_k=2"]),
        ("model.n_routed_experts=8", ["model.moe.num_experts=8"]),
        ("model.moe.moe_intermediate_size=1024", ["model.moe.ffn_hidden_size=1024"]),
        ("mesh.tensor_model_parallel_size=2", ["mesh.tp=2"]),
        ("tp_size=2", ["mesh.tp=2"]),
        ("mesh.dp=4", ["mesh.dp_shard=4", "mesh.dp_replicate=4"]),
        ("sharding.zero_stage=3", ["sharding.reshard_after_forward=true"]),
        ("sharding.zero_stage=2", ["sharding.reshard_after_forward=false"]),
        ("precision.compute=bfloat16", ["precision.params=bf16"]),
        ("precision.fp8=true", ["'precision.recipe={name: fp8_current}'"]),
        ("optimizer.name=adamw", ["optimizer.matrix=adamw"]),
        ("schedule.name=zbv", ["schedule.kind=zbv"]),
        ("gradient_checkpointing=true", ["recompute.default=full"]),
        ("model.sliding_window=1024", ["model.attention.window_size=1024"]),
        ("host.torch_compile=true", []),
    ],
)
def test_names_of_other_tools_are_hints_of_our_keys(refused: Refused, given: str, meant: list[str]) -> None:
    (found,) = refused(overrides=[given])
    assert [hint for hint in found.hints if hint.startswith("--set")] == [f"--set {setting}" for setting in meant]


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("mesh.tp=2,mesh.pp=4", "--set mesh.tp=2 --set mesh.pp=4"),
        ("tp=2, pp_size=4", "--set mesh.tp=2 --set mesh.pp=4"),
        ("schedule.kind=zbv,mesh.vpp=2", "--set schedule.kind=zbv --set mesh.vpp=2"),
    ],
)
def test_several_settings_in_one_argument_are_separated(refused: Refused, given: str, hint: str) -> None:
    (found,) = refused(overrides=[given])
    assert (found.code, found.hints[0]) == ("MP140", hint)


@pytest.mark.parametrize("given", ["recompute.blocks={A: full, M: none}", "split.pin=[]", "schedule={kind: 1f1b, num_microbatches: 4}"])
def test_a_value_with_commas_is_one_setting(accepted: Accepted, given: str) -> None:
    accepted(overrides=[given])


def test_a_global_batch_and_a_number_of_gpus_are_hints_of_their_factors(refused: Refused, accepted: Accepted) -> None:
    spec = accepted().spec
    batch, gpus = 6 * spec.global_batch_size, 2 * spec.mesh.world_size
    for key, wanted in (("batch.gbs", batch), ("global_batch_size", batch), ("mesh.world_size", gpus), ("device.count", gpus)):
        (found,) = refused(overrides=[f"{key}={wanted}"])
        settings = [hint.removeprefix("--set ") for hint in found.hints if hint.startswith("--set ")]
        changed = accepted(overrides=settings).spec
        assert wanted in (changed.global_batch_size, changed.mesh.world_size)


def test_names_of_other_tools_stand_for_keys_that_exist() -> None:
    known = {".".join(map(str, key)) for key in all_keys()}
    names = {key.rpartition(".")[2] for key in known}
    for keys, others in other_names._SAME:
        assert all(key in known if "." in key else key in names for key in keys)
        assert not known & set(others.split())


@pytest.mark.parametrize("given", [("mesh.tp=2", "mesh.tp=1"), ("mesh={pp: 1, tp: 2}", "mesh.tp=1"), ("mesh.tp=3", "mesh.tp=1")])
def test_the_last_value_of_a_key_counts(accepted: Accepted, given: tuple[str, ...]) -> None:
    assert accepted(overrides=given).spec.mesh.tp == 1


def test_a_finding_points_at_the_value_that_counts(refused: Refused) -> None:
    (found,) = refused(overrides=("mesh.tp=2", "mesh.tp=eight"))
    assert found.location.file == "--set mesh.tp=eight"


def test_a_section_does_not_replace_a_key_that_was_set(refused: Refused) -> None:
    (found,) = refused(overrides=("mesh.tp=2", "mesh={pp: 2}"))
    assert found.code == "MP143"
    assert found.detail == "mesh.tp is set, but mesh after it replaces the whole section"


def test_arguments_and_file_are_reported_together(refused: Refused) -> None:
    found = refused(("ep: 1", "ep: x"), overrides=["mesh.tpp=8", "mesh.tp=y"])
    assert [item.code for item in found] == ["MP141", "MP124", "MP124"]


@pytest.mark.parametrize(
    ("argument", "key", "value"),
    [
        ("Mesh.TP=2", "mesh.tp", 2),
        ("mesh.dp-shard=4", "mesh.dp_shard", 4),
        ("device=h100", "device.name", "h100-sxm"),
        ("device.name=B200", "device.name", "b200"),
        ("device.name=NVIDIA A100-SXM4-40GB", "device.name", "a100-40gb"),
        ("recompute.blocks.a=full", "recompute.blocks.A", "full"),
    ],
)
def test_names_in_any_case(accepted: Accepted, argument: str, key: str, value: object) -> None:
    found: object = accepted(overrides=[argument]).spec.model_dump()
    for part in key.split("."):
        assert isinstance(found, dict)
        found = found[part]
    assert found == value


@pytest.mark.parametrize("seed", range(4))
def test_hints_about_an_argument_are_arguments(seed: int) -> None:
    """A line of a section, as a file has it, does not paste into a command: no hint at `--set` has that form."""
    draw = Random(seed)
    keys = [".".join(map(str, key)) for key in all_keys()]
    words = (
        "1",
        "3",
        "8",
        "null",
        "full",
        "none",
        "fp8",
        "zbv",
        "dualpipe",
        "megatron",
        "muon",
        "[1, 2]",
        "0.5",
        "triton",
        "weighted",
        "true",
    )
    seen = 0
    for _ in range(250):
        argument = f"{draw.choice(keys)}={draw.choice(words)}"
        try:
            load_spec_text(SAMPLE, "sample.yaml", [argument])
        except MegaplanError as error:
            found = [each for each in error.diagnostics if (each.location.file or "").startswith("--set ")]
            for hint in [hint for each in found for hint in each.hints[:-1]]:
                assert not re.fullmatch(r"[a-z_]+: (?:[\w.-]+|\[.*\]|\{.*\})", hint), (argument, hint)
                for word in shlex.split(hint, comments=True) if hint.startswith("--set ") and "…" not in hint else ():
                    assert word == "--set" or word.partition("=")[0].split(".")[0] in Spec.model_fields
                    seen += word != "--set"
    assert seen > 20


def test_a_text_of_a_form_of_its_own_is_no_name(refused: Refused) -> None:
    (found,) = refused(overrides=["host.name=megatron", "host.release=first"])
    assert (found.code, found.hints[0]) == ("MP134", "--set host.release=null")
