"""A job as the command line states it, with the defaults of the project's settings."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megaplan.api.load import LoadedJob, load
from megaplan.api.size import JobSize, load_sized
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

    The settings' device counts where neither the source nor an argument names one, their GPUs where a model's config states no mesh.

    Raises:
        MegaplanError: Those of `load_sized`; MP825, the config was not downloaded.
    """
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


def _loaded(subject: str, changes: Sequence[str], size: JobSize, costs: FilePath | None, device_file: FilePath | None) -> LoadedJob:
    if size.gpus is None and size.global_batch is None:
        return load(subject, *changes, *size.changes, costs=costs, device_file=device_file)
    job = load_sized(subject, changes, size, costs=costs)
    return job if device_file is None else load(job, device_file=device_file)
