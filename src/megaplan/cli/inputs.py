"""The input of a command: a spec, or a plan whose cuts are fixed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megaplan.cli.problems import refuse
from megaplan.errors import Diagnostic, MegaplanError
from megaplan.inventory.build import build_inventory
from megaplan.inventory.tensors import Inventory
from megaplan.layout.build import build_layout
from megaplan.layout.spans import Spans
from megaplan.layout.values import Layout
from megaplan.plan.text import MAX_PLAN_BYTES
from megaplan.spec.load import LoadedSpec, load_spec_text
from megaplan.spec.models import Spec
from megaplan.spec.read import MAX_BYTES, STDIN, display_name, read_text

if TYPE_CHECKING:
    from megaplan.cost.times import MeasuredCosts
    from megaplan.plan.document import PlanDocument


@dataclass(frozen=True, slots=True)
class Subject:
    """A spec with its cuts.

    Attributes:
        spec: The spec after overrides.
        inventory: Parameter tensors of the spec.
        layout: Slots, from the plan's cuts or newly computed.
        plan: The plan that was read, None for a spec.
        diagnostics: Warnings of loading and splitting.
    """

    spec: Spec
    inventory: Inventory
    layout: Layout
    plan: PlanDocument | None
    diagnostics: tuple[Diagnostic, ...]

    @property
    def spans(self) -> Spans:
        """One half-open layer span for each slot."""
        return tuple((slot.start, slot.stop) for slot in self.layout.slots)


def load_subject(path: str, overrides: Sequence[str], costs: str | None = None) -> Subject:
    """Load a spec and compute its cuts, or load a plan with its cuts; overrides change the spec but never a plan's cuts.

    Args:
        path: Path of a spec or a plan.
        overrides: `KEY=VALUE` texts.
        costs: Path of a costs file for the cuts of a spec.

    Raises:
        MegaplanError: Every error found.
    """
    name = display_name(path)
    text = read_text(path, MAX_PLAN_BYTES)
    if _is_plan(text):
        if costs is not None:
            detail = f"--costs {costs}: {name} is a plan, whose cuts are fixed"
            raise refuse("MP481", detail, f"megaplan split SPEC --costs {costs} -o plan.json", file=name)
        return _plan_subject(text, name, overrides)
    if len(text) > MAX_BYTES:
        raise refuse("MP104", f"{name} has {len(text):,} characters; a spec has at most {MAX_BYTES:,} bytes", file=name)
    loaded = _loaded(text, name, overrides)
    from megaplan.split.choose import choose_cuts  # noqa: PLC0415  (a plan is never cut again)

    inventory = build_inventory(loaded.spec)
    measured = load_costs(costs, path, loaded.spec, inventory)
    cuts = choose_cuts(loaded.spec, inventory, measured=measured)
    layout = build_layout(loaded.spec, inventory, cuts.spans)
    return Subject(loaded.spec, inventory, layout, None, (*loaded.diagnostics, *cuts.diagnostics))


def load_again(path: str, overrides: Sequence[str], changes: Sequence[str], costs: str | None = None) -> Subject:
    """Load the same file with changed values, to compare with.

    Args:
        path: Path of a spec or a plan.
        overrides: `KEY=VALUE` texts of the first load; `changes` take precedence.
        changes: `KEY=VALUE` texts.
        costs: As for `load_subject`.

    Raises:
        MegaplanError: Every error found, or the input is standard input, which can be read once.
    """
    if STDIN in (path, costs):
        raise refuse("MP480", "--compare reads its input twice; standard input can be read only once", "name a file")
    changed = {text.partition("=")[0] for text in changes}
    return load_subject(path, [*(text for text in overrides if text.partition("=")[0] not in changed), *changes], costs)


def load_costs(path: str | None, subject: str, spec: Spec, inventory: Inventory) -> MeasuredCosts | None:
    """The costs file of `--costs`, if there is one; `subject` is the command's other file.

    Raises:
        MegaplanError: Both are standard input, or the file is wrong.
    """
    if path is None:
        return None
    if path == subject == STDIN:
        raise refuse("MP480", "the spec or plan and --costs are both standard input", "name a file for one of them")
    from megaplan.cost.file import read_costs  # noqa: PLC0415

    return read_costs(path, spec, inventory)


def _loaded(text: str, name: str, overrides: Sequence[str]) -> LoadedSpec:
    """A spec, or a Hugging Face config as one."""
    if not _is_hf_config(text):
        return load_spec_text(text, name, overrides)
    from megaplan.importers.hf import import_hf  # noqa: PLC0415  (the daily command has a spec)

    return import_hf(text, name, overrides).loaded


def _is_hf_config(text: str) -> bool:
    """Whether the text looks like a Hugging Face config: a JSON object with `model_type` that is not a megaplan file."""
    return text.lstrip().startswith("{") and '"model_type"' in text and '"megaplan.' not in text


def _is_plan(text: str) -> bool:
    """Whether the text looks like a plan, possibly truncated: a JSON object with a plan's format or with decisions."""
    return text.lstrip().startswith("{") and ('"megaplan.plan/' in text or '"decisions"' in text)


def _plan_subject(text: str, name: str, overrides: Sequence[str]) -> Subject:
    from megaplan.plan.read import parse_plan  # noqa: PLC0415  (a spec needs none of the plan's models)

    loaded = parse_plan(text, name)
    if loaded.tampered:
        raise MegaplanError(loaded.tampered)
    plan = loaded.plan
    if not overrides:
        return Subject(plan.spec, plan.inventory, plan.layout(), plan, loaded.warnings)
    from megaplan.plan.vary import varied_spec  # noqa: PLC0415

    spec, found = varied_spec(plan, name, overrides)
    inventory = build_inventory(spec)
    return Subject(spec, inventory, build_layout(spec, inventory, plan.spans), plan, (*loaded.warnings, *found))
