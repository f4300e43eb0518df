"""Megatron-Bridge's study of selective recompute, which no term was made from."""

import json
from pathlib import Path
from typing import Any

from accuracy_megatron.launches import stage_of_launch

from megaplan.hosts.megatron.peak import memory
from megaplan.hosts.megatron.storage import optimizer_state, parameters

RUNS = Path(__file__).resolve().parent.parent.parent / "tests/megaplan/hosts/megatron/recompute.json"
GB = 10**9


def recompute_lines() -> list[str]:
    """The section of the page."""
    lines = [
        "",
        "## Held back: recompute in Megatron-Bridge's study",
        "",
        "Megatron-Bridge publishes the largest allocated bytes of two models under selective recompute, in 10⁹ bytes. No term of the",
        "estimate was derived from them. *Saved* is relative to the first run of the same step. Nemotron 3 Nano, a hybrid on 16 H100 with",
        "HybridEP and 16-bit gradients (inferred: in 32 bits its first step would not fit), is within a percent, and each module",
        "saves what the estimate says; its CUDA graphs of attention and Mamba are ignored. Moonlight's optimizer keeps fp32 masters and",
        "copies its 16-bit gradients, since Megatron-Bridge configures it with an fp8 recipe: with any recompute the optimizer's step is",
        "the peak, which is why all choices end within 0.05 GB of one another. 0.7 GB of this peak are not explained.",
        "",
        "| Model | Recomputed | Step | Peak GB | Error | Saved GB | Estimated |",
        "|---|---|---|---|---|---|---|",
    ]
    for model in json.loads(RUNS.read_text(encoding="utf-8"))["models"]:
        before: dict[bool, tuple[float, float]] = {}
        for run in model["runs"]:
            estimate = peak_gb(model, run)
            measured, first = run["peak_gb"], before.setdefault(run["first_step"], (run["peak_gb"], estimate))
            saved = [f"{base - own:.3f}" if base != own else "–" for base, own in zip(first, (measured, estimate), strict=True)]
            error = f"{100 * (estimate / measured - 1):+.2f}"
            step = "first" if run["first_step"] else "later"
            lines.append(f"| {model['model']} | {run['modules'] or 'nothing'} | {step} | {measured:.3f} | {error} | {' | '.join(saved)} |")
    return lines


def peak_gb(model: dict[str, Any], run: dict[str, Any]) -> float:
    """Estimated peak of a run of the study, in 10⁹ bytes."""
    arguments = dict(model["arguments"])
    if run["modules"]:
        arguments |= {"recompute_granularity": "selective", "recompute_modules": run["modules"]}
    stage = stage_of_launch(arguments, model["gpus"], model["padded_vocab_size"], model["platform"])
    moments = optimizer_state(stage, parameters(stage)).moments if run["first_step"] else 0
    return (memory(stage).peak - moments) / GB
