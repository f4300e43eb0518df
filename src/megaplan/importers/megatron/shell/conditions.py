"""Conditions of `[ … ]` and `[[ … ]]`: true, false, or None if the script alone does not decide them."""

import operator
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from megaplan.importers.megatron.unset import UNSET, without_unset

_FILES = frozenset("abcdefgkprsuwxhLSOGN")
_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    **{"-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le, "-gt": operator.gt, "-ge": operator.ge}
}
_TEXTS = ("=", "==", "!=", "=~", "<", ">")
_RISKY = re.compile(r"[)\]*+?}][*+{]|.{200}")


class Token(NamedTuple):
    """A word of a condition; `pattern` if it is one for a comparison, and `sign` if it can be a bracket or a sign that joins."""

    text: str
    pattern: re.Pattern[str] | None = None
    sign: bool = True


class Condition:
    """A condition while it is read.

    Args:
        tokens: Words of the condition.
        path: The file of a name; None if it is not here.
        is_set: True for names of variables that are set.
    """

    def __init__(self, tokens: Sequence[Token], path: Callable[[str], Path | None], is_set: Callable[[str], bool]) -> None:
        self._tokens, self._at, self._path, self._is_set = list(tokens), 0, path, is_set

    def value(self) -> bool | None:
        """The whole condition."""
        return self._any() if self._tokens else False

    def _next(self, offset: int = 0) -> str:
        place = self._at + offset
        return self._tokens[place].text if place < len(self._tokens) and self._tokens[place].sign else "\0\0"

    def _any(self) -> bool | None:
        found = [self._all()]
        while self._next() in ("||", "-o"):
            self._at += 1
            found.append(self._all())
        return True if True in found else None if None in found else False

    def _all(self) -> bool | None:
        found = [self._not()]
        while self._next() in ("&&", "-a"):
            self._at += 1
            found.append(self._not())
        return False if False in found else None if None in found else True

    def _not(self) -> bool | None:
        if self._next() == "!" and len(self._tokens) - self._at > 1:
            self._at += 1
            found = self._not()
            return None if found is None else not found
        if self._next() == "(":
            self._at += 1
            found = self._any()
            self._at += 1
            return found
        return self._primary()

    def _take(self) -> Token:
        token = self._tokens[self._at] if self._at < len(self._tokens) else Token("")
        self._at += 1
        return token

    def _primary(self) -> bool | None:
        first = self._take()
        if first.sign and re.fullmatch(r"-[a-zA-Z]", first.text) and self._at < len(self._tokens) and self._next() not in _TEXTS:
            return self._asked(first.text[1], self._take().text)
        sign = self._next()
        if sign in _TEXTS or sign in _NUMBERS:
            self._at += 1
            return _compared(first.text, sign, self._take())
        return None if _unknown(first.text) else bool(without_unset(first.text))

    def _asked(self, letter: str, text: str) -> bool | None:
        if letter in "zn":
            return (not without_unset(text)) == (letter == "z")
        if letter == "v":
            return self._is_set(text)
        if letter not in _FILES or _unknown(text):
            return None
        found = self._path(without_unset(text)) if without_unset(text) else None
        if found is None:
            return None if without_unset(text) else False
        return os.path.isdir(found) if letter == "d" else os.path.isfile(found) if letter == "f" else True


def _unknown(text: str) -> bool:
    return UNSET.search(without_unset(text)) is not None


def _compared(text: str, sign: str, other: Token) -> bool | None:
    left, right = without_unset(text), without_unset(other.text)
    if _unknown(left) or _unknown(right):
        return None
    if sign in _NUMBERS:
        numeric = all(re.fullmatch(r"\s*-?\d{0,18}\s*", each) for each in (left, right))
        return _NUMBERS[sign](int(left.strip() or 0), int(right.strip() or 0)) if numeric else None
    if sign == "=~":
        return _matches(left, right)
    if sign in "<>":
        return left < right if sign == "<" else left > right
    same = left == right if other.pattern is None else other.pattern.fullmatch(left) is not None
    return same != (sign == "!=")


def _matches(text: str, expression: str) -> bool | None:
    try:
        return None if _RISKY.search(expression) else re.search(expression, text) is not None
    except re.error:
        return None
