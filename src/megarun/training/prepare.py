"""Input checks before torch is loaded: the plan, its settings, the number of processes, the token files."""

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from math import prod
from pathlib import Path

from megaplan.layout.ranks import MESH_AXES
from megaplan.spec.models import Spec
from megarun.checkpoint.manifest import MANIFEST
from megarun.data.mix import TokenMix
from megarun.data.token_file import TokenFile
from megarun.errors import refusal
from megarun.job.job import Job
from megarun.job.run import DEFAULT_CHECKPOINTS, KEYWORDS, Checkpoints, HeldOut, Run, SavedPlan
from megarun.job.support import refuse_unbuilt
from megarun.remote import RemotePath, any_path


def check_world_size(spec: Spec, num_processes: int, command: str) -> None:
    """Refuse a number of processes that differs from the plan's world size.

    Args:
        spec: Spec with the mesh.
        num_processes: Number of processes started.
        command: Command line after `megarun`, for the hint.

    Raises:
        MegaplanError: MP601.
    """
    planned = spec.mesh.world_size
    if planned == num_processes:
        return
    degrees = {axis: getattr(spec.mesh, axis) for axis in MESH_AXES}
    detail = f"mesh.world_size = {' · '.join(degrees)} = {' · '.join(map(str, degrees.values()))} = {prod(degrees.values())}"
    per_node = spec.device.per_node
    if planned == 1:
        hint = f"megarun {command}"
    elif planned <= per_node:
        hint = f"torchrun --standalone --nproc-per-node {planned} -m megarun {command}"
    else:
        per_node = per_node if planned % per_node == 0 else 1
        nodes = f"--nnodes {planned // per_node} --nproc-per-node {per_node} --rdzv-backend c10d --rdzv-endpoint HOST:PORT"
        hint = f"torchrun {nodes} -m megarun {command}"
    raise refusal("MP601", f"{detail}, processes started = {num_processes}", "mesh", (hint,))


def open_tokens(path: Path, spec: Spec) -> TokenFile:
    """Open a token file and check that the embedding has all its ids and that it has at least one row of the batch.

    Raises:
        MegaplanError: MP605, MP615, MP626, MP627, or an error of `TokenFile`.
    """
    source = TokenFile(path)
    if source.vocab_size > spec.model.vocab_size:
        detail = f"{path}: vocab_size = {source.vocab_size:,}, model.vocab_size = {spec.model.vocab_size:,}"
        raise refusal("MP605", detail, "model.vocab_size", (f"megaplan split SPEC --set model.vocab_size={source.vocab_size} -o PLAN",))
    features, header = spec.model.features, source.header
    if (features.structure is not None or features.relation_bias is not None) and source.classes is None:
        raise source.unclassified()
    if features.platform is not None and source.platforms is None:
        raise source.without_platforms()
    fields = (
        ("structure.num_categories", "num_categories", header.num_categories),
        ("platform.num_categories", "num_platforms", header.num_platforms),
        ("relation_bias.num_relations", "num_categories", header.num_categories),
    )
    for name, field, found in fields:
        feature, _, count = name.partition(".")
        section, key = getattr(features, feature), f"model.features.{name}"
        if section is not None and found > getattr(section, count):
            detail = f"{path}: {field} = {found}, {key} = {getattr(section, count)}"
            raise refusal("MP627", detail, key, (f"megaplan split SPEC --set {key}={found} -o PLAN",))
    source.num_windows(spec.batch.seq_length)
    return source


def open_data(words: Sequence[str], spec: Spec) -> TokenFile | TokenMix:
    """Open the token files of `--data`: one FILE, or several FILE=WEIGHT that are mixed.

    Raises:
        MegaplanError: MP623 if one of several has no weight or occurs twice, or an error of `open_tokens` or `TokenMix`.
    """
    if len(words) == 1 and not _weighted(words[0])[1]:
        return open_tokens(Path(words[0]), spec)
    named = [_weighted(word) for word in words]
    for path, weight in named:
        if not weight:
            raise refusal("MP623", f"--data {path}: one of {len(words)} files, without a weight", hints=(f"--data {path}=1",))
        if sum(path == other for other, _ in named) > 1:
            raise refusal("MP623", f"--data {path} is given twice")
    return TokenMix([(open_tokens(Path(path), spec), int(weight)) for path, weight in named])


def _weighted(word: str) -> tuple[str, str]:
    """FILE=3 -> FILE and 3; an existing file whose name ends like this takes precedence."""
    path, equals, weight = word.rpartition("=")
    return (path, weight) if equals and weight.isdecimal() and not Path(word).exists() else (word, "")


def open_held_out(path: Path, job: Job, every: int, num_batches: int | None) -> HeldOut:
    """Open the held-out file, with `num_batches` batches or all that it has.

    Raises:
        MegaplanError: MP622 if it has fewer, or an error of `open_tokens`.
    """
    return _held_out(open_tokens(path, job.spec), str(path), job, every, num_batches)


def hold_out(run: Run, fraction: str, every: int, num_batches: int | None) -> Run:
    """A run that holds out the last rows of each of its token files for evaluation, in the proportions of training.

    Args:
        run: Run on all rows.
        fraction: Share of each file's rows, a decimal number.
        every: See `HeldOut`.
        num_batches: Number of batches per evaluation; None for all held-out rows.

    Raises:
        MegaplanError: MP628 if the fraction is not valid, or leaves a part of a file without rows; MP622 if there are too few rows.
    """
    try:
        number = Decimal(fraction)
    except ArithmeticError:
        number = Decimal(0)
    if not (number.is_finite() and 0 < float(number) < 1):
        raise refusal("MP628", f"--validation-fraction {fraction}", "--validation-fraction", ("--validation-fraction 0.01",))
    training, held_out = run.source.split(Fraction(number))
    training.num_windows(run.job.spec.batch.seq_length)
    found = _held_out(held_out, f"--validation-fraction {fraction}", run.job, every, num_batches)
    return replace(run, source=training, held_out=found, validation_fraction=f"{number.normalize():f}")


def _held_out(source: TokenFile | TokenMix, name: str, job: Job, every: int, num_batches: int | None) -> HeldOut:
    num_rows, seq_length = job.global_batch
    windows = source.num_windows(seq_length)
    if windows < num_rows * (num_batches or 1):
        detail = f"{name}: {windows:,} rows of {seq_length:,} tokens; {num_batches or 1:,} batches of {num_rows:,} rows were requested"
        hints = (f"--eval-batches {windows // num_rows}",) if windows >= num_rows else ()
        raise refusal("MP622", detail, hints=hints)
    return HeldOut(source, every, num_batches or windows // num_rows)


def prepare(
    planned: tuple[Job, SavedPlan],
    data: Sequence[str],
    out: Path,
    num_steps: int | None,
    checkpoints: Checkpoints = DEFAULT_CHECKPOINTS,
    *,
    num_processes: int,
    command: str,
) -> Run:
    """Run all checks that need no torch.

    Raises:
        MegaplanError: A setting that megarun cannot build, a wrong number of processes, or an invalid token file.
    """
    job, saved = planned
    refuse_unbuilt(job.spec)
    check_world_size(job.spec, num_processes, command)
    _check_places(out, checkpoints.url)
    if checkpoints.resume not in KEYWORDS and not (any_path(checkpoints.resume) / MANIFEST).is_file():
        raise refusal("MP649", f"{checkpoints.resume}: no {MANIFEST}", file=checkpoints.resume)
    return Run(job, open_data(data, job.spec), out, num_steps or job.spec.training.steps, saved, checkpoints)


def out_folder(word: str | os.PathLike[str]) -> Path:
    """The folder of `--out`.

    Raises:
        MegaplanError: MP670, the word is empty: the working directory would be meant by accident.
    """
    if not os.fspath(word):
        raise refusal("MP670", "--out is empty", "--out", ("--out runs/NAME", "--out .    # the working directory"))
    return Path(word)


def _check_places(out: Path, url: str) -> None:
    """Refuse an output folder in a storage, and a checkpoint URL that is not a storage.

    Raises:
        MegaplanError: MP665.
    """
    if re.match(r"[a-z0-9+]+:/", str(out)):  # a path has one slash where a URL has two
        where = str(out).replace(":/", "://", 1)
        detail = f"--out {where}: metrics and lock need a local folder; checkpoints can be kept there"
        raise refusal("MP665", detail, "--out", (f"--out runs/{out.name} --checkpoint-url {where}",))
    if url and not isinstance(any_path(url), RemotePath):
        raise refusal(
            "MP665", f"--checkpoint-url {url}: not a URL", "--checkpoint-url", (f"--checkpoint-url file://{Path(url).absolute()}",)
        )
