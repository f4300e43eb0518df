"""Sums of integers as bash has them: `$((…))`, `((…))` and `expr`."""

import ast
import operator
import re
from collections.abc import Callable
from typing import Any

from megaplan.importers.megatron.unset import UNSET, unset
from megaplan.scalars import MAX_INT

_ASSIGNED = re.compile(r"\s*([A-Za-z_]\w*)\s*(\+\+|--|(?:[-+*/%]|<<|>>)?=(?!=))\s*(.*)", re.DOTALL)
_BEFORE = re.compile(r"\s*(\+\+|--)([A-Za-z_]\w*)\s*")
_CHOICE = re.compile(r"([^?]+)\?([^:]+):(.+)", re.DOTALL)
_OPERATORS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda left, right: abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1),
    ast.Mod: lambda left, right: abs(left) % abs(right) * (1 if left >= 0 else -1),
    ast.Pow: lambda left, right: left**right if abs(right) < 64 else MAX_INT,
    ast.LShift: lambda left, right: left << right if right < 64 else MAX_INT,
    ast.RShift: operator.rshift,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    **{ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Eq: operator.eq, ast.NotEq: operator.ne},
}


class UnknownError(Exception):
    """A sum of something that is not known; its text is the placeholder."""


def total(expression: str, held: Callable[[str], str | None], assign: Callable[[str, str], None]) -> int:
    """The value of an expression; its variables are read and assigned by two functions.

    Raises:
        UnknownError: A variable is not known.
        ValueError: The expression is not a sum of integers.
    """
    value = 0
    for part in re.split(r",(?![^(]*\))", expression):
        value = _part(part, held, assign)
        if abs(value) > MAX_INT:
            raise ValueError(expression)
    return value


def _part(text: str, held: Callable[[str], str | None], assign: Callable[[str, str], None]) -> int:
    if (found := _BEFORE.fullmatch(text)) is not None:
        text = f"{found[2]}{found[1][0]}=1"
    if (found := _ASSIGNED.fullmatch(text)) is not None:
        name, sign, rest = found.groups()
        old = 0 if sign == "=" else _simple(name, held)
        new = total(rest, held, assign) if rest else 1
        changed = new if sign == "=" else _simple(f"{old} {sign[0] if sign in ('++', '--') else sign[:-1]} ({new})", held)
        assign(name, str(changed))
        return old if sign in ("++", "--") else changed
    if (found := _CHOICE.fullmatch(text)) is not None:
        return total(found[2] if total(found[1], held, assign) else found[3], held, assign)
    return _simple(text, held)


def _simple(text: str, held: Callable[[str], str | None]) -> int:
    """The value of an expression without assignments."""

    def number(match: re.Match[str]) -> str:
        name, value = match[0], (held(match[0]) or "").strip()
        if (unknown := UNSET.search(value)) is not None or held(name) is None:
            raise UnknownError(unknown[0] if unknown is not None else unset(name))
        return f"({int(value)})" if value else "0"

    if (unknown := UNSET.search(text)) is not None:
        raise UnknownError(unknown[0])
    text = re.sub(r"\b10#|\b0+(?=\d)", "", re.sub(r"(?<![\w.])[A-Za-z_]\w*", number, text.replace("$", "")))
    text = re.sub(r"!(?!=)", " not ", text.replace("&&", " and ").replace("||", " or ")).strip()
    try:
        return int(_value(ast.parse(text, mode="eval").body)) if text else 0
    except (SyntaxError, ZeroDivisionError, RecursionError, MemoryError, OverflowError):
        raise ValueError(text) from None


_SIGNS: dict[type[ast.AST], Callable[[Any], Any]] = {ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Not: operator.not_}


def _value(node: ast.AST) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _SIGNS:
            return int(_SIGNS[type(op)](_value(operand)))
        case ast.BoolOp(op=op, values=values):
            found = [bool(_value(value)) for value in values]
            return int(all(found) if isinstance(op, ast.And) else any(found))
        case ast.BinOp(left=left, op=op, right=right) | ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _OPERATORS:
            found_value = int(_OPERATORS[type(op)](_value(left), _value(right)))
            if abs(found_value) <= MAX_INT:
                return found_value
    raise ValueError(ast.dump(node)[:80])
