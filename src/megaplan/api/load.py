"""`megaplan.load`: a spec, plan or Hugging Face config as a job whose cuts are decided."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

from megaplan.diagnostics import refuse
from megaplan.errors import Diagnostic, MegaplanError
from megaplan.inventory.build import build_inventory
from megaplan.inventory.tensors import Inventory
from megaplan.layout.build import Spans, build_layout
from megaplan.layout.ranks import Layout
from megaplan.plan.text import MAX_PLAN_BYTES
from megaplan.results import Result
from megaplan.spec.document import Document, SourceMap
from megaplan.spec.hub import MAX_CONFIG_BYTES
from megaplan.spec.load import LoadedSpec, check_document, load_spec_text
from megaplan.spec.models import Spec
from megaplan.spec.read import MAX_BYTES, STDIN, display_name, model_file, read_text

if TYPE_CHECKING:
    from megaplan.cost.values import MeasuredCosts
    from megaplan.partition.values import Cuts
    from megaplan.plan.document import PlanDocument

FilePath: TypeAlias = str | os.PathLike[str]


class HasDict(Protocol):
    """An object that gives its values as a mapping, as the config objects of transformers do."""

    def to_dict(self) -> Mapping[str, Any]:
        """The values."""


Source: TypeAlias = "FilePath | Mapping[str, Any] | HasDict | Spec | PlanDocument | LoadedJob"
"""A file (`-` is standard input), a document as plain values, a config object, a spec, a plan, or a job that was loaded before."""

MAPPING_NAME = "<dict>"
PLAN_NAME = "<plan>"


@dataclass(frozen=True, repr=False)
class LoadedJob:
    """A spec or plan that was read and checked; `megaplan.load` makes it.

    Attributes:
        spec: The spec, changes applied.
        plan: The plan that was read, before changes; None for a spec or a Hugging Face config.
        name: Name of the source in diagnostics: the path as given, `<stdin>`, `<dict>` or `<plan>`.
        changes: Every `KEY=VALUE` that was applied, in order.
        costs: Measured times of the layers; None for modelled ones.
        read_diagnostics: Warnings and notes of reading.
        costs_path: Path of the measured times, as given.
        sized: Changes of the layout that a quick search chose for a stated number of GPUs; None if none was stated.
    """

    spec: Spec
    plan: PlanDocument | None
    name: str
    changes: tuple[str, ...]
    costs: MeasuredCosts | None
    read_diagnostics: tuple[Diagnostic, ...]
    _text: str | None = None
    costs_path: FilePath | None = None
    sized: tuple[str, ...] | None = None

    def __repr__(self) -> str:
        """Name, source and size of the job."""
        spec, kind = self.spec, "spec" if self.plan is None else "plan"
        changes = f", {len(self.changes)} changes" if self.changes else ""
        return f"LoadedJob({spec.name}: {kind} {self.name}, {spec.mesh.world_size:,} x {spec.device.name}{changes})"

    @cached_property
    def inventory(self) -> Inventory:
        """Every parameter tensor of the model."""
        if self.plan is not None and not self.changes:
            return self.plan.inventory
        return build_inventory(self.spec)

    @cached_property
    def cuts(self) -> Cuts | None:
        """Cuts chosen for a spec, with a certificate; None for a plan, whose cuts are fixed.

        Raises:
            MegaplanError: No split meets the constraints (MP330).
        """
        if self.plan is not None:
            return None
        from megaplan.partition.choose import choose_cuts  # noqa: PLC0415  (a plan is never cut again)

        return choose_cuts(self.spec, self.inventory, measured=self.costs)

    @cached_property
    def layout(self) -> Layout:
        """The pipeline slots and their contents, by the plan's cuts or those chosen now.

        Raises:
            MegaplanError: No split is feasible.
        """
        spans = self.cuts.spans if self.cuts is not None else self.plan.spans if self.plan is not None else ()
        return build_layout(self.spec, self.inventory, spans)

    @property
    def is_model(self) -> bool:
        """True if the source is a Hugging Face config, which describes a model and no job."""
        return self._text is not None and _is_hf_config(self._text)

    @property
    def spans(self) -> Spans:
        """One half-open layer span for each slot, in model order."""
        return self.layout.spans

    @property
    def diagnostics(self) -> tuple[Diagnostic, ...]:
        """Warnings and notes of reading, and those about the cuts."""
        return self.read_diagnostics if self.cuts is None else (*self.read_diagnostics, *self.cuts.diagnostics)


def load(
    source: Source, /, *changes: str, costs: FilePath | None = None, device_file: FilePath | None = None, **overrides: Any
) -> LoadedJob:
    """Read and check a spec, a plan, or a Hugging Face `config.json`.

    Changes never move a plan's cuts: a plan is estimated with the changed values and its own cuts. A change to a loaded job replaces an
    earlier change of the same key.

    Args:
        source: A path (YAML or JSON; `-` is standard input), the document as a mapping, a config object of
            transformers (anything with `to_dict()`), a `Spec`, a `PlanDocument`, or a `LoadedJob`.
        *changes: `KEY=VALUE` texts, as `--set` takes them: `"mesh.tp=8"`.
        costs: A costs file (`megaplan.costs/1`, times in ns) by which a spec is cut; without it modelled times and FLOPs.
        device_file: A file that `megaplan calibrate -o` wrote (`megaplan.calibration/1`): sets `device.reached`, unless a change does.
        **overrides: The same as keywords, two underscores for the dot: `mesh__tp=8`, `split__spans=[[0, 4], [4, 9]]`.

    Returns:
        The checked job. Cuts and parameter tensors are worked out when they are first asked for.

    Raises:
        MegaplanError: Every error of the source, the changes and the files; `diagnostics` has place, values and hints of each.
        TypeError: The source is of another type, or a spec cannot hold a value.

    Examples:
        >>> import megaplan
        >>> job = megaplan.load("plans/tiny-hybrid.yaml", mesh__dp_shard=2, batch__micro_batch_size=1)
        >>> job.spec.mesh.world_size, job.changes
        (2, ('mesh.dp_shard=2', 'batch.micro_batch_size=1'))
        >>> [slot.blocks[-1] for slot in job.layout.slots]
        ['head']
    """
    texts = (*changes, *override_texts(overrides))
    if device_file is not None:
        return _on_measured_device(load(source, *texts, costs=costs), device_file)
    if isinstance(source, LoadedJob):
        return _changed(source, texts, costs)
    if isinstance(source, (str, os.PathLike)):
        path = model_file(os.fspath(source))
        return _from_text(read_text(path, MAX_PLAN_BYTES), path, texts, costs)
    if isinstance(source, Spec):
        source = source.as_document()
    elif not isinstance(source, (Mapping, Result)) and callable(to_dict := getattr(source, "to_dict", None)):
        source = to_dict()  # a config object of transformers
    if isinstance(source, Mapping):
        return _from_text(json.dumps(source, default=_refuse_value, ensure_ascii=False), MAPPING_NAME, texts, costs)
    return _from_plan(as_plan(source), PLAN_NAME, texts, costs)


def load_to_split(source: Source, changes: Sequence[str], costs: FilePath | None, device_file: FilePath | None = None) -> LoadedJob:
    """`load` for a source that has no cuts yet.

    Raises:
        MegaplanError: MP115, the source is a plan; else as `load`.
    """
    if isinstance(source, (str, os.PathLike)):
        path = model_file(os.fspath(source))
        job = _from_spec(read_text(path, MAX_CONFIG_BYTES), path, changes, costs)
        return job if device_file is None else _on_measured_device(job, device_file)
    job = load(source, *changes, costs=costs, device_file=device_file)
    if job.plan is not None:
        raise refuse("MP115", f"{job.name} is a plan: its cuts are decided", "megaplan.estimate(plan)", file=job.name, key="format")
    return job


def as_plan(source: object) -> PlanDocument:
    """The source, which must be a plan.

    Raises:
        TypeError: The source is not one of these.
    """
    from megaplan.plan.document import PlanDocument  # noqa: PLC0415  (a spec needs none of the plan's models)

    if not isinstance(source, PlanDocument):
        raise TypeError(f"expected a path, a mapping, a PlanDocument or a LoadedJob, not {type(source).__name__}")
    return source


def override_texts(overrides: Mapping[str, Any]) -> tuple[str, ...]:
    """Keyword overrides as `KEY=VALUE` texts: `{"mesh__tp": 8}` as `("mesh.tp=8",)`.

    Raises:
        TypeError: A spec cannot hold a value.
    """
    return tuple(f"{key.replace('__', '.')}={_value_text(value)}" for key, value in overrides.items())


def read_costs_of(path: FilePath | None, subject: str, spec: Spec, inventory: Inventory) -> MeasuredCosts | None:
    """The costs file, or None; `subject` is the path of the spec or plan that it belongs to.

    Raises:
        MegaplanError: Both are standard input, or the file is wrong.
    """
    if path is None:
        return None
    if os.fspath(path) == subject == STDIN:
        raise refuse("MP480", "the spec or plan and --costs are both standard input", "name a file for one of them")
    from megaplan.cost.file import read_costs  # noqa: PLC0415

    return read_costs(os.fspath(path), spec, inventory)


def _value_text(value: Any) -> str:
    from megaplan.spec.document import resolve_scalar  # noqa: PLC0415

    if isinstance(value, str) and value.replace("_", "").replace("-", "").isalnum() and resolve_scalar(value) == value:
        return str(value)
    return json.dumps(value, default=_refuse_value, ensure_ascii=False)


def _refuse_value(value: object) -> Any:
    raise TypeError(f"{value!r:.80} ({type(value).__name__}) is not a value of a spec: give text, a number, a bool, None, a list or a dict")


def _from_text(text: str, path: str, changes: Sequence[str], costs: FilePath | None) -> LoadedJob:
    """A spec, whose `split` decides the cuts, or a plan with its own cuts."""
    if _is_plan(text):
        from megaplan.plan.read import parse_plan  # noqa: PLC0415  (a spec needs none of the plan's models)

        name = display_name(path)
        _refuse_costs(name, costs)
        loaded = parse_plan(text, name)
        if loaded.tampered:
            raise MegaplanError(loaded.tampered)
        return _from_plan(loaded.plan, name, changes, costs, loaded.warnings)
    return _from_spec(text, path, changes, costs)


def _from_spec(text: str, path: str, changes: Sequence[str], costs: FilePath | None) -> LoadedJob:
    name = display_name(path)
    if len(text) > MAX_BYTES and path != MAPPING_NAME and not _is_hf_config(text):
        raise refuse("MP104", f"{name} has {len(text):,} characters, but a spec may have at most {MAX_BYTES:,} bytes", file=name)
    loaded = _loaded(text, name, changes)
    measured = read_costs_of(costs, path, loaded.spec, build_inventory(loaded.spec)) if costs is not None else None
    return LoadedJob(loaded.spec, None, name, tuple(changes), measured, loaded.diagnostics, text, costs)


def _from_plan(
    plan: PlanDocument, name: str, changes: Sequence[str], costs: FilePath | None, warnings: tuple[Diagnostic, ...] = ()
) -> LoadedJob:
    from megaplan.plan.vary import varied_spec  # noqa: PLC0415  (a spec needs none of the plan's models)

    _refuse_costs(name, costs)
    spec, found = varied_spec(plan, name, changes)
    return LoadedJob(spec, plan, name, tuple(changes), None, (*warnings, *found))


def _refuse_costs(name: str, costs: FilePath | None) -> None:
    if costs is not None:
        path = os.fspath(costs)
        detail = f"--costs {path}: {name} is a plan, and its cuts are fixed"
        raise refuse("MP481", detail, f"megaplan split SPEC --costs {path} -o plan.json", file=name)


def _on_measured_device(job: LoadedJob, device_file: FilePath) -> LoadedJob:
    """The job with the shares of a device file, and its factor of steps, unless changes gave them."""
    from megaplan.api.device_file import device_changes  # noqa: PLC0415  (few jobs have one)

    subject, given = STDIN if job.name == display_name(STDIN) else job.name, {each.partition("=")[0].strip() for each in job.changes}
    texts = device_changes(device_file, job.spec.device.name, job.spec.host.kind.name, subject)
    texts = [text for text in texts if text.partition("=")[0] not in given]
    return _changed(job, texts, None) if texts else job


def _changed(job: LoadedJob, changes: Sequence[str], costs: FilePath | None) -> LoadedJob:
    """The job read from its source again with further changes; if a key is changed twice, the later change counts."""
    if not changes and costs is None:
        return job
    keys = {text.partition("=")[0].strip() for text in changes}
    kept = [text for text in job.changes if text.partition("=")[0].strip() not in keys]
    if job.plan is not None:
        return _from_plan(job.plan, job.name, [*kept, *changes], costs)
    given = costs if costs is not None else job.costs_path
    if given is not None and os.fspath(given) == STDIN and job.costs is not None:
        raise refuse("MP480", "the costs were read from standard input, which can be read only once", "name a file")
    path = STDIN if job.name == display_name(STDIN) else job.name
    return _from_spec(cast("str", job._text), path, [*kept, *changes], given)


def _loaded(text: str, name: str, changes: Sequence[str]) -> LoadedSpec:
    """A spec, or a Hugging Face config as one."""
    if _is_hf_config(text):
        from megaplan.importers.hf import import_hf  # noqa: PLC0415  (the daily command has a spec)

        return import_hf(text, name, changes).loaded
    if name == MAPPING_NAME:  # a mapping has no line numbers for its keys
        from megaplan.spec.overrides import apply_overrides  # noqa: PLC0415

        document = Document(json.loads(text), SourceMap(name))
        return check_document(apply_overrides(document, changes) if changes else document)
    try:
        return load_spec_text(text, name, changes)
    except MegaplanError:
        if not _says_format(text):
            from megaplan.importers.megatron.front_ends import refuse_file  # noqa: PLC0415  (only for what is not a spec)

            refuse_file(text, name)
        raise


def _says_format(text: str) -> bool:
    """True if the text is meant to be a document of megaplan's: one with a format."""
    return '"megaplan.' in text or re.search(r"^format:", text, re.MULTILINE) is not None


def _is_hf_config(text: str) -> bool:
    """True if the text is meant to be a Hugging Face config: a JSON object with `model_type` that is not a file of megaplan's."""
    return text.lstrip().startswith("{") and '"model_type"' in text and '"megaplan.' not in text


def _is_plan(text: str) -> bool:
    """True if the text is meant to be a plan, complete or truncated: a JSON object with a plan's `format` or with decisions."""
    return text.lstrip().startswith("{") and ('"megaplan.plan/' in text or '"decisions"' in text)
