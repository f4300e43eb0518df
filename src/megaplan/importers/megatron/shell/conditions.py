"""Conditions of a script: `[ … ]` and `[[ … ]]`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from itertools import pairwise

from megaplan.importers.megatron.shell.expand import UNKNOWN, Scope, unknown_names
from megaplan.importers.megatron.shell.words import Token

Outcome = bool | None
"""Whether a command succeeds; None where that is not known."""
_COMPARED = {"-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">="}
_CLASSES = {"digit": "0-9", "alpha": "A-Za-z", "alnum": "A-Za-z0-9", "upper": "A-Z", "lower": "a-z", "space": r"\s"}


def test(scope: Scope, tokens: list[Token]) -> Outcome:
    """`[[ … ]]`: `||` binds least, then `&&`, then `!`."""
    for sign, joined in (("||", any), ("&&", all)):
        cuts = [place for place, token in enumerate(tokens) if token.text == sign and not _open(tokens[:place])]
        if cuts:
            ends = [-1, *cuts, len(tokens)]
            found = [test(scope, tokens[start + 1 : stop]) for start, stop in pairwise(ends)]
            decided = joined is any
            return decided if any(each is decided for each in found) else None if None in found else not decided
    if tokens and tokens[0].text == "(":
        return test(scope, tokens[1:-1])
    if len(tokens) > 1 and tokens[1].text == "(" and tokens[0].word is not None and tokens[0].word.plain == "!":
        found_inside = test(scope, tokens[1:])
        return None if found_inside is None else not found_inside
    return _simple(scope, tokens)


def _simple(scope: Scope, tokens: list[Token]) -> Outcome:
    """A test without signs that join tests."""
    texts = list[str]()
    for token in tokens:
        if token.word is None:
            texts.append(token.text)
        else:
            pattern = texts[-1:] in (["=="], ["="], ["!="])
            texts.append(scope.pattern(token.word) if pattern else scope.text(token.word))
    if texts[1:2] == ["=~"]:
        return _matched(_tested(texts[0]), _tested("".join(texts[2:])))
    return condition(scope, texts, patterns=True)


def condition(scope: Scope, words: list[str], *, patterns: bool = False) -> Outcome:
    """A test of words; of a variable that is set nowhere the text is empty, as in bash."""
    if words and words[0] == "!":
        found = condition(scope, words[1:], patterns=patterns)
        return None if found is None else not found
    for sign, joined in (("-o", any), ("-a", all)):
        if sign in words[1:] and not patterns:
            place = words.index(sign)
            parts = [condition(scope, words[:place]), condition(scope, words[place + 1 :])]
            return None if None in parts else joined(bool(each) for each in parts)
    texts = [_tested(word) for word in words]
    if any(text is None for text in texts):
        return None
    plain = [text or "" for text in texts]
    if len(plain) == 1:
        return bool(plain[0])
    if len(plain) == 2:
        return {"-z": not plain[1], "-n": bool(plain[1]), "-v": plain[1] in scope.values}.get(plain[0])
    return _compared(plain, patterns=patterns) if len(plain) == 3 else len(plain) > 0 and None


def _tested(word: str) -> str | None:
    """A word of a test; None where it has the output of a command."""
    if any(not re.fullmatch(r"\w+", name) for name in unknown_names(word)):
        return None
    return UNKNOWN.sub("", word)


def _compared(words: list[str], *, patterns: bool) -> Outcome:
    left, sign, right = words
    if sign in ("=", "==", "!="):
        equal = fnmatchcase(left, right) if patterns else left == right
        return equal is (sign != "!=")
    if sign in _COMPARED:
        value = Scope().sum(f"{left or 0} {_COMPARED[sign]} {right or 0}")
        return None if value is None else bool(value)
    return None


def _open(tokens: Sequence[Token]) -> int:
    """How many parentheses are open behind tokens of a test."""
    return sum((token.text == "(") - (token.text == ")") for token in tokens)


def _matched(text: str | None, pattern: str | None) -> Outcome:
    """`=~`: an extended expression of POSIX anywhere in the text."""
    if text is None or pattern is None:
        return None
    for name, signs in _CLASSES.items():
        pattern = pattern.replace(f"[:{name}:]", signs)
    try:
        return re.search(pattern, text) is not None
    except re.error:
        return None
