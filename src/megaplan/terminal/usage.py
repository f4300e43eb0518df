"""Diagnostics for command lines that the argument parser refuses."""

import re
from collections.abc import Sequence

from megaplan.diagnostics import diagnostic
from megaplan.errors import Diagnostic

_VALIDATOR = re.compile(r"\bValue error, ")
"""Prefix of pydantic, with which newer versions of typer check the values of options."""


def usage_error(error: Exception, program: str, hints: Sequence[str] = ()) -> Diagnostic | None:
    """MP480 for an exception of the argument parser; None for every other exception.

    Args:
        error: The exception.
        program: Name of the command, used if the exception does not know its subcommand.
        hints: Arguments that may have been meant.
    """
    message = getattr(error, "format_message", None)
    if not callable(message):
        return None
    command = getattr(getattr(error, "ctx", None), "command_path", None) or program
    return diagnostic("MP480", _VALIDATOR.sub("", message().rstrip()), hints=(*hints, f"{command} --help"))


def examples_text(examples: Sequence[str]) -> str:
    """Examples as the last paragraphs of a help text."""
    return "\n\n".join(("Examples:", *examples))
