"""Training with linears in eight bits, emulated: the same bits twice, a loss near that of 16 bits, and what is not compiled."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megakernels.ops.fp8_linear.delayed import update_factors
from megaplan.inventory.build import build_inventory
from megaplan.layout.build import build_layout
from megaplan.spec.models import Spec
from megarun.engine.build import build_stage, materialise
from megarun.engine.initialise import initialise
from megarun.errors import MegaplanError
from megarun.parallel.apply.compile import refuse_compile

pytestmark = pytest.mark.runtime
ROOT = Path(__file__).parents[3]
STEPS = 200
SMALL = (
    *("model.pattern=AMED", "model.num_layers=4", "model.recurrent=null"),
    *("schedule.num_microbatches=1", "batch.micro_batch_size=8", "batch.seq_length=64", "device.name=b200"),
)
"""Settings that leave the demo's model one layer of each letter but R, with one short batch, on a device that has every format."""


def gradients(values: dict[str, Any]) -> dict[str, Tensor]:
    """Gradients of one batch of random tokens, by parameter name, in one process."""
    spec = Spec.model_validate(values)
    inventory = build_inventory(spec)
    stage = build_stage(spec, inventory, build_layout(spec, inventory, [(0, spec.model.num_layers)]).slots[0])
    materialise(stage, torch.device("cpu"))
    initialise(stage, inventory, 0)
    tokens = torch.randint(0, spec.model.vocab_size, (2, spec.batch.seq_length), generator=torch.Generator().manual_seed(0))
    for step in range(2 if stage.delayed is not None else 1):  # factors begin with 1, and are those of the step before then
        stage.zero_grad()
        logits = stage(tokens)
        assert isinstance(logits, Tensor)
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten()).backward()
        if stage.delayed is not None:
            update_factors(stage.delayed.now, stage.delayed.history, step, most_recent=False, margin=0)
    return {name: parameter.grad for name, parameter in stage.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("pattern", ["AMRD", "AE"])
@pytest.mark.parametrize("name", ["fp8_blockwise", "fp8_current", "fp8_delayed", "fp8_rowwise", "mxfp8", "nvfp4"])
def test_two_runs_have_the_same_bits(spec_with: Callable[..., dict[str, Any]], name: str, pattern: str) -> None:
    """And gradients are near those without the recipe, of which an element's rounding is 2^-4 at most, with four bits 2^-2."""
    model = {"model.pattern": pattern, "model.num_layers": len(pattern), "model.moe.ffn_hidden_size": 48}
    first, again = (gradients(spec_with({**model, "precision.recipe": {"name": name}})) for _ in range(2))
    assert all(torch.equal(first[parameter], again[parameter]) for parameter in first)
    wide = gradients(spec_with(model))
    distances = {parameter: float((first[parameter] - wide[parameter]).norm() / wide[parameter].norm()) for parameter in wide}
    assert set(first) == set(wide)
    near, farthest = (0.3, 0.5) if name != "nvfp4" else (0.6, 0.9)
    assert 0.005 < distances["layers.0.q_proj.weight"] < near
    assert all(0.005 < distances[f"layers.1.experts.{part}_proj"] < near for part in ("gate", "up", "down") if "E" in pattern)
    assert max(distances.values()) < farthest


def test_layers_that_a_recipe_leaves_out_multiply_as_before(spec_with: Callable[..., dict[str, Any]]) -> None:
    """Gradients with every layer left out are those without a recipe, bit by bit; with one more covered they are not."""
    model = {"model.pattern": "AD", "model.num_layers": 2}
    wide, none, one = (
        gradients(spec_with({**model, **({"precision.recipe": recipe} if recipe else {})}))
        for recipe in (None, {"name": "fp8_rowwise", "first_last_bf16": (1, 1)}, {"name": "fp8_rowwise", "families": ("D",)})
    )
    assert all(torch.equal(wide[parameter], none[parameter]) for parameter in wide)
    assert not torch.equal(wide["layers.1.up_proj.weight"], one["layers.1.up_proj.weight"])


def test_blocks_in_eight_bits_are_not_compiled(spec_with: Callable[..., dict[str, Any]]) -> None:
    spec = Spec.model_validate(spec_with({"precision.recipe": {"name": "fp8_current", "families": ("A",)}}))
    with pytest.raises(MegaplanError, match="fp8_current") as caught:
        refuse_compile(spec)
    assert [found.code for found in caught.value.diagnostics] == ["MP625"]


def losses(metrics: Path) -> list[float]:
    """Losses of a run's steps."""
    records = map(json.loads, metrics.read_text(encoding="utf-8").splitlines())
    return [record["loss"] for record in records if "step_seconds" in record]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[float]]:
    """The losses of the demo's model with some settings, in 16 bits or with a recipe, on the C++ headers of the installed torch.

    MEGAPLAN_LOSS_RUNS names a folder that keeps the runs: a run that was stopped continues, and one that is complete is read.
    """
    kept = os.environ.get("MEGAPLAN_LOSS_RUNS")
    folder = Path(kept) if kept else tmp_path_factory.mktemp("demo")
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1"}

    def run(*command: object) -> None:
        subprocess.run([sys.executable, "-m", *map(str, command)], env=environment, check=True, capture_output=True)

    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    tokens = folder / "headers.tokens"
    limits = ("--vocab-size", 2048, "--limit-bytes", 8_000_000)
    if not tokens.exists():
        run("megarun", "data", "tokenize", Path(found.origin).parent / "include", "-o", tokens, *limits)

    @cache
    def train(name: str, *settings: str, more: str = "") -> list[float]:
        out = folder / f"{name}-{len(settings)}{''.join(filter(str.isalnum, more))}"
        plan = out.with_suffix(".json")
        precision = (
            [f"precision.params={name}"] if name.endswith("16") else ["precision.params=bf16", f"precision.recipe={{name: {name}{more}}}"]
        )
        arguments = [argument for each in (f"training.steps={STEPS}", *precision, *settings) for argument in ("--set", each)]
        if not plan.exists():
            run("megaplan", "split", ROOT / "plans" / "tiny-hybrid.yaml", *arguments, "-o", plan)
        metrics = out / "metrics.jsonl"
        if not metrics.exists() or len(losses(metrics)) < STEPS:
            run("megarun", "train", plan, "--data", tokens, "--out", out, "--steps", STEPS, "--save-every", 10)
        return losses(metrics)

    return train


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "most", "settings", "more"),
    [
        ("fp8_current", 0.01, (), ""),
        ("fp8_rowwise", 0.01, (), ""),
        ("mxfp8", 0.01, SMALL, ""),
        ("nvfp4", 0.02, SMALL, ""),
        ("fp8_blockwise", 0.01, SMALL, ""),
        ("fp8_delayed", 0.01, SMALL, ""),
        ("mxfp8", 0.01, SMALL, ", head: true"),
        ("fp8_rowwise", 0.01, SMALL, ", head: true"),
        ("fp8_current", 0.01, SMALL, ", attention: true"),
        ("fp16", 0.01, SMALL, ""),
    ],
)
def test_the_final_loss_is_near_that_of_bf16(
    trained: Callable[..., list[float]], name: str, most: float, settings: tuple[str, ...], more: str
) -> None:
    """After 200 steps, banks of experts in fewer bits too: the mean of the last twenty.

    Losses of single steps differ by a percent between runs once their paths have parted. The runs at the demo's own size take half an hour.
    """
    wide, narrow = trained("bf16", *settings), trained(name, *settings, more=more)
    assert len(wide) == len(narrow) == STEPS
    assert sum(wide[-20:]) < 0.7 * sum(wide[:20])
    assert narrow != wide
    assert sum(narrow[-20:]) == pytest.approx(sum(wide[-20:]), rel=most)
