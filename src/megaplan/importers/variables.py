"""Variables of a script that is not run: values that its text assigns, and the text with them."""

import re
from collections.abc import Mapping

from megaplan.importers.megatron.shell.sums import UnknownError, total

_ASSIGNED = re.compile(
    r"""^[ \t]*(?:(?:export|readonly|local|declare)[ \t]+)*([A-Za-z_]\w*)="""
    r"""("(?:[^"\\]|\\.)*"|'[^']*'|\$\(\((?:[^()]|\([^()]*\))*\)\)|(?:[^\s;&|"'$]|\$\{[^}]*\}|\$\w+)*(?![\w$]))""",
    re.MULTILINE | re.DOTALL,
)
MOST_NESTED = 8
"""Most defaults of variables inside each other."""
_DEFAULTED = re.compile(r"\$\{([A-Za-z_]\w*):?=([^}$]*)\}")
_VARIABLE = re.compile(r"\$\{(\w+)(?::?[-=]([^}$]*))?\}|\$([A-Za-z_]\w*)")


def variables(text: str) -> dict[str, str]:
    """Values of the variables that a text assigns, with earlier ones substituted; of several values the first is kept."""
    found = {match[1]: match[2] for match in reversed(list(_DEFAULTED.finditer(text)))}
    for match in _ASSIGNED.finditer(text):
        value = match[2]
        quoted = value[1:-1] if value[:1] in ("'", '"') else value
        if value.startswith("$((") and (sum_of := _sum(value[3:-2], found)) is not None:
            quoted = sum_of
        elif "$(" in value or "`" in value or (match[1] in found and match[1].islower()):
            continue
        found.setdefault(match[1], quoted if value.startswith("'") else replaced(quoted, found))
    return found


def _sum(expression: str, held: Mapping[str, str]) -> str | None:
    """The value of a sum of variables; None if one is not known."""
    try:
        return str(total(re.sub(r"\{(\w+)\}", r"\1", expression), held.get, lambda _name, _value: None))
    except (UnknownError, ValueError):
        return None


def replaced(text: str, values: Mapping[str, str]) -> str:
    """A text with variables replaced by their values or defaults; unset ones stay."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        return values.get(name, match[2] if match[2] is not None else match[0])

    for _ in range(MOST_NESTED):
        before, text = text, _VARIABLE.sub(value, text)
        if text == before:
            break
    return text
