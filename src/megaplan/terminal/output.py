"""Output of the process: the answer on stdout, everything else on stderr, colour only for a terminal."""

import errno
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, TextIO

from megaplan.errors import Diagnostic, Severity, render_diagnostic
from megaplan.foreign import printable

ERROR_FORMAT = "megaplan.error/1"
_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "bold yellow", Severity.NOTE: "bold cyan"}


StyledLine = tuple[str, str]
"""A line of text and its style, empty for none."""
_PLAIN = {"−": "-", "×": "x", "·": ".", "…": "...", "→": "->", "≤": "<=", "≥": ">=", "∈": "in", "‖": "|", "█": "#", "–": "-"}
"""Replacements for characters that the stream's encoding lacks; `?` for every other."""


class OutputError(BaseException):
    """The answer could not be written: stdout is closed, or its disk is full. No command handles it, so it is not an `Exception`.

    Attributes:
        reason: Reason that the system gives.
        is_pipe: True if the reader of a pipe has closed it.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.reason = getattr(error, "strerror", None) or str(error)
        self.is_pipe = isinstance(error, BrokenPipeError)


def write(text: str) -> None:
    """Write text of the answer; control characters from foreign files are escaped, characters that stdout lacks are replaced.

    Raises:
        OutputError: It could not be written.
    """
    with _answering():
        sys.stdout.write(encodable(printable(text), sys.stdout))


def flush() -> None:
    """Write the buffered output of stdout.

    Raises:
        OutputError: It could not be written.
    """
    if sys.stdout is not None:
        with _answering():
            sys.stdout.flush()


@contextmanager
def _answering() -> Iterator[None]:
    if sys.stdout is None:
        raise OutputError(OSError(errno.EBADF, "it is closed"))
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: this process has closed stdout
        raise OutputError(error) from None


def encodable(text: str, stream: TextIO) -> str:
    """`text` with replacements for the characters that the stream's encoding lacks."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        for character, plain in _PLAIN.items():
            text = text.replace(character, plain)
        return text.encode(encoding, errors="replace").decode(encoding)
    return text


def write_json(document: Any) -> None:
    """Write the one document of `--json`.

    Raises:
        OutputError: It could not be written.
    """
    text = printable(json.dumps(document, indent=2, ensure_ascii=False))
    with _answering():
        if encodable(text, sys.stdout) != text:
            text = printable(json.dumps(document, indent=2))
        sys.stdout.write(text + "\n")


def asks_json(words: Sequence[str]) -> bool:
    """True if these arguments ask for JSON; raw words are checked, because a failure may occur before they are parsed."""
    if any(word in ("--json", "--format=json") for word in words):
        return True
    return any(pair == ("--format", "json") for pair in pairwise(words))


def write_styled(lines: Iterable[StyledLine]) -> None:
    """Write lines of the answer with the style that a terminal shows; the text alone carries the meaning."""
    pairs = list(lines)
    if not coloured(sys.stdout):
        write("".join(f"{text}\n" for text, _ in pairs))
        return
    console = _console(sys.stdout)
    with _answering():
        for text, style in pairs:
            console.print(printable(text), style=style or None, markup=False, highlight=False, soft_wrap=True)


def report(diagnostics: Iterable[Diagnostic]) -> None:
    """Write diagnostics to stderr, with a blank line between two."""
    for index, found in enumerate(diagnostics):
        text = ("\n" if index else "") + render_diagnostic(found) + "\n"
        if not coloured(sys.stderr):
            sys.stderr.write(encodable(text, sys.stderr))
            continue
        head, _, rest = text.lstrip("\n").partition(":")
        console = _console(sys.stderr)
        console.print("\n" if index else "", head, sep="", end="", style=_STYLES[found.severity], markup=False, highlight=False)
        console.print(f":{rest}", end="", markup=False, highlight=False, soft_wrap=True)


def note(lines: Iterable[str]) -> None:
    """Write plain remarks to stderr."""
    sys.stderr.write(encodable(printable("".join(f"{line}\n" for line in lines)), sys.stderr))


def fail(diagnostics: Sequence[Diagnostic], *, as_json: bool) -> None:
    """Report a failure: one error document on stdout with `--json`, else text on stderr."""
    if as_json:
        write_json({"format": ERROR_FORMAT, "diagnostics": [found.as_document() for found in diagnostics]})
    else:
        report(diagnostics)


def coloured(stream: TextIO | None) -> bool:
    """True if `stream` is a terminal that shows colour, and colour is not switched off (https://no-color.org)."""
    return stream is not None and stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _console(stream: TextIO) -> Any:
    from rich.console import Console  # noqa: PLC0415  (20 ms, and only a terminal needs it)

    return Console(file=stream, highlight=False)
