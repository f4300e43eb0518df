"""A random spec, exported and imported again, has the same parameters, bytes of every rank and step, or the export says why not."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
from random_plans.choices import SMALL, Draw
from random_plans.draw import draw
from random_plans.maxtext import maxtext_document
from random_plans.torchtitan import add_state_dtypes, torchtitan_document

from megaplan.budget.peaks import build_budget
from megaplan.cli.main import run
from megaplan.errors import MegaplanError
from megaplan.exporters.maxtext import export_maxtext
from megaplan.exporters.megatron import export_megatron
from megaplan.exporters.torchtitan import export_torchtitan
from megaplan.exporters.values import Exported, Source
from megaplan.hosts.megatron.vocabulary import TABLE
from megaplan.importers.maxtext.spec import import_maxtext
from megaplan.importers.megatron.spec import import_megatron
from megaplan.importers.torchtitan.spec import import_torchtitan
from megaplan.inventory.build import build_inventory
from megaplan.layout.build import build_layout
from megaplan.layout.step_time import planned_time
from megaplan.partition.choose import choose_cuts
from megaplan.spec.load import load_spec_text, spec_from_document
from megaplan.spec.models import Spec

FEW, MANY, AT_ONCE = 30, 500, 50
DELTA_SHARE = 0.4
ITS_MODULES = "model.features.mtp"
"""A prediction module of GPTModel with another block than the last layer's is written as the last layer, and reported."""
OTHER_TIMES = {"model.attention.full_layers", "model.attention.window_rope_theta"}
"""Reported keys that change the time alone."""
PIECES = [
    pytest.param(range(first, first + AT_ONCE), id=f"{first}-{first + AT_ONCE}", marks=pytest.mark.slow)
    for first in range(FEW, MANY, AT_ONCE)
]
SEEDS = [pytest.param(range(FEW), id=f"0-{FEW}"), *PIECES]


def source_of(spec: Spec) -> Source:
    inventory = build_inventory(spec)
    return Source(spec, inventory, build_layout(spec, inventory, choose_cuts(spec, inventory).spans))


class Seen(NamedTuple):
    """Everything of a plan that an export and an import must keep."""

    parameters: int
    ranks: list[Any]
    step: float | str


def seen(source: Source) -> Seen:
    budget = build_budget(source.spec, source.inventory, source.layout)
    time = planned_time(source.spec, tuple((slot.start, slot.stop) for slot in source.layout.slots), source.inventory)
    step = time if isinstance(time, str) else time.seconds
    return Seen(source.inventory.parameters, [(rank.ranks, rank.parameters, rank.cells) for rank in budget.ranks], step)


def with_deltas(document: dict[str, Any], random: Random) -> dict[str, Any]:
    """The document with some mixers replaced by gated delta nets, which are drawn for megarun alone."""
    model = document["model"]
    pattern, gpt = model["pattern"].upper(), document["host"].get("model") == "gpt"
    if random.random() > DELTA_SHARE or "|" in pattern or not (gpt or "M" in pattern):
        return document
    if gpt:
        letters = (pattern * model["num_layers"])[: model["num_layers"]]
        pattern = "".join("G" if letter == "A" and index % 4 == 0 else letter for index, letter in enumerate(letters))
        model["attention"].pop("full_layers", None)
        model["attention"].pop("nope_layers", None)
    else:
        pattern = pattern.replace("M", "G")
        del model["mamba"]
    heads = document["mesh"].get("tp", 1) * random.randint(1, 6)
    section = {"kind": "gated_delta", "num_key_heads": heads, "num_value_heads": heads * random.choice([1, 2, 3])}
    section |= {"key_dim": random.choice([8, 16, 24]), "value_dim": random.choice([8, 16, 64]), "conv_kernel": random.choice([2, 4, 5])}
    model |= {"pattern": pattern, "linear_attention": section}
    return document


def of_megatron(seed: int) -> Spec | None:
    """A random spec of host megatron; None if it is not legal."""
    try:
        return spec_from_document(with_deltas(draw(seed, size=SMALL), Random(seed)))
    except MegaplanError:
        return None


def of_torchtitan(seed: int) -> Spec | None:
    """A random spec of host torchtitan, some with float8 linears or bf16 state; None if it is not legal."""
    random, document = Random(seed), torchtitan_document(Draw(f"there and back {seed}"), "random")
    add_state_dtypes(Draw(f"dtypes there and back {seed}"), document)
    recipe = random.choice([None, {"name": "fp8_current", "param_gather": random.random() < 0.5}, {"name": "fp8_rowwise"}])
    if recipe is not None and document["precision"]["params"] == "bf16":
        document["precision"]["recipe"] = recipe
    try:
        return spec_from_document(document)
    except MegaplanError:
        return None


@pytest.fixture
def megatron_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("random_plans.draw.TORCHTITAN_SHARE", 0.0)
    monkeypatch.setattr("random_plans.draw.MEGATRON_SHARE", 1.0)


def differences(spec: Spec, export: Callable[[Source], Exported], load: Callable[[str], Spec]) -> Iterator[str]:
    """Each difference after export and import that the export does not report."""
    source = source_of(spec)
    exported = export(source)
    told = {loss.key for loss in exported.losses}
    imported = source_of(load(exported.text))
    before, after = seen(source), seen(imported)
    if ITS_MODULES in told:
        return
    if after.parameters != before.parameters:
        yield f"{before.parameters} parameters, then {after.parameters}"
    if after.ranks != before.ranks:
        yield "bytes of ranks"
    if after.step != before.step and not told & OTHER_TIMES:
        yield f"step {before.step}, then {after.step}"
    first, again = (
        text.replace(f"# {each.spec.name},", "#", 1) for text, each in ((exported.text, source), (export(imported).text, imported))
    )
    yield from (f"{a!r}, then {b!r}" for a, b in zip(first.splitlines(), again.splitlines(), strict=True) if a != b)


@pytest.mark.usefixtures("megatron_alone")
@pytest.mark.parametrize("seeds", SEEDS)
def test_a_launch_of_megatron_is_the_plan_it_was_exported_from(seeds: range) -> None:
    specs = [(seed, spec) for seed in seeds if (spec := of_megatron(seed)) is not None]
    found = {
        seed: [*differences(spec, export_megatron, lambda text: import_megatron(text, "launch.sh").loaded.spec)] for seed, spec in specs
    }
    assert len(specs) > 0.8 * len(seeds)
    assert {seed: said for seed, said in found.items() if said} == {}


@pytest.mark.parametrize("seeds", SEEDS)
def test_a_job_of_torchtitan_is_the_plan_it_was_exported_from(seeds: range) -> None:
    specs = [(seed, spec) for seed in seeds if (spec := of_torchtitan(seed)) is not None]
    found = {
        seed: [*differences(spec, export_torchtitan, lambda text: import_torchtitan(text, "job.json").loaded.spec)] for seed, spec in specs
    }
    assert len(specs) > 0.8 * len(seeds)
    assert {seed: said for seed, said in found.items() if said} == {}


@pytest.mark.parametrize("seeds", SEEDS)
def test_a_run_of_maxtext_is_the_plan_it_was_exported_from(seeds: range, tmp_path: Path) -> None:
    """Hybrids of gated delta nets with attention, latent attention, stages, slices and remat policies among them; nothing is lost."""

    def load(text: str) -> Spec:
        (tmp_path / "run.yml").write_text(text, encoding="utf-8")
        return import_maxtext([str(tmp_path / "run.yml")]).loaded.spec

    specs = {seed: spec_from_document(maxtext_document(Draw(f"there and back {seed}"), "random")) for seed in seeds}
    lost = {seed: [loss.key for loss in export_maxtext(source_of(spec)).losses if loss.strict] for seed, spec in specs.items()}
    assert {seed: keys for seed, keys in lost.items() if keys} == {}
    found = {seed: [*differences(spec, export_maxtext, load)] for seed, spec in specs.items()}
    assert {seed: said for seed, said in found.items() if said} == {}


@pytest.mark.usefixtures("megatron_alone")
def test_every_argument_that_an_export_writes_is_in_the_table() -> None:
    words = [
        word.partition("=")[0]
        for seed in range(FEW)
        if (spec := of_megatron(seed))
        for word in export_megatron(source_of(spec)).text.split()
    ]
    assert {word for word in words if word.startswith("--")} - {"--nnodes", "--nproc-per-node"} <= {row.flag for row in TABLE}


@pytest.mark.parametrize("block", sorted({row.block for row in TABLE if row.block}))
def test_arguments_of_a_block_are_written_for_a_spec_that_has_it(block: str) -> None:
    ranks = {"q_lora_rank": 24, "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24}
    latent = {"kind": "mla", "num_heads": 4, **ranks}
    sections = {
        "moe": {"pattern": "ADAE", "moe": {"num_experts": 4, "top_k": 3, "ffn_hidden_size": 64}},
        "mla": {"attention": latent},
        "indexer": {
            "pattern": "AD",
            "attention": {**latent, "num_heads": 64, "kv_lora_rank": 512, "indexer": {"num_heads": 2, "head_dim": 8, "layers": [0, 2]}},
        },
        "linear_attention": {
            "pattern": "GDAD",
            "linear_attention": {"kind": "gated_delta", "num_key_heads": 2, "num_value_heads": 4, "key_dim": 8, "value_dim": 8},
        },
        "fsdp": {},
    }
    model = {
        **{"pattern": "AD", "num_layers": 4, "hidden_size": 64, "vocab_size": 128, "mlp": {"ffn_hidden_size": 128}},
        **{"attention": {"kind": "gqa", "num_heads": 4, "num_kv_heads": 4, "head_dim": 16}},
        **sections[block],
    }
    document = {"format": "megaplan.spec/1", "name": "block", "model": model, "batch": {"micro_batch_size": 1, "seq_length": 64}}
    document |= {"optimizer": {"matrix": "adamw"}, "host": {"name": "megatron", "model": "gpt"}, "mesh": {"dp_shard": 2}}
    document |= {"sharding": {"reshard_after_forward": block == "fsdp"}}
    text = export_megatron(source_of(load_spec_text(json.dumps(document), "block.yaml").spec)).text
    assert any(f"{row.flag} " in text or f"{row.flag}=" in text for row in TABLE if row.block == block)


def test_a_row_of_search_its_plan_and_its_launch_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = {
        **{"pattern": "AD", "num_layers": 8, "hidden_size": 512, "vocab_size": 1024, "mlp": {"ffn_hidden_size": 1024}},
        **{"attention": {"kind": "gqa", "num_heads": 8, "num_kv_heads": 4, "head_dim": 64}},
    }
    document = {"format": "megaplan.spec/1", "name": "searched", "model": model, "batch": {"micro_batch_size": 1, "seq_length": 512}}
    document |= {"device": {"name": "b200"}, "optimizer": {"matrix": "adamw"}, "schedule": {"num_microbatches": 8}}
    document |= {"host": {"name": "megatron", "framework": "megatron-bridge", "release": "26.02"}}
    spec, plans, launch, back = (str(tmp_path / name) for name in ("spec.yaml", "plans", "launch.sh", "back.yaml"))
    Path(spec).write_text(json.dumps(document), encoding="utf-8")

    def answer(*words: str) -> dict[str, Any]:
        capsys.readouterr()
        assert run([*words, "--json"]) == 0, words
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    (row, *_) = answer("search", spec, "--devices", "8", "--top", "1", "-o", plans)["best"]
    (plan,) = map(str, Path(plans).glob("*.json"))
    assert run(["export", plan, "--to", "megatron", "-o", launch]) == 0
    assert run(["import", "megatron", launch, "-o", back]) == 0
    of_plan, of_launch = answer("estimate", plan), answer("estimate", back)
    assert of_plan["time"]["step_seconds"] == pytest.approx(row["step_seconds"], abs=1e-6)
    assert of_launch["time"] == of_plan["time"]
    assert of_launch["ranks"] == of_plan["ranks"]


@pytest.mark.parametrize("target", ["chrome-trace", "memory-snapshot"])
def test_stages_of_equal_bytes_are_written_for_viewers(target: str, tmp_path: Path) -> None:
    """Ranks of equal stages share one budget."""
    model = {"pattern": "D", "num_layers": 4, "hidden_size": 8, "vocab_size": 16, "mlp": {"ffn_hidden_size": 16}}
    document = {"format": "megaplan.spec/1", "name": "equal", "model": model, "mesh": {"pp": 4}, "split": {"mode": "equal"}}
    document |= {"schedule": {"kind": "gpipe", "num_microbatches": 2}, "batch": {"micro_batch_size": 1, "seq_length": 8}}
    spec = tmp_path / "spec.yaml"
    spec.write_text(json.dumps(document), encoding="utf-8")
    assert run(["export", str(spec), "--to", target, "-o", str(tmp_path / "out")]) == 0
