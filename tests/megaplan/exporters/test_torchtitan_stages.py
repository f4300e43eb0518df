"""Pipelines of AD and AE blocks, exported to torchtitan and imported again: the same stages, totals and policy, or no file at all."""

import json
import re
import shlex
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml
from random_plans.choices import Draw
from random_plans.torchtitan import torchtitan_document

from megaplan.cli.main import run
from megaplan.errors import MegaplanError
from megaplan.exporters.torchtitan import export_torchtitan
from megaplan.exporters.values import InexpressibleError, Source
from megaplan.importers.torchtitan.spec import import_torchtitan
from megaplan.inventory.build import build_inventory
from megaplan.layout.build import build_layout
from megaplan.partition.choose import choose_cuts
from megaplan.spec.load import spec_from_document
from megaplan.spec.models import Spec

SEEDS = range(60)
EXPERTS = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 64, "activation": "swiglu"}
KINDS = {1: ("1f1b", "gpipe"), 2: ("interleaved_1f1b", "interleaved_zero_bubble", "looped_bfs", "zbv", "dualpipev")}


def source_of(spec: Spec) -> Source:
    inventory = build_inventory(spec)
    return Source(spec, inventory, build_layout(spec, inventory, choose_cuts(spec, inventory).spans))


def pipeline(seed: int, host: str, unit: int) -> dict[str, Any]:
    """A random pipeline of blocks AD and AE, whose manual cuts are at multiples of `unit` layers."""
    draw = Draw(f"stages {seed}")
    sections = torchtitan_document(draw, "stages")
    pp, vpp, blocks = draw.choice([2, 3, 4]), draw.choice([1, 2]), draw.choice([9, 12, 17])
    letters = "".join("AE" if draw.chance(0.4) else "AD" for _ in range(blocks))
    cuts = [0, *sorted(Random(seed).sample(range(unit, 2 * blocks, unit), pp * vpp - 1)), 2 * blocks]
    sections["model"] |= {"pattern": letters, "num_layers": 2 * blocks, "tie_embeddings": False}
    if "E" in letters:
        sections["model"]["moe"] = EXPERTS
        sections["mesh"] |= {"tp": 1, "vocab_parallel": False}
    if "D" not in letters:
        del sections["model"]["mlp"]
    sections["mesh"] |= {"pp": pp, "vpp": vpp}
    kinds = KINDS[vpp][:2] if host == "torchtitan" else KINDS[vpp]
    sections["schedule"] = {"kind": draw.choice(kinds), "num_microbatches": 2 * pp * draw.choice([1, 2])}
    sections["split"] = {"mode": "manual", "spans": [*map(list, pairwise(cuts))], "reason": "drawn"}
    sections["recompute"] = {"default": draw.choice(["none", "selective"] if "E" in letters and host == "megarun" else ["none", "full"])}
    if host == "megarun":
        sections["host"] = {"name": host}
    return sections


def specs_of(host: str, unit: int) -> list[Spec]:
    found = []
    for seed in SEEDS:
        try:
            found.append(spec_from_document(pipeline(seed, host, unit)))
        except MegaplanError:
            continue
    assert len(found) > 0.6 * len(SEEDS)
    return found


def totals(source: Source) -> tuple[Any, ...]:
    spec = source.spec
    spans = [(slot.start, slot.stop) for slot in source.slots()]
    return spans, source.inventory.parameters, spec.mesh, spec.global_batch_size, spec.schedule, spec.batch


@pytest.mark.parametrize("host", ["megarun", "torchtitan"])
def test_stages_and_totals_of_a_pipeline_come_back(host: str) -> None:
    for spec in specs_of(host, 2):
        source = source_of(spec)
        exported = export_torchtitan(source)
        model = f"model={json.dumps(spec.model.model_dump(mode='json', exclude_unset=True))}"
        again = import_torchtitan(exported.text, "job.json", [model]).loaded.spec
        assert totals(source_of(again)) == totals(source)
        assert again.recompute.default == spec.recompute.default or "recompute" in {loss.key for loss in exported.losses}


def test_a_cut_inside_a_block_is_refused() -> None:
    refused = 0
    for spec in specs_of("megarun", 1):
        source = source_of(spec)
        if any(slot.start % 2 for slot in source.slots()):
            with pytest.raises(InexpressibleError) as caught:
                export_torchtitan(source)
            assert [item.code for item in caught.value.diagnostics] == ["MP920"]
            refused += 1
        else:
            export_torchtitan(source)
    assert refused > 10


@pytest.mark.parametrize("barred", [False, True])
@pytest.mark.parametrize(("pp", "vpp", "first"), [(2, 1, 11), (2, 2, 1), (4, 1, 9), (6, 1, 7)])
def test_the_hint_of_a_cut_inside_a_block_is_a_command_that_works(
    barred: bool, pp: int, vpp: int, first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    count = pp * vpp
    cuts = [0, *range(first, 12, 1)][:count]
    cuts = [*cuts, *range(cuts[-1] + 1, cuts[-1] + 1 + count - len(cuts)), 20]
    sections = pipeline(0, "megarun", 2)
    sections["model"] |= {"pattern": "AD", "num_layers": 20, "mlp": {"ffn_hidden_size": 64, "activation": "swiglu"}}
    sections["model"].pop("moe", None)
    sections["mesh"] |= {"pp": pp, "vpp": vpp}
    sections["schedule"] = {"kind": "interleaved_1f1b" if vpp > 1 else "1f1b", "num_microbatches": 12}
    sections["split"] |= {"spans": [*map(list, pairwise(cuts))]}
    if barred:
        spans = sections["split"].pop("spans")
        sections["model"]["pattern"] = "|".join(("AD" * 10)[start:stop] for start, stop in spans)
    Path("SPEC").write_text(yaml.safe_dump(sections))
    assert run(["split", "SPEC", "-o", "first.json"]) == 0
    capsys.readouterr()
    assert run(["export", "first.json", "--to", "torchtitan", "-o", "job.json"]) == 1
    said = capsys.readouterr().err
    assert said.count("[MP920]") == 1
    assert not Path("job.json").exists()
    command = next(line.removeprefix("hint: ") for line in said.splitlines() if line.startswith("hint: megaplan split"))
    assert run(shlex.split(command)[1:]) == 0
    assert run(["export", "PLAN", "--to", "torchtitan", "-o", "job.json"]) == 0
    stages = json.loads(Path("job.json").read_text())["parallelism"]["module_fqns_per_model_part"]
    assert [int(name) for stage in stages for name in re.findall(r"layers\.(\d+)", " ".join(stage))] == list(range(10))


def test_more_stages_than_blocks_are_refused_with_their_number() -> None:
    sections = pipeline(0, "megarun", 2)
    sections["model"] |= {"pattern": "AD", "num_layers": 4, "mlp": {"ffn_hidden_size": 64, "activation": "swiglu"}}
    sections["model"].pop("moe", None)
    sections["mesh"] |= {"pp": 4, "vpp": 1}
    sections["schedule"] = {"num_microbatches": 4}
    sections["split"]["spans"] = [[layer, layer + 1] for layer in range(4)]
    with pytest.raises(InexpressibleError, match="4 stages, 2 blocks"):
        export_torchtitan(source_of(spec_from_document(sections)))


@pytest.mark.parametrize("default", ["none", "selective", "full"])
@pytest.mark.parametrize("blocks", [{}, {"A": "full"}, {"A": "full", "D": "full"}, {"A": "none", "D": "none"}, {"D": "selective"}])
def test_a_policy_is_written_or_lost_and_never_both(default: str, blocks: dict[str, str]) -> None:
    sections = pipeline(0, "megarun", 2)
    sections["model"] |= {"pattern": "AD", "mlp": {"ffn_hidden_size": 64, "activation": "swiglu"}}
    sections["model"].pop("moe", None)
    sections["recompute"] = {"default": default, "blocks": blocks}
    exported = export_torchtitan(source_of(spec_from_document(sections)))
    policies = {blocks.get(letter, default) for letter in "AD"}
    lost = [loss.key for loss in exported.losses if loss.key.startswith("recompute")]
    written = json.loads(exported.text)["activation_checkpoint"]
    assert (written, lost) == ((*policies, []) if policies in ({"none"}, {"full"}) else ("none", ["recompute"]))
