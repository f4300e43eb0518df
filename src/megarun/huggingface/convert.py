"""A model's folder as a checkpoint of a plan, and a checkpoint as a model's folder."""

import json
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save

from megaplan.errors import Diagnostic, MegaplanError, Severity
from megaplan.importers.hf import NESTED, ImportedConfig, import_hf, text_fields
from megaplan.inventory.build import build_inventory
from megaplan.inventory.tensors import Inventory
from megaplan.plan.document import PlanDocument
from megaplan.plan.read import parse_plan
from megaplan.plan.text import MAX_PLAN_BYTES
from megarun.checkpoint.index import INDEX, SavedTensor, read_index
from megarun.checkpoint.manifest import FOLDER, PLAN, Manifest, folder_name, read_listed, read_manifest
from megarun.checkpoint.pieces import Pieces, PiecesSavePlanner
from megarun.checkpoint.retention import Retention
from megarun.checkpoint.storage import DTYPES, CheckpointWriter, first_reason
from megarun.dtypes import TORCH_DTYPES
from megarun.errors import refusal
from megarun.files import read_bounded
from megarun.huggingface.adapters import Adapters
from megarun.huggingface.changes import to_ours, to_theirs
from megarun.huggingface.describe import DERIVED, derived_config, write_card, write_tokenizer
from megarun.huggingface.differences import model_differences
from megarun.huggingface.files import CONFIG, MAX_JSON_BYTES, Group, WeightFiles, unreadable, write_shards
from megarun.huggingface.names import NAMES, Names
from megarun.huggingface.rules import EXPERT_BIAS, Rule, copied_rules, weight_rules
from megarun.job.job import Job
from megarun.job.run import SavedPlan
from megarun.remote import AnyPath

MOST_NAMED = 8
TEXT_PART = "language_model."
"""The text model in the names of a model of several parts."""
_NOT_READ = re.compile(r"(^|\.)rotary_emb\.inv_freq$|^mtp\.|\.act_fn\.(beta|eps)$")
"""Buffers that older releases stored and that follow from the config, and prediction modules that a plan lacks."""
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_OTHER_FILES = ("generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json")


@dataclass(frozen=True, slots=True)
class Moved:
    """Result of an import or an export.

    Attributes:
        path: The checkpoint's folder, or the model's.
        num_tensors: Number of tensors in the Hugging Face naming.
        num_bytes: Bytes of these tensors.
        left: Stored tensors that the model does not have, which were not read.
        warnings: Settings of the config that megarun does not compute.
    """

    path: Path
    num_tensors: int
    num_bytes: int
    left: tuple[str, ...]
    warnings: tuple[Diagnostic, ...]


class _Lazy(Pieces):
    """A tensor that is read only when DCP writes it; its shape and dtype are known before."""

    def __init__(self, rule: Rule, index: int, files: WeightFiles) -> None:
        whole = Pieces.unsharded(torch.empty(rule.ours[index].shape, dtype=files.header(rule.theirs[0]).dtype, device="meta"))
        super().__init__(whole.local, tuple(whole.shape), whole.boxes)
        self._rule, self._index, self._files = rule, index, files

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return to_ours(self._rule, [self._files.read(name) for name in self._rule.theirs])[self._index]


def import_weights(planned: tuple[Job, SavedPlan], model: Path, out: Path) -> Moved:
    """Write the weights of a model's folder as a checkpoint of step 0, without optimizer state; a plan's adapters are not in it.

    Args:
        planned: The plan to train.
        model: Folder with `config.json` and safetensors.
        out: A new folder with a run's layout.

    Raises:
        MegaplanError: A file cannot be read, or does not fit the plan.
    """
    (job, plan), config = planned, _config(model / CONFIG)
    if out.exists():
        raise refusal("MP608", f"{out} exists", hints=(f"-o {out}-2",), file=str(out))
    rules, imported = _rules(job, config, model / CONFIG)
    files = WeightFiles.of(model)
    nested = isinstance(config.get(NESTED), dict)
    files = files.written_as((name for rule in rules for name in rule.theirs), partial(_other_names, NAMES[imported.family], nested))
    left = _check_tensors(rules, files, job, copied_rules(NAMES[imported.family], job.inventory), nested=nested)
    state = {ours.name: _Lazy(rule, index, files) for rule in rules for index, ours in enumerate(rule.ours)}
    manifest = Manifest(
        step=0,
        seed=job.spec.training.seed,
        global_batch=job.global_batch,
        model_digest=plan.model_digest,
        plan_digest=plan.plan_digest,
        world_size=1,
        torch=torch.__version__,
        files={},
    )
    writer = CheckpointWriter(out, manifest, plan.text, Retention(2))
    try:
        out.mkdir(parents=True)
        with warnings.catch_warnings():  # `no_dist` warns that there is no process group
            warnings.simplefilter("ignore", UserWarning)
            save(dict(state), storage_writer=writer, planner=PiecesSavePlanner(), no_dist=True)
    except (CheckpointException, OSError, RuntimeError) as error:
        writer.discard()
        raise refusal("MP645", f"{out}: {first_reason(error)}", file=str(out)) from None
    size = sum(pieces.local.nbytes for pieces in state.values())
    return Moved(out / FOLDER / folder_name(0), len(files.places) - len(left), size, left, _not_carried(imported))


def export_weights(
    checkpoint: AnyPath, config_path: Path | None, out: Path, dtype: torch.dtype | None = None, tokenizer: Path | None = None
) -> Moved:
    """Write a checkpoint's parameters as a model's folder that `from_pretrained` loads; adapters are merged into their linears.

    Args:
        checkpoint: Folder of the checkpoint.
        config_path: `config.json` of the model, whose folder's files of tokenizer and generation are copied; None to derive a config.
        out: A new folder; of a config that nests a text model it is that model alone.
        dtype: Dtype of the weights; None to keep the checkpoint's.
        tokenizer: `tokenizer.json` of the run, if the config's folder has none.

    Raises:
        MegaplanError: A file cannot be read, or the config is of another model, or of no type that megarun derives.
    """
    if out.exists():
        raise refusal("MP608", f"{out} exists", hints=(f"-o {out}-2",), file=str(out))
    manifest = read_manifest(checkpoint)
    job = Job.from_plan(plan_of(checkpoint, manifest))
    config = derived_config(job) if config_path is None else _config(config_path)
    rules, imported = _rules(job, config, config_path or Path(DERIVED))
    saved = read_index(checkpoint, manifest.files.get(INDEX))
    adapters = Adapters.of(checkpoint, job, saved)
    saved = adapters.whole(saved, str(TORCH_DTYPES[job.spec.precision.params.of_products]))
    _require_shapes(rules, saved, checkpoint)
    stored = {name: dtype or DTYPES[each.dtype] for name, each in saved.items() if each.dtype in DTYPES}
    stored |= {name: torch.float32 for name in stored if name.endswith(f".{EXPERT_BIAS}")}  # models keep it in fp32, whatever their dtype
    written = [*rules, *copied_rules(NAMES[imported.family], job.inventory)]
    main = stored[rules[0].ours[0].name]
    groups = [_group(rule, adapters, stored[rule.ours[0].name]) for rule in written]
    groups += _constants(NAMES[imported.family], len(job.inventory.layers), main)
    out.mkdir(parents=True)
    try:
        write_shards(out, groups, _base(job).parameters)
        ends = _write_words(out, config_path, tokenizer, job.spec.batch.seq_length)
        fields = {**text_fields(config), **ends, "dtype": str(main).removeprefix("torch.")}
        (out / CONFIG).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
        write_card(out, job, manifest, fields, _base(job).parameters)
    except OSError as error:
        raise refusal("MP645", f"{out}: {error.strerror or error}", file=str(out)) from None
    sizes = [size for group in groups for size in group.sizes.values()]
    return Moved(out, len(sizes), sum(sizes), (), _not_carried(imported))


def _require_shapes(rules: Iterable[Rule], saved: Mapping[str, SavedTensor], checkpoint: AnyPath) -> None:
    for ours in (each for rule in rules for each in rule.ours):
        if ours.name not in saved or saved[ours.name].shape != ours.shape:
            found = list(saved[ours.name].shape) if ours.name in saved else "missing"
            raise refusal("MP644", f"{checkpoint}: {ours.name} is {found}, the plan's {list(ours.shape)}", file=str(checkpoint))


def _write_words(out: Path, config_path: Path | None, tokenizer: Path | None, longest: int) -> dict[str, int]:
    """Files of tokenizer and generation: from a given config's folder, else the run's tokenizer, whose ends a derived config names."""
    for name in _OTHER_FILES:
        if config_path is not None and (source := config_path.with_name(name)).is_file():
            shutil.copyfile(source, out / name)
    if tokenizer is None or any((out / name).exists() for name in _OTHER_FILES[1:]):
        return {}
    ends = write_tokenizer(tokenizer, out, longest)
    return ends if config_path is None else {}


def _constants(names: Names, num_layers: int, dtype: torch.dtype) -> Iterator[Group]:
    """Buffers of one value, of every decoder layer."""
    for layer in range(num_layers // names.letters):
        for name, value in names.constants.items():
            whole = f"{names.layer.format(layer=layer)}{name}"
            tensor = torch.tensor(value, dtype=dtype)
            yield Group({whole: tensor.nbytes}, partial(dict, {whole: tensor}))


def plan_of(checkpoint: AnyPath, manifest: Manifest) -> PlanDocument:
    """The plan of a checkpoint."""
    loaded = parse_plan(read_listed(checkpoint, manifest, PLAN, MAX_PLAN_BYTES), str(checkpoint / PLAN))
    if loaded.tampered:
        raise MegaplanError(loaded.tampered)
    return loaded.plan


def _group(rule: Rule, adapters: Adapters, dtype: torch.dtype) -> Group:
    def values() -> Mapping[str, Tensor]:
        ours = [tensor for _, tensor in adapters.tensors([each.name for each in rule.ours])]
        theirs = to_theirs(rule, ours)
        return {name: tensor.to(dtype) for name, tensor in zip(rule.theirs, theirs, strict=True)}

    size = torch.empty(rule.shape, dtype=dtype, device="meta").nbytes
    return Group(dict.fromkeys(rule.theirs, size), values)


def _config(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_bounded(path, MAX_JSON_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise unreadable(path, error) from None
    if not isinstance(found, dict):
        raise refusal("MP801", f"{path} is not a mapping", file=str(path))
    return found


def _rules(job: Job, config: Mapping[str, Any], path: Path) -> tuple[list[Rule], ImportedConfig]:
    """The rules for a plan with the config's model."""
    imported = import_hf(json.dumps(config), str(path))
    if imported.family not in NAMES:
        detail = f"{path}: model_type = {imported.family}, but tensors are named for {', '.join(NAMES)}"
        raise refusal("MP664", detail, file=str(path))
    different = model_differences(imported, config, job.spec)
    if different:
        raise refusal("MP664", "\n".join(_most(different)), hints=(f"megaplan split {path} -o PLAN",), file=str(path))
    try:
        return weight_rules(NAMES[imported.family], job.spec, _base(job), text_fields(config)), imported
    except KeyError as error:
        raise refusal("MP664", f"{path}: {imported.family} has no name for {error.args[0]}", file=str(path)) from None


def _base(job: Job) -> Inventory:
    """The model's own tensors, without adapters."""
    return build_inventory(job.spec.model_copy(update={"lora": None}))


def _other_names(names: Names, nested: bool, name: str) -> Iterable[str]:
    """Other names that files may have for a tensor: as transformers writes it, or inside a model of several parts."""
    spelled = [name] if names.also is None else [name, name.replace(*names.also)]
    yield from spelled[1:]
    if nested:
        for one in spelled:
            yield f"{TEXT_PART}{one}"
            yield one.replace("model.", f"model.{TEXT_PART}", 1)


def _check_tensors(rules: Iterable[Rule], files: WeightFiles, job: Job, copies: Iterable[Rule], *, nested: bool) -> tuple[str, ...]:
    """Compare the stored tensors with the rules; returns the names of unread tensors that may be omitted.

    Raises:
        MegaplanError: MP663.
    """
    wanted = {name: rule for rule in rules for name in rule.theirs}
    shared = _shared(wanted, copies, files)
    wrong = [*_misfits(wanted, files), *_differing_copies(shared, files)]
    numbers = [int(found[1]) for name in wanted if (found := _LAYER.search(name))]
    last = max(numbers, default=0)
    left = []
    for name in files.places.keys() - wanted.keys():
        number = _LAYER.search(name)
        tied = job.inventory.tied and name == "lm_head.weight"
        other_part = nested and TEXT_PART not in name
        if name in shared or tied or other_part or _NOT_READ.search(name) or (number and int(number[1]) > last):
            left.append(name)
        else:
            wrong.append(f"{name} {list(files.header(name).shape)} belongs to no tensor of the plan")
    if wrong:
        raise refusal("MP663", "\n".join(_most(sorted(wrong))), file=str(files.folder))
    return tuple(sorted(left))


def _differing_copies(shared: Mapping[str, str], files: WeightFiles) -> Iterator[str]:
    for name, theirs in shared.items():
        if files.header(name) != files.header(theirs) or not torch.equal(files.read(name), files.read(theirs)):
            yield f"{name} is not {theirs}, but a prediction depth of megarun shares that tensor"


def _misfits(wanted: Mapping[str, Rule], files: WeightFiles) -> Iterator[str]:
    for name, rule in wanted.items():
        if name not in files.places:
            yield f"{name} is missing"
        elif (shape := files.header(name).shape) != rule.shape:
            yield f"{name} is {list(shape)}, the plan's {rule.ours[0].name} needs {list(rule.shape)}"


def _shared(wanted: Mapping[str, Rule], copies: Iterable[Rule], files: WeightFiles) -> dict[str, str]:
    """The stored copies of a prediction depth, and the names of their originals."""
    holders = {rule.ours[0].name: name for name, rule in wanted.items()}
    found = {copy.theirs[0]: holders[copy.ours[0].name] for copy in copies}
    return {name: theirs for name, theirs in found.items() if {name, theirs} <= files.places.keys()}


def _most(lines: list[str]) -> list[str]:
    return lines if len(lines) <= MOST_NAMED else [*lines[:MOST_NAMED], f"and {len(lines) - MOST_NAMED} more"]


def _not_carried(imported: ImportedConfig) -> tuple[Diagnostic, ...]:
    return tuple(each for each in imported.loaded.diagnostics if each.severity is Severity.WARNING and each.code == "MP820")
