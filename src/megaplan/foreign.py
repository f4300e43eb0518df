"""Text from foreign files, made safe for display: on a terminal, in Markdown, in XML.

A terminal runs escape sequences, a line break forges a line of output, Markdown takes HTML and links, and a direction mark shows
characters out of order. Therefore every control character is shown as its escape, in the form of JSON.
"""

import os
import re
from functools import cache

_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 without tab and line feed, DEL, C1
    "\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"  # direction, invisible, separators, tags
    "\ud800-\udfff]"  # no UTF-8 has them
)
_BREAK = re.compile("[\t\n]")
_MARKUP = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}


_SECRET_NAME = re.compile(r"(?:^|_)(?:TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY|ACCESS_KEY_ID|PRIVATE_KEY|CREDENTIALS?)$")
_SHORTEST_SECRET = 12
"""Shorter values of variables with a secret's name are words and numbers that texts have by chance."""
_SECRET = re.compile(
    r"(?<=://)[^/\s@]+(?=@)"  # user and password of a URL
    r"|(?<=Bearer )[\w.~+/=-]{8,}"
    r"|(?<=X-Amz-Signature=)\w+|(?<=X-Amz-Credential=)[\w%/-]+|(?<=X-Amz-Security-Token=)[\w%/-]+"
    r"|\b(?:hf|ghp|gho|github_pat)_\w{20,}|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"
)
_GIVEN = re.compile(
    r"((?<![\w-])--?[\w-]*(?:secret|passw(?:or)?d|(?:api|access|private|secret)[-_]?key|credentials?"  # an option of a launch script
    r"|(?:api|access|auth|github|hf|hub|login|secret|wandb)[-_]token)[=\s]\s*"
    r"|\b[A-Z][A-Z0-9_]*(?:_TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY)=)(?![-$])[^\s\"'\\<]+",
    re.ASCII,
)
_MARKS = ("secret", "passw", "credential", "apikey", "accesskey", "privatekey", "-key", "_key", "-token", "_token")
"""Parts that every match of `_GIVEN` has, in lower case: documents of megabytes mostly have none."""
HIDDEN = "…"


def escaped(text: str) -> str:
    """The text with every control character except tabs and line feeds as an escape."""
    return _CONTROL.sub(_escape, text)


def printable(text: str) -> str:
    """The text for display: without secrets of the environment, control characters escaped."""
    return escaped(without_secrets(text))


def without_secrets(text: str) -> str:
    """The text without secrets: each is replaced by `…`.

    They are values of the environment's secret variables, credentials of URLs, tokens of known forms, and values of options and variables
    that are named as secrets. Messages of libraries repeat requests and addresses, and logs are read by more people than the environment.
    """
    for value in _secret_values():
        text = text.replace(value, HIDDEN)
    text, lowered = _SECRET.sub(HIDDEN, text), text.lower()
    return _GIVEN.sub(rf"\1{HIDDEN}", text) if any(mark in lowered for mark in _MARKS) else text


@cache
def _secret_values() -> tuple[str, ...]:
    """Values of secret variables, longest first: one may contain another."""
    found = {value for name, value in os.environ.items() if _SECRET_NAME.search(name) and len(value) >= _SHORTEST_SECRET}
    return tuple(sorted(found, key=len, reverse=True))


def one_line(text: str) -> str:
    """The text without control characters and line breaks."""
    return _BREAK.sub(_escape, printable(text))


def markdown(text: str) -> str:
    """The text as a part of one line of Markdown: no HTML, no link, no image, no line break."""
    return re.sub("[&<>]", lambda found: _MARKUP[found[0]], one_line(text)).replace("](", "]\\(")


def xml(text: str) -> str:
    """The text as character data or a quoted attribute of XML."""
    return re.sub("[&<>]", lambda found: _MARKUP[found[0]], one_line(text)).replace('"', "&quot;").replace("'", "&apos;")


def _escape(found: re.Match[str]) -> str:
    units = found[0].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[index]:02x}{units[index + 1]:02x}" for index in range(0, len(units), 2))
