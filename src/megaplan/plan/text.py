"""JSON values from the text of a plan: bounded, with exact errors and positions."""

import json
import re

from megaplan.errors import Diagnostic, Location, MegaplanError
from megaplan.plan import problems
from megaplan.plan.canonical import Json

MAX_PLAN_BYTES = 16 * 2**20
_HEAD = 65536  # first characters, in which a spec states its format


def parse_json(text: str, name: str) -> Json:
    """The JSON value in `text`: no floats, no repeated keys.

    Raises:
        MegaplanError: The text is invalid; the error has the line and column, if they are known.
    """
    try:
        value: Json = json.loads(text, object_pairs_hook=_unique, parse_float=_refuse, parse_constant=_refuse, parse_int=_integer)
    except json.JSONDecodeError as error:
        raise MegaplanError([_grammar(error, text, name)]) from None
    except _RepeatedKeyError as error:
        raise MegaplanError([problems.key_twice(str(error), Location(name))]) from None
    except _NumberError as error:
        raise MegaplanError([problems.not_an_integer(str(error), Location(name))]) from None
    except RecursionError:
        raise MegaplanError([problems.too_deep(Location(name))]) from None
    return value


def _grammar(error: json.JSONDecodeError, text: str, name: str) -> Diagnostic:
    place = Location(name, error.lineno, error.colno)
    if re.search(r"^format:\s*megaplan\.spec/", text[:_HEAD], re.MULTILINE):
        return problems.other_format("megaplan.spec/1", Location(name))
    whole = text.rstrip()
    ends_early = not whole.endswith("}") or error.pos >= len(whole) or error.msg.startswith("Unterminated string")
    if whole.lstrip().startswith("{") and ends_early:
        return problems.truncated(len(text.encode()), place)
    return problems.not_json(f"{error.msg[:1].lower()}{error.msg[1:]}", place)


class _RepeatedKeyError(Exception):
    """Raised for a key that occurs twice in one object."""


class _NumberError(Exception):
    """Raised for a number that plans do not hold."""


def _unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    keys = dict(pairs)
    if len(keys) != len(pairs):
        names = [key for key, _ in pairs]
        raise _RepeatedKeyError(next(key for index, key in enumerate(names) if key in names[:index]))
    return keys


def _integer(text: str) -> int:
    if len(text) > problems.MAX_DIGITS:
        _refuse(text)
    return int(text)


def _refuse(text: str) -> None:
    raise _NumberError(text)
