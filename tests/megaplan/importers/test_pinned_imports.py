"""Imports of configs with a field left out, null or changed, and of launches with an argument left out, match the committed ones.

Each row stands for one config or launch: the spec that it gives, and a digest of what every change of it gives (the spec and the codes of
notes, or the codes of the refusal). `MEGAPLAN_UPDATE_GOLDEN=1 pytest tests/megaplan/importers/test_pinned_imports.py` writes the rows anew.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hf_samples import MODELS, config
from pinned_rows import PinnedRows
from recorded_launches import SCRIPTS, plain_script
from test_architectures import SMALL

from megaplan.errors import MegaplanError
from megaplan.importers.hf import import_hf
from megaplan.importers.imported import spec_text
from megaplan.importers.megatron.spec import import_megatron

FIELDS = ("name", "pattern", "layers", "spec", "changed", "refused", "outcomes")

CONFIGS: dict[str, dict[str, Any]] = {
    **{name: config(name) for name in MODELS},
    **{f"{model_type} {index}": fields for model_type, pair in SMALL.items() for index, (fields, _) in enumerate(pair)},
}
LAUNCHES = sorted(path.name for path in SCRIPTS.iterdir() if path.suffix == ".sh")


def digest(value: object) -> str:
    return hashlib.sha256(str(value).encode()).hexdigest()[:12]


def config_outcome(fields: dict[str, Any]) -> tuple[str, tuple[str, ...], str]:
    """The spec's text, codes of diagnostics, and the pattern with its layers."""
    imported = import_hf(json.dumps(fields), "config.json")
    model = imported.loaded.spec.model
    return spec_text(imported.document), tuple(item.code for item in imported.loaded.diagnostics), f"{model.pattern},{model.num_layers}"


def launch_outcome(text: str) -> tuple[str, tuple[str, ...], str]:
    imported = import_megatron(text, "launch.sh")
    spec = imported.loaded.spec
    codes = tuple(item.code for item in imported.loaded.diagnostics)
    return spec.model_dump_json(), codes, f"{spec.model.pattern},{spec.model.num_layers}"


def changes_of(fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Each field left out, null, and if it is a number or a flag another one."""
    for key, value in fields.items():
        if key == "model_type":
            continue
        yield {name: other for name, other in fields.items() if name != key}
        yield fields | {key: None}
        if isinstance(value, bool):
            yield fields | {key: not value}
        elif isinstance(value, int | float):
            yield fields | {key: 2 * value}
            yield fields | {key: 0}


def lines_left_out(text: str) -> Iterator[str]:
    """The text without one of its lines, for each that holds an option or an assignment."""
    lines = text.splitlines(keepends=True)
    for index, line in enumerate(lines):
        if "--" in line or "=" in line:
            yield "".join(lines[:index] + lines[index + 1 :])


def row_of(name: str, given: Any, changes: list[Any], outcome: Callable[[Any], tuple[str, tuple[str, ...], str]]) -> dict[str, str]:
    text, codes, shape = outcome(given)
    pattern, layers = shape.split(",")
    outcomes, refused = [], 0
    for changed in changes:
        try:
            outcomes.append(digest(outcome(changed)))
        except MegaplanError as error:
            refused += 1
            outcomes.append(" ".join(item.code for item in error.diagnostics))
    numbers = {"changed": str(len(changes)), "refused": str(refused), "outcomes": digest(outcomes)}
    return {"name": name, "pattern": pattern, "layers": layers, "spec": digest((text, codes)), **numbers}


@pytest.fixture(scope="module")
def table() -> Iterator[PinnedRows]:
    found = PinnedRows("imports.csv", FIELDS)
    yield found
    found.write([(name,) for name in (*CONFIGS, *LAUNCHES)])


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_and_its_changes(name: str, table: PinnedRows) -> None:
    fields = CONFIGS[name]
    row = row_of(name, fields, [*changes_of(fields)], config_outcome)
    assert row == table.committed(row)


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_launch_and_its_lines(name: str, table: PinnedRows) -> None:
    text = plain_script(name.removesuffix(".sh"))
    row = row_of(name, text, [*lines_left_out(text)], launch_outcome)
    assert row == table.committed(row)
