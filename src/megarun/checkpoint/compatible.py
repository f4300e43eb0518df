"""Checks that a checkpoint can continue under a plan; needs no torch."""

import json
from collections.abc import Iterator
from typing import Any

from megaplan.errors import MegaplanError
from megaplan.plan.inputs import inputs_record
from megaplan.plan.text import MAX_PLAN_BYTES
from megarun.checkpoint.manifest import PLAN, Manifest, read_listed
from megarun.data.identity import data_text, same_data
from megarun.errors import refusal
from megarun.job.job import Job
from megarun.job.run import NOTHING, Run
from megarun.remote import AnyPath

_MOST = 8  # differences to list


def check_compatible(path: AnyPath, manifest: Manifest, run: Run, *, weights_only: bool) -> None:
    """Refuse a checkpoint of another model and, unless only weights are read, of other batches or other data.

    Cuts, mesh, schedule, sharding and recompute policy may differ.

    Raises:
        MegaplanError: MP641; MP647 if the number of experts differs (R-69); MP648 if the step would be another data position; MP653 if
            the data differs from the checkpoint's and `other_data` is off.
    """
    job, model_digest = run.job, run.plan.model_digest
    if manifest.model_digest != model_digest:
        lines = list(_differences(path, manifest, job))
        code = "MP647" if any(line.startswith("model.moe.num_experts") for line in lines) else "MP641"
        shown = [*lines[:_MOST], f"and {len(lines) - _MOST} more"] if len(lines) > _MOST else lines
        raise refusal(code, "\n".join(shown) or f"model digest {manifest.model_digest}, the plan's {model_digest}", file=str(path))
    if weights_only:
        return
    if manifest.seed != job.spec.training.seed:
        detail = f"training.seed = {job.spec.training.seed}, the checkpoint's = {manifest.seed}"
        raise refusal("MP648", detail, "training.seed", (f"--seed {manifest.seed}",), file=str(path))
    if manifest.global_batch != job.global_batch:
        saved, planned = (
            f"{sequences:,} sequences of {length:,} tokens" for sequences, length in (manifest.global_batch, job.global_batch)
        )
        detail = f"the plan's global batch is {planned}, the checkpoint's {saved}"
        raise refusal("MP648", detail, "schedule.num_microbatches", file=str(path))
    saved = manifest.validation_fraction
    if saved != run.validation_fraction:
        detail = f"--validation-fraction = {run.validation_fraction}, the checkpoint's = {saved}"
        hint = "omit --validation-fraction" if saved == NOTHING else f"--validation-fraction {saved}"
        raise refusal("MP648", detail, "--validation-fraction", (hint,), file=str(path))
    given = run.source.identity
    if manifest.data is not None and not run.checkpoints.other_data and not same_data(manifest.data, given):
        detail = f"--data is         {data_text(given)}\nthe checkpoint's  {data_text(manifest.data)}"
        hints = (f"--other-data    # continue from step {manifest.step} with the given token files",)
        raise refusal("MP653", detail, "--data", hints, file=str(path))


def _differences(path: AnyPath, manifest: Manifest, job: Job) -> Iterator[str]:
    try:
        saved = json.loads(read_listed(path, manifest, PLAN, MAX_PLAN_BYTES))["inputs"]["model"]
        yield from _pairs("model", saved, inputs_record(job.spec)["model"])
    except (MegaplanError, ValueError, KeyError, TypeError, RecursionError):
        return


def _pairs(key: str, saved: Any, ours: Any) -> Iterator[str]:
    if isinstance(saved, dict) and isinstance(ours, dict):
        for name in sorted(saved.keys() | ours.keys()):
            yield from _pairs(f"{key}.{name}", saved.get(name), ours.get(name))
    elif saved != ours:
        yield f"{key} = {json.dumps(ours)}, the checkpoint's = {json.dumps(saved)}"
