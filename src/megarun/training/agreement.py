"""Checks that all ranks of a job have equal settings, software, device, or their pool's, and folder, before any process group is created.

Different settings would otherwise silently train another model, or deadlock: the mesh decides a rank's groups, `--save-every` its
collectives. Through the job's store every rank compares a digest with rank 0's, and reads rank 0's settings only if it differs. All ranks
then fail with the same message.

Paths are not compared: a folder may have another name on another node. Token files are compared by their headers, a checkpoint to resume
from by its manifest.
"""

import hashlib
import json
import platform
import re
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megaplan import __version__
from megaplan.spec.pools import spec_on
from megaplan.terminal.versions import installed
from megarun.checkpoint.manifest import MANIFEST, MAX_MANIFEST_BYTES
from megarun.data.identity import DataFiles, data_text
from megarun.errors import place, refusal
from megarun.files import read_bounded
from megarun.job.run import KEYWORDS, Run
from megarun.launch.process_group import Launch
from megarun.launch.session import wait_for
from megarun.remote import any_path
from megarun.training.folder import STALE_SECONDS, sees

PREFIX = "megarun/inputs"
DIGEST, TEXT, TOKEN = f"{PREFIX}/digest", f"{PREFIX}/text", f"{PREFIX}/token"
SEE_SECONDS = 10.0
PACKAGES = ("torch", "triton", "numpy")
ACKNOWLEDGE_LIMIT = timedelta(seconds=5)
ABSENT = "absent"
MOST_NAMED = 8

_WORD = re.compile(r"[a-z0-9]+")
"""Words of a device's name."""
ComparedInputs = dict[str, tuple[str, str]]
"""The compared value and its text for messages, by key."""


def require_agreement(run: Run, launch: Launch, device: str) -> None:
    """Compare this rank's inputs with those of all others; every process of the job calls it.

    Args:
        run: Run of this rank.
        launch: Launch of this rank, with the store.
        device: Device of this rank, as `device_text` names it.

    Raises:
        MegaplanError: MP656 on every rank if any rank's settings differ from rank 0's; MP681 if a rank has another device than its pool;
            MP650 if a rank does not publish its settings in time.
    """
    if launch.world_size == 1:
        return
    inputs = inputs_of(run, device)
    text = json.dumps(inputs)
    digest = hashlib.sha256(json.dumps({key: compared for key, (compared, _) in inputs.items()}, sort_keys=True).encode()).hexdigest()
    lines: list[str] = []
    if launch.rank == 0:
        launch.store.set(TEXT, text)
        launch.store.set(DIGEST, digest)
    elif _read(launch, DIGEST) != digest:
        lines = differences(inputs, json.loads(_read(launch, TEXT)))
    _conclude("MP656", "settings", lines, run, launch)
    _require_planned_devices(run, launch, device)


def _require_planned_devices(run: Run, launch: Launch, device: str) -> None:
    """Check that every rank of a plan with pools is on the device of its stages (MP681).

    If the plan gives a device's FLOPs, its name is free and is not compared.
    """
    spec, model = run.job.spec, device.partition(", ")[2]
    if not spec.pools or not model:
        return
    planned = spec_on(spec, launch.rank * spec.mesh.pp // spec.mesh.world_size).device
    is_planned = bool(planned.peak_flops) or set(_WORD.findall(model.lower())) >= _words_of(planned.name)
    _conclude("MP681", "device", [] if is_planned else [f"device = {model}, planned {planned.name}"], run, launch)


def _words_of(name: str) -> set[str]:
    """The words of a device's name in a spec that torch's name contains: `h100` and `pcie` for `h100-pcie`."""
    first, *more = name.split("-")
    return {first, *({"pcie", "nvl", "40gb"} & set(more))}


def require_one_folder(run: Run, launch: Launch, token: str) -> None:
    """Check that every rank reads rank 0's lock in its own `--out`; every process of the job calls it.

    If checkpoints are in a storage, nodes may have different folders.

    Args:
        run: Run of this rank.
        launch: Launch of this rank, with the store.
        token: Token of rank 0's lock; on other ranks it is read from the store.

    Raises:
        MegaplanError: MP659 on every rank if a rank has another folder; MP650 if a rank does not answer in time.
    """
    if launch.world_size == 1 or run.checkpoints.url:
        return
    lines: list[str] = []
    if launch.rank == 0:
        launch.store.set(TOKEN, token)
    else:  # rank 0 may wait for the lock of a job that was killed on another machine
        wrong = sees(run.out, _read(launch, TOKEN, launch.start_timeout + STALE_SECONDS), SEE_SECONDS)
        lines = [wrong] if wrong else []
    _conclude("MP659", "folder", lines, run, launch)


def _conclude(code: str, topic: str, lines: list[str], run: Run, launch: Launch) -> None:
    """Give rank 0 this rank's lines, none if all is well; every rank raises the same error if any has lines."""
    verdict_key = f"{PREFIX}/{topic}/verdict"
    if launch.rank == 0:
        own = {0: (socket.gethostname(), lines)} if lines else {}
        verdict = "\n".join(_account(own | _answers(launch, topic), run))
        launch.store.set(verdict_key, verdict)
        if verdict:  # this rank may host the store, which closes when it exits
            with suppress(RuntimeError):
                launch.store.wait([_key(topic, "acknowledged", rank) for rank in range(1, launch.world_size)], ACKNOWLEDGE_LIMIT)
    else:
        launch.store.set(_key(topic, "answer", launch.rank), json.dumps([socket.gethostname(), lines]))
        verdict = _read(launch, verdict_key, 2 * launch.start_timeout)  # rank 0 finds the ranks that do not answer
        launch.store.set(_key(topic, "acknowledged", launch.rank), "1")
    if verdict:
        raise refusal(code, verdict)


def inputs_of(run: Run, device: str) -> ComparedInputs:
    """All settings that must be equal on every rank, by their user-visible names."""
    job, saved = run.job, run.checkpoints
    values: dict[str, Any] = dict(_leaves("", job.spec.model_dump(mode="json")))
    values["spans"] = [[slot.pp_rank, slot.start, slot.stop] for slot in job.layout.slots]
    values["plan digest"] = run.plan.plan_digest
    values |= {
        "--steps": run.num_steps,
        "--save-every": saved.save_every,
        "--keep": saved.keep,
        "--checkpoint-url": saved.url or None,
        "--weights-only": saved.weights_only,
        "--other-data": saved.other_data,
        "--memory-copies": saved.memory_copies,
        "--check-replicas": saved.check_replicas,
        "--compile": run.compiled,
        "--validation-fraction": run.validation_fraction,
        "--eval-every": run.held_out.every if run.held_out else None,
        "--eval-batches": run.held_out.num_batches if run.held_out else None,
        "device": device.partition(", ")[0] if job.spec.pools else device,
        "python": platform.python_version(),
        **{f"{name} version": installed(name) for name in PACKAGES},
        "megaplan version": __version__,
        "source code": _source_digest(),
    }
    found = {key: (text := json.dumps(value), text) for key, value in values.items()}
    found["--data"] = _data(run.source.identity)
    found["--eval-data"] = _data(run.held_out.source.identity if run.held_out else ())
    found["--resume"] = _resume(saved.resume)
    return found


@cache
def _source_digest() -> str:
    """SHA-256 of the installed sources, by module, and of measured options of kernels, which may change the last bits of results.

    An installation from a working tree has the same version after every change.
    """
    digest = hashlib.sha256()
    for package in ("megaplan", "megarun", "megakernels"):
        found = find_spec(package)
        for folder in map(Path, (found.submodule_search_locations if found is not None else None) or ()):
            for path in sorted([*folder.rglob("*.py"), *folder.glob("tuned/*.json")]):
                digest.update(f"{package}/{path.relative_to(folder).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _leaves(path: str, value: Any) -> Iterable[tuple[str, Any]]:
    """A document's values by dotted key."""
    if isinstance(value, Mapping) and value:
        for name, each in value.items():
            yield from _leaves(f"{path}.{name}" if path else name, each)
    else:
        yield path, value


def _data(files: DataFiles) -> tuple[str, str]:
    return json.dumps([file.key for file in files]), data_text(files)


def _resume(word: str) -> tuple[str, str]:
    """The keyword, or the manifest of the named checkpoint."""
    if word in KEYWORDS:
        return word, word
    digest = hashlib.sha256(read_bounded(any_path(word) / MANIFEST, MAX_MANIFEST_BYTES).encode()).hexdigest()
    return digest, f"{word} (manifest sha256 {digest[:16]}…)"


def differences(ours: ComparedInputs, first: Mapping[str, Iterable[str]]) -> list[str]:
    """Differences from rank 0's settings, one line each; derived values only if no other difference explains them."""
    lines = []
    for key in {**ours, **first}:
        mine, its = tuple(ours.get(key, (ABSENT, ABSENT))), tuple(first.get(key, (ABSENT, ABSENT)))
        if mine[0] != its[0]:
            lines.append((key, f"{key} = {mine[1]}, rank 0's = {its[1]}"))
    stated = [line for key, line in lines if key != "plan digest"]
    return stated or [line for _, line in lines]


def _answers(launch: Launch, topic: str) -> dict[int, tuple[str, list[str]]]:
    """Host and differences of every other rank that differs."""
    ranks = range(1, launch.world_size)
    # a rank checks for the lock before it answers
    _wait(launch, [_key(topic, "answer", rank) for rank in ranks], launch.start_timeout + SEE_SECONDS * (topic == "folder"))
    answers = {rank: json.loads(launch.store.get(_key(topic, "answer", rank))) for rank in ranks}
    return {rank: (host, lines) for rank, (host, lines) in answers.items() if lines}


def _account(answers: Mapping[int, tuple[str, list[str]]], run: Run) -> list[str]:
    """Ranks with the same differences share their lines."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for rank, (host, lines) in answers.items():
        groups.setdefault((host, *lines), []).append(rank)
    account: list[str] = []
    for (host, *lines), ranks in groups.items():
        more = [f"and {len(lines) - MOST_NAMED} more"] if len(lines) > MOST_NAMED else []
        account += [f"{_named(ranks, run)} on {host}:", *(f"  {line}" for line in [*lines[:MOST_NAMED], *more])]
    return account


def _named(ranks: list[int], run: Run) -> str:
    """One rank with its coordinates in rank 0's mesh, several by number."""
    if len(ranks) == 1:
        return place(ranks[0], run.job.spec.mesh)
    shown = ", ".join(map(str, ranks[:MOST_NAMED]))
    return f"ranks {shown}" + (f" and {len(ranks) - MOST_NAMED} more" if len(ranks) > MOST_NAMED else "")


def _key(topic: str, name: str, rank: int) -> str:
    return f"{PREFIX}/{topic}/{name}/{rank}"


def _read(launch: Launch, key: str, limit: float | None = None) -> str:
    _wait(launch, [key], limit or launch.start_timeout)
    return launch.store.get(key).decode()


def _wait(launch: Launch, keys: list[str], limit: float) -> None:
    try:
        wait_for(launch.store, keys, timedelta(seconds=limit))
    except RuntimeError:  # raised by the store when the wait times out
        silent = [key.rpartition("/")[2] for key in keys if not launch.store.check([key])] if launch.rank == 0 else ["0"]
        named = ", ".join(f"rank {rank}" for rank in silent[:MOST_NAMED]) + (" …" if len(silent) > MOST_NAMED else "")
        detail = f"started, but did not publish their settings within {limit:g} s: {named}"
        raise refusal("MP650", detail) from None
