"""What commands print that only repeat or add up their words: `echo`, `cat` of a here-document, `expr`. No command is run."""

from __future__ import annotations

from megaplan.importers.megatron.shell.expand import Scope
from megaplan.importers.megatron.shell.syntax import Command, parse
from megaplan.importers.megatron.shell.words import ScriptError


def output_of(scope: Scope, text: str, line: int) -> str | None:
    """What `$(text)` gives, without the newlines at its end; None where it is another command, or more than one.

    Args:
        scope: Variables.
        text: The command.
        line: Of the text's beginning.
    """
    try:
        steps = parse(text, line).steps
    except ScriptError:
        return None
    if len(steps) != 1 or not isinstance(command := steps[0][1], Command) or not command.words:
        return None
    name, words = command.words[0].plain, [field.text for word in command.words[1:] for field in scope.fields(word)]
    if name == "echo":
        while words and words[0] in ("-n", "-e", "-ne", "-en"):
            words.pop(0)
        return " ".join(words)
    if name == "cat" and not words and command.documents:
        document, quoted = command.documents[0]
        return document if quoted else expanded(scope, document)
    value = scope.sum(" ".join(words)) if name == "expr" and words else None
    return None if value is None else str(int(value))


def expanded(scope: Scope, document: str) -> str:
    """A here-document after expansion, as bash does it before the command reads it."""
    escaped = document.replace('"', '\\"')
    (only,) = parse(f'"{escaped}"').steps
    assert isinstance(only[1], Command)
    return scope.text(only[1].words[0])
