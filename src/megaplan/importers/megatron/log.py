"""Arguments from a training log: Megatron's table of arguments after its parser, defaults included.

Source: `_print_args` of `megatron/training/arguments.py` at d98e8a64.
"""

import ast
import re
from typing import Any

from megaplan.hosts.megatron.argument import Kind
from megaplan.hosts.megatron.vocabulary import TABLE
from megaplan.importers.megatron.arguments import Given

_BEGIN = re.compile(r"-{4,} (?:updated )?arguments -{4,}")
_END = re.compile(r"-{4,} end of (?:updated )?arguments -{4,}")
_ROW = re.compile(r"(?:^|\s)([A-Za-z_]\w*) \.{2,} ?(.*)$")
_LONG = re.compile(r"(?:^|\s)([A-Za-z_]\w{27,}) \.? ?(\S.*)$")
"""A row whose name leaves no place for dots, of which earlier releases have 29 columns and later ones 48."""
_ENUM = re.compile(r"(?:<)?(?:\w+\.)+(\w+)(?:: [^>]*>)?")
LEAST_ROWS = 8
"""Fewest rows of a table without its first line."""
_OWN = {"num_moe_experts": "num_experts", "layernorm_epsilon": "norm_epsilon", "layernorm_zero_centered_gamma": "apply_layernorm_1p"}
_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def has_table(text: str) -> bool:
    """True if a text holds the table."""
    rows = sum(_ROW.search(line) is not None for line in text.splitlines())
    return rows > 0 if _BEGIN.search(text) else rows >= LEAST_ROWS


def read_table(text: str) -> Given:
    """The last table of a log; rows without a header are a table too."""
    rows: dict[str, tuple[Any, int]] = {}
    inside = _BEGIN.search(text) is None
    for number, line in enumerate(text.splitlines(), start=1):
        if _BEGIN.search(line):
            rows, inside = {}, True
        elif _END.search(line):
            inside = False
        elif inside and (match := _ROW.search(line) or _LONG.search(line)) is not None:
            rows[match[1]] = _value(match[2].strip()), number
    attributes = {key: value for key, (value, _) in rows.items()}
    if attributes.get("encoder_num_layers") == attributes.get("num_layers"):
        attributes.pop("encoder_num_layers", None)  # the parser copies the decoder's
    values, lines = from_attributes(attributes)
    return Given(values, {name: rows[key][1] for name, key in lines.items()}, parsed=True)


def from_attributes(attributes: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Values by the names of the arguments, from values by the parser's attributes; and the attribute of each."""
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    stored = {row.dest: row for row in TABLE if row.dest}
    for key, value in attributes.items():
        row = stored.get(key)
        name = row.name if row is not None else _OWN.get(key, key)
        if value is None:
            continue
        if row is not None and row.kind is Kind.SWITCH and _negated(row.name, key):
            values[name], origin[name] = not value, key
            continue
        values[name], origin[name] = value, key
    return values, origin


def _negated(name: str, attribute: str) -> bool:
    """True if a flag switches its attribute off: `--no-…` and `--disable-…`."""
    return name.startswith(("no_", "disable_")) and not attribute.startswith(("no_", "disable_"))


def _value(text: str) -> Any:
    """A value as Python prints it."""
    try:
        found = ast.literal_eval(text)
    except (SyntaxError, ValueError):
        match = _ENUM.fullmatch(text)
        return _DTYPES.get(match[1], match[1]) if match else text
    return list(found) if isinstance(found, tuple) else found
