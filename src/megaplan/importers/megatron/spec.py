"""`import_megatron`: a launch of Megatron-LM as a spec whose host is Megatron-Core."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megaplan.diagnostics import diagnostic
from megaplan.errors import Diagnostic, Location, MegaplanError, Severity
from megaplan.hosts.megatron.argument import flag
from megaplan.importers.imported import Imported
from megaplan.importers.megatron.arguments import Arguments, Given
from megaplan.importers.megatron.front_ends import refuse_front_end, sources_model, with_own_defaults
from megaplan.importers.megatron.launch import read_given, with_yaml_cfg
from megaplan.importers.megatron.model import read_model
from megaplan.importers.megatron.other_programs import refuse_other_program
from megaplan.importers.megatron.recorded import read_recording, unset_names
from megaplan.importers.megatron.run import read_batch, read_host, read_mesh, read_optimizer, read_state, wholly_sharded
from megaplan.importers.megatron.stack import read_stack
from megaplan.importers.megatron.training import read_training
from megaplan.importers.megatron.unset import remedies
from megaplan.importers.structure import Policy
from megaplan.low_precision import GENERATIONS
from megaplan.spec.comments import settings_in_comments
from megaplan.spec.document import Document, SourceMap
from megaplan.spec.load import LoadedSpec, check_document
from megaplan.spec.models import MAX_LAYERS
from megaplan.spec.overrides import apply_overrides

if TYPE_CHECKING:
    from megaplan.importers.megatron.recording.rows import Recording

VOCABULARY, LENGTH = "model.vocab_size", "batch.seq_length"
BLACKWELL = "b200"
"""The device of a launch that only Blackwell can run, until one is named."""
REASON = "the stages of the Megatron launch"


def import_megatron(
    text: str,
    name: str,
    overrides: Sequence[str] = (),
    gpus: int | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    argv: Sequence[str] = (),
    policy: Policy | None = None,
    number: int | None = None,
) -> Imported:
    """The spec of a launch.

    Args:
        text: A launch script or arguments, YAML of arguments, a log with their table, or Megatron-Bridge's configuration.
        name: Name of the file in diagnostics.
        overrides: `KEY=VALUE` texts, keys of the spec.
        gpus: GPUs of the job, overriding the text.
        environment: Environment variables of the launch.
        argv: Arguments of the script; with other forms they replace the text's own.
        policy: Policy for arguments that the importer does not know.
        number: Number of a script's launch among several, from 1.

    Raises:
        MegaplanError: Every error found: MP910 … MP926, or those of the spec that results.
    """
    launch = _of_sourced(text, name, environment, argv, number, overrides, policy)
    if launch is None:
        refuse_front_end(text, name)
        launch = _arguments(read_given(text, name, environment or {}, argv, number), name, overrides, policy)
    settings = settings_in_comments(text)
    if settings:
        launch.say(f"comments of an export: {', '.join(settings)}")
    return _imported(launch, name, (*settings, *overrides), gpus)


def import_recording(
    recording: Recording,
    name: str,
    overrides: Sequence[str] = (),
    gpus: int | None = None,
    number: int | None = None,
    policy: Policy | None = None,
) -> Imported:
    """The spec of a launch that was recorded.

    Args:
        recording: The recorded commands.
        name: Name of the script in diagnostics.
        overrides: `KEY=VALUE` texts, keys of the spec.
        gpus: GPUs of the job, overriding the launch.
        number: Number of the launch among several, from 1.
        policy: Policy for arguments that the importer does not know.

    Raises:
        MegaplanError: MP923 if there is no launch; or as `import_megatron`.
    """
    try:
        given = read_recording(recording, name, number)
        launch = _arguments(given, name, overrides, policy)
        launch = with_own_defaults(launch) if sources_model(recording.text(name)) else launch
        if launch.foreign():
            launch.stop()
    except MegaplanError:
        refuse_front_end(recording.text(name), name)  # a more precise reason, if there is one
        raise
    try:
        return _imported(launch, name, overrides, gpus)
    except MegaplanError as error:
        empty = unset_names(recording)
        hints = remedies(empty[:6], name)
        note = diagnostic("MP919", f"set nowhere, and empty: {', '.join(empty)}", Location(name), hints, Severity.NOTE)
        raise MegaplanError([*error.diagnostics, *([note] if empty else [])]) from None


def _imported(launch: Arguments, name: str, overrides: Sequence[str], gpus: int | None) -> Imported:
    refuse_other_program(launch)
    if launch.foreign():
        launch.stop()
    _refuse_adapters(launch)
    plain, stated = _document(launch, _title(name), gpus)
    recipe = plain["precision"].get("recipe")
    if recipe and GENERATIONS[recipe["name"]] == ("blackwell",) and not any(text.lstrip().startswith("device") for text in overrides):
        plain["device"] = {"name": BLACKWELL}
        launch.say(f"{recipe['name']} multiplies on Blackwell, and the launch names no device: {BLACKWELL} until --set device.name=…")
    launch.finish()
    document = apply_overrides(Document(plain, SourceMap(name)), overrides)
    loaded = check_document(document)
    return Imported.of(document, (*launch.warnings, *([] if stated else [_assumed(loaded, name)])), loaded)


def _refuse_adapters(launch: Arguments) -> None:
    """Refuses low-rank adapters, which host megarun has.

    Raises:
        MegaplanError: MP902.
    """
    rank = launch.values.get("lora_rank")
    if rank is None:
        return
    alpha = launch.values.get("lora_alpha") or rank
    detail = (
        f"{flag('lora_rank')} {rank}: host megatron has no low-rank adapters; host megarun has, by the section lora (docs/guides/lora.md)"
    )
    hint = f"megaplan import hf CONFIG.json --set lora.rank={rank} --set lora.alpha={alpha} -o spec.yaml"
    raise MegaplanError([diagnostic("MP902", detail, launch.at("lora_rank"), (hint,))])


def _document(launch: Arguments, title: str, gpus: int | None) -> tuple[dict[str, Any], bool]:
    stack = read_stack(launch, launch.whole("pipeline_model_parallel_size", most=MAX_LAYERS))
    mesh, stated = read_mesh(launch, len(stack.stages), gpus)
    state = read_state(launch, gpt=not stack.hybrid)
    host, recompute = read_host(launch, stack, muon=state["optimizer"]["matrix"] == "muon")
    host |= read_optimizer(launch, state["precision"].get("recipe", {}).get("name"))
    plain: dict[str, Any] = {
        "format": "megaplan.spec/1",
        "name": title,
        "model": read_model(launch, stack, mesh["tp"]),
        "mesh": mesh,
        **read_batch(launch, mesh),
        **state,
        "host": host,
    }
    if recompute:
        plain["recompute"] = recompute
    if wholly_sharded(launch):
        plain["sharding"] = {"reshard_after_forward": True}
    if len(stack.stages) > 1:
        plain["split"] = {"mode": "manual", "reason": REASON}
    training = read_training(launch)
    return {**plain, **({"training": training} if training else {})}, stated


def _of_sourced(
    text: str,
    name: str,
    environment: Mapping[str, str] | None,
    argv: Sequence[str],
    number: int | None,
    overrides: Sequence[str],
    policy: Policy | None,
) -> Arguments | None:
    """The launch of a front end whose script sources the model's arguments, if the file is there; None for every other text."""
    if not sources_model(text):
        return None
    try:
        given = read_given(text, name, environment or {}, argv, number)
    except MegaplanError:
        return None
    if given.values.get("num_layers") is None or given.values.get("hidden_size") is None:
        return None
    launch = with_own_defaults(_arguments(given, name, overrides, policy))
    launch.guess("", "rollouts and their engine are not counted: the plan is of training steps alone, of sequences of seq_length")
    return launch


def _arguments(given: Given, name: str, overrides: Sequence[str], policy: Policy | None) -> Arguments:
    """The arguments of a launch, with missing ones taken from overrides."""
    given, length = with_yaml_cfg(given, name), _stated(overrides, LENGTH)
    if length is not None and (given.values.get("seq_length") is None):
        given = replace(given, values={**given.values, "seq_length": length})
    return Arguments(given, name, _stated(overrides, VOCABULARY), policy)


def _stated(overrides: Sequence[str], key: str) -> int | None:
    """A positive integer that an override states."""
    found = [value for name, _, value in (override.partition("=") for override in overrides) if name.strip() == key]
    return int(found[-1]) if found and found[-1].strip().isdigit() and int(found[-1]) else None


def _title(name: str) -> str:
    last = re.sub(r"[^A-Za-z0-9._-]+", "-", name.rpartition("/")[2].partition(".")[0]).strip("-._")
    return last[:100] or "megatron"


def _assumed(loaded: LoadedSpec, name: str) -> Diagnostic:
    size = loaded.spec.mesh.world_size
    return diagnostic("MP917", f"{size} GPUs until set", Location(name), (f"--gpus {size}",), severity=Severity.NOTE)
