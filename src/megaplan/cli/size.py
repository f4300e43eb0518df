"""A job as the command line states it, with the defaults of the project's settings."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megaplan.api.load import LoadedJob, load
from megaplan.api.size import JobSize, load_sized
from megaplan.devices import canonical_name, named_device
from megaplan.diagnostics import refuse
from megaplan.spec.settings import Settings

if TYPE_CHECKING:
    from megaplan.api.load import FilePath


def sized_job(
    subject: str,
    changes: Sequence[str],
    size: JobSize,
    settings: Settings,
    *,
    costs: FilePath | None = None,
    device_file: FilePath | None = None,
    fetch: bool = False,
) -> LoadedJob:
    """The job of a command, its size completed by the project's settings.

    The device of the settings, if neither the source nor an argument names one, and their GPUs, if a model's config states no mesh.

    Raises:
        MegaplanError: Errors of `load_sized`; MP480, an override contradicts the size; MP504, no such device; MP825, not downloaded.
    """
    if size.device is not None:
        named_device(size.device, "--device ")
    refuse_two_values(changes, "--device", JobSize(device=size.device).changes)
    refuse_two_values(changes, "--seq", JobSize(seq_length=size.seq_length).changes)
    if fetch and not os.path.exists(subject):
        from megaplan.spec.hub import fetch_config  # noqa: PLC0415

        fetch_config(subject)
    if settings == Settings():
        return _loaded(subject, changes, size, costs, device_file)
    job = load(subject, *changes, *size.changes)
    if job.plan is not None:
        return _loaded(subject, changes, size, costs, device_file)
    stated = "device" in job.spec.model_fields_set
    if size.device is None and not stated:
        size = size._replace(device=settings.device)
    if size.gpus is None and job.is_model and "mesh" not in job.spec.model_fields_set:
        size = size._replace(gpus=settings.gpus)
    return _loaded(subject, changes, size, costs, device_file or settings.calibration)


def refuse_two_values(overrides: Sequence[str], option: str, stated: Sequence[str]) -> None:
    """Refuses an option and an override that give one key two values.

    Args:
        overrides: `KEY=VALUE` texts of `--set`.
        option: The option.
        stated: The option as `KEY=VALUE` texts, at most one text.

    Raises:
        MegaplanError: MP480.
    """
    for text in stated:
        key, _, value = text.partition("=")
        section, _, name = key.partition(".")
        other = next((given for each in reversed(overrides) if (given := _given(each, section, name)) is not None), None)
        if other is not None and canonical_name(value) != canonical_name(other):
            detail = f"{option} {value}, but --set gives {key} = {other}"
            raise refuse("MP480", detail, f"{option} {value}", f"--set {shlex.quote(f'{key}={other}')}")


def _given(override: str, section: str, name: str) -> str | None:
    """The value that an override gives a key, also as a part of its section; None if it gives none."""
    key, _, text = (part.strip() for part in override.partition("="))
    if key.lower() == f"{section}.{name}":
        return text.strip("'\"")
    if key.lower() != section:
        return None
    within = re.search(rf"\b{name}:\s*[\"']?([^,}}\"']+)", text) if text.startswith("{") else None
    return within[1].strip() if within else text if name == "name" and text and text[0] != "{" and text != "null" else None


def _loaded(subject: str, changes: Sequence[str], size: JobSize, costs: FilePath | None, device_file: FilePath | None) -> LoadedJob:
    if size.gpus is None and size.global_batch is None:
        return load(subject, *changes, *size.changes, costs=costs, device_file=device_file)
    job = load_sized(subject, changes, size, costs=costs)
    return job if device_file is None else load(job, device_file=device_file)
