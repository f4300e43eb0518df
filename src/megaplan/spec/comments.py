"""Settings of a spec that a launch file carries in addition to its arguments, because the launched framework has no arguments for them.

A script has them in comments, a file of sections in their own section; an import of the file applies them like `--set`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from typing import Any

from pydantic import BaseModel

from megaplan.spec.models import Spec

MARK = "# megaplan: "
"""Beginning of a comment with one setting, `KEY=VALUE`."""


SECTION = "megaplan"
"""Name of the section that has them, by dotted key."""


def unsaid_settings(spec: Spec, keys: Sequence[str], always: Sequence[str] = ()) -> Iterator[tuple[str, Any]]:
    """(key, plain value) of dotted keys with other values than the schema's defaults, and of the keys in `always`."""
    for key in dict.fromkeys((*keys, *always)):
        *path, name = key.split(".")
        section: Any = reduce(_part, path, spec)
        if section is None or name not in type(section).model_fields:
            continue
        value, field = getattr(section, name), type(section).model_fields[name]
        if key in always or value != field.get_default(call_default_factory=True):
            yield key, value.model_dump(mode="json", exclude_unset=True) if isinstance(value, BaseModel) else value


def _part(section: Any, name: str) -> Any:
    """A part of a section; None where it is absent."""
    return getattr(section, name, None)


def commented_settings(spec: Spec, keys: Sequence[str], always: Sequence[str] = ()) -> list[str]:
    """Comments with the settings that no argument expresses, one per key; parameters as for `unsaid_settings`."""
    return [f"{MARK}{key}={json.dumps(value, ensure_ascii=False)}" for key, value in unsaid_settings(spec, keys, always)]


def settings_of_section(section: Mapping[str, Any]) -> list[str]:
    """The `KEY=VALUE` texts of the section, in order."""
    return [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in section.items()]


def settings_in_comments(text: str) -> list[str]:
    """The `KEY=VALUE` texts of a launch file that an export wrote, in order."""
    return [line.removeprefix(MARK) for line in text.splitlines() if line.startswith(MARK)]
