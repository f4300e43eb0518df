"""A text that grows token by token has the logits of a plain forward over all of it."""

import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from parity_model import BASE, INDEXED, KDA, MAMBA3, MIMO, MLA, spec_with

from megaplan.plan.make import make_plan
from megaplan.spec.load import spec_from_document
from megarun.engine.build import build_stage
from megarun.engine.initialise import initialise
from megarun.job.job import Job
from megarun.model.stage import Stage
from megarun.sampling.decode import Chooser, Decoder, alone, continuation

LENGTH, PROMPT = 13, 5
GQA, MAMBA1 = BASE["model"]["attention"], {"kind": "mamba1", "state_dim": 4, "dt_rank": 6, "save_every": 5, "inner_norm": "scaled"}
SLIDING = {**GQA, "window_size": 4, "full_layers": [2], "sinks": True, "score_cap": 5.0, "window_rope_theta": 100.0, "qk_norm": True}
MANUAL = {"schedule": {"num_microbatches": 2}, "split": {"mode": "manual", "reason": "a test"}}
MODELS: dict[str, dict[str, Any]] = {
    "attention": {"model.pattern": "AD"},
    "sliding": {"model.pattern": "A", "model.num_layers": 3, "model.attention": SLIDING},
    "latent": {"model.pattern": "AEA", "model.num_layers": 3, "model.attention": MLA},
    "indexed": {"model.pattern": "A", "model.num_layers": 3, "model.attention": INDEXED},
    "mamba1": {"model.pattern": "MA", "model.mamba": MAMBA1},
    "mamba2": {"model.pattern": "MD"},
    "mamba3": {"model.pattern": "M", "model.mamba": MAMBA3},
    "mamba3-mimo": {"model.pattern": "MA", "model.mamba": MIMO},
    "recurrent": {"model.pattern": "RE"},
    "delta": {"model.pattern": "GA"},
    "kda": {"model.pattern": "GD", "model.linear_attention": KDA},
    "short": {"model.pattern": "CA"},
    "keys": {"model.pattern": "AD", "model.attention": {**GQA, "shared_keys": [{"source": 0, "layers": [2, 4]}]}},
    "depth": {"model.pattern": "AD", "model.attention_residuals": {"group_layers": 3}},
    "capacity": {"model.pattern": "AE", "model.moe.capacity_factor": 1.5},
    "ngram": {"model.pattern": "AM", "model.features": {"ngram": {"num_tables": 2, "num_rows": 31, "dim": 4}}},
    "stages": {"model.pattern": "AM|DR", "model.num_layers": 4, "mesh": {"pp": 2, "tp": 2}, "model.tie_embeddings": True, **MANUAL},
}


def model_of(document: dict[str, Any]) -> tuple[Job, Stage]:
    spec = spec_from_document(document)
    job = Job.from_plan(make_plan(alone(Job.from_plan(make_plan(spec)), LENGTH)))
    (slot,) = job.layout.slots
    stage = build_stage(job.spec, job.inventory, slot).to_empty(device="cpu")
    initialise(stage, job.inventory, 3)
    with torch.no_grad():
        for parameter in stage.parameters():  # larger than at the start of training, so that positions differ
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())), alpha=0.1)
    stage.add_buffers(torch.device("cpu"))
    return job, stage


@torch.no_grad()
def plain_logits(stage: Stage, tokens: list[int], job: Job) -> list[torch.Tensor]:
    """Logits after PROMPT and more tokens, of one forward; with a capacity, which depends on the length, of one each."""
    if job.spec.model.moe is not None and job.spec.model.moe.capacity_factor is not None:
        return [Decoder(stage, job.spec).logits(tokens[:count]) for count in range(PROMPT, LENGTH + 1)]
    before = None
    if job.spec.model.features.ngram is not None:
        orders = range(1, job.spec.model.features.ngram.max_order)
        before = torch.tensor([[[-1] * order + tokens[:-order] for order in orders]])
    found = stage(torch.tensor([tokens]), None, before)
    assert isinstance(found, torch.Tensor)
    return list(found[0, PROMPT - 1 :])


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_whole_text(name: str) -> None:
    job, stage = model_of(spec_with(MODELS[name]))
    _, other = model_of(spec_with(MODELS[name]))
    decoder, tokens = Decoder(stage, job.spec), random.Random(name).choices(range(64), k=LENGTH)
    assert decoder.keeps == (name not in ("indexed", "capacity"))
    found = [decoder.logits(tokens[:PROMPT]), *(decoder.logits([token]) for token in tokens[PROMPT:])]
    wanted = plain_logits(other, tokens, job)
    scale = max(float(each.abs().max()) for each in wanted)
    assert scale > 0.1
    assert max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True)) < 2e-5 * scale
    assert min(float((a - b).abs().max()) for a, b in pairwise(wanted)) > 1e-3 * scale


def test_the_most_probable_tokens_and_drawn_ones() -> None:
    job, stage = model_of(spec_with(MODELS["attention"]))

    def text(temperature: float, top_p: float, seed: int) -> list[int]:
        chooser = Chooser(64, temperature, top_p, torch.Generator().manual_seed(seed))
        return list(continuation(Decoder(stage, job.spec), [1, 2, 3], 8, chooser, end=None))

    greedy = text(0, 1.0, 0)
    assert greedy == text(1.0, 1e-9, 5)
    assert text(1.0, 1.0, 5) == text(1.0, 1.0, 5) != text(1.0, 1.0, 6)
    assert Chooser(9, 0, 1.0, torch.Generator()).choose(torch.arange(12.0)) == 8
    drawn = text(1.0, 1.0, 5)
    chooser = Chooser(64, 1.0, 1.0, torch.Generator().manual_seed(5))
    until = list(continuation(Decoder(stage, job.spec), [1, 2, 3], 8, chooser, end=drawn[-1]))
    assert until == drawn[: drawn.index(drawn[-1])]
