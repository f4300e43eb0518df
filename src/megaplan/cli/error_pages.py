"""The page of a diagnostic code as `megaplan explain` prints it, and the values of its placeholders.

A placeholder, `{{letters}}`, is a list or limit that another module defines. It is filled when a page is read: here for the terminal, in
`scripts/docs_site.py` for the site.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from typing import Any

from megaplan.diagnostics import page_text
from megaplan.terminal.output import StyledLine
from megaplan.terminal.table import wrap

_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")
_LINK = re.compile(r"\[([^\]]*)\]\([^)\s]*\)")
_ITEM = "- "


def _items(texts: Iterable[str]) -> str:
    return "\n".join(f"{_ITEM}{text}" for text in texts)


def _whole_refused(families: dict[str, Any]) -> str:
    return _items(f"{letter}: {family.full_refused}." for letter, family in families.items() if family.full_refused)


VALUES: dict[str, tuple[str, str, Callable[[Any], str]]] = {
    "assumed_tokens": ("megaplan.importers.hf", "SEQ_LENGTH", "{:,}".format),
    "devices": ("megaplan.devices", "device_names", lambda names: ", ".join(names())),
    "export_hosts": ("megaplan.exporters.hosts", "EXPORTERS", ", ".join),
    "letters": (
        "megaplan.families.registry",
        "FAMILIES",
        lambda families: ", ".join(f"{letter} ({family.title})" for letter, family in families.items()),
    ),
    "free_percent": ("megaplan.api.size", "FREE_PERCENT", "{}%".format),
    "max_depth": ("megaplan.spec.document", "MAX_DEPTH", str),
    "max_findings": ("megaplan.spec.document", "MAX_FINDINGS", str),
    "max_page_bytes": ("megaplan.report.page", "MAX_BYTES", "{:,}".format),
    "max_ranks": ("megaplan.spec.mesh_rules", "MAX_WORLD_SIZE", "{:,}".format),
    "max_spec_bytes": ("megaplan.spec.read", "MAX_BYTES", "{:,}".format),
    "max_values": ("megaplan.spec.document", "MAX_VALUES", "{:,}".format),
    "megatron_chunk": ("megaplan.hosts.megatron.limits", "CHUNK_SIZE", str),
    "model_types": ("megaplan.importers.registry", "IMPORTS", ", ".join),
    "not_trained": (
        "megaplan.spec.not_built_yet",
        "NOT_BUILT_YET",
        lambda rows: _items(f"{key}: megarun trains with {instead}." for key, _, instead in rows),
    ),
    "padding_percent": ("megaplan.budget.fit", "SHARE", lambda share: f"{100 / share:g}%"),
    "recipes": (
        "megaplan.low_precision",
        "GENERATIONS",
        lambda recipes: _items(f"{name}: {', '.join(generations)}." for name, generations in recipes.items()),
    ),
    "schedules": ("megaplan.schedules.registry", "KINDS", ", ".join),
    "sequences_per_gpu": ("megaplan.api.batch", "SEQUENCES_PER_GPU", str),
    "used_percent": ("megaplan.budget.fit", "HEADROOM_PERCENT", lambda percent: f"{100 - percent}%"),
    "whole_refused": ("megaplan.families.registry", "FAMILIES", _whole_refused),
}
"""Module and name of each placeholder's value, and the function that formats it. A page imports only the modules that it names."""


def filled(text: str) -> str:
    """Markdown with its placeholders replaced.

    Raises:
        KeyError: If a placeholder is not in `VALUES`.
    """

    def value(match: re.Match[str]) -> str:
        module, name, write = VALUES[match[1]]
        return write(getattr(import_module(module), name))

    return _PLACEHOLDER.sub(value, text)


def page_lines(code: str) -> Iterator[StyledLine]:
    """Lines as (text, style) of a code's page: title and headings bold, paragraphs and items wrapped, examples indented.

    Raises:
        KeyError: If the code has no page.
    """
    fenced, after_heading, paragraph = False, False, list[str]()
    lines = filled(page_text(code)).rstrip().splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if line.startswith("```"):
            fenced = not fenced
        elif fenced:
            yield f"  {line}".rstrip(), ""
        elif line.startswith("#"):
            yield line.lstrip("# "), "bold"
        elif line:
            paragraph.append(line)
            if not following or following.startswith(("```", _ITEM)):
                text = _LINK.sub(r"\1", " ".join(paragraph))
                yield from ((each, "") for each in wrap(text, indent="  " if text.startswith(_ITEM) else ""))
                paragraph = []
        elif not after_heading:
            yield "", ""
        after_heading = line.startswith("## ") and not fenced
