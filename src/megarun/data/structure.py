"""Lexical classes of C-like source, one per token, which `features.structure` embeds.

A text is scanned once, as a C or C++ preprocessor would split it, without macros: every byte belongs to one class. A token has the class of
its first byte that is not white space, or white space if it has no other. Texts of other languages get the classes of the C tokens that
they resemble.

Source: ISO/IEC 9899:2011, section 6.4, and ISO/IEC 14882:2017, section 5.
"""

import re
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

SCHEME = "c-lexical/1"
CLASSES = (
    "other",
    "whitespace",
    "line_comment",
    "block_comment",
    "string",
    "character",
    "integer",
    "floating",
    "control_keyword",
    "type_keyword",
    "other_keyword",
    "identifier",
    "called_identifier",
    "directive",
    "arithmetic",
    "assignment",
    "comparison",
    "logical",
    "bitwise",
    "access",
    "opening",
    "closing",
    "comma",
    "semicolon",
    "choice",
)
"""Class names by id. The end of a document is `other`."""
OTHER, WHITESPACE = 0, 1

_CONTROL = "break case catch continue default do else for goto if return switch throw try while"
_TYPES = (
    "auto bool char char8_t char16_t char32_t class const double enum extern float inline int long mutable namespace register short "
    "signed static struct template typedef typename union unsigned using virtual void volatile wchar_t"
)
_OTHERS = (
    "alignas alignof asm const_cast constexpr decltype delete dynamic_cast explicit export false final friend new noexcept nullptr "
    "operator override private protected public reinterpret_cast restrict sizeof static_assert static_cast this thread_local true typeid"
)
_OPERATORS = {
    "arithmetic": "++ -- + - * / %",
    "assignment": "<<= >>= += -= *= /= %= &= |= ^= =",
    "comparison": "<=> <= >= == != < >",
    "logical": "&& || !",
    "bitwise": "<< >> & | ^ ~",
    "access": "->* -> .* :: ... .",
    "opening": "( [ {",
    "closing": ") ] }",
    "comma": ",",
    "semicolon": ";",
    "choice": "? :",
}
_ID = {name: index for index, name in enumerate(CLASSES)}
_WORDS = {
    word: _ID[name]
    for name, words in (("control_keyword", _CONTROL), ("type_keyword", _TYPES), ("other_keyword", _OTHERS))
    for word in words.split()
}
_SIGNS = {sign: _ID[name] for name, signs in _OPERATORS.items() for sign in signs.split()}
_TEXT = re.compile(
    r"""(?P<whitespace>\s+)
    |(?P<line_comment>//(?:\\\n|[^\n])*)
    |(?P<block_comment>/\*.*?(?:\*/|\Z))
    |(?P<raw>(?:u8|[uUL])?R"(?P<mark>[^()\\\s"]{0,16})\(.*?(?:\)(?P=mark)"|\Z))
    |(?P<string>(?:u8|[uUL])?"(?:\\.|[^"\\\n])*"?)
    |(?P<character>(?:u8|[uUL])?'(?:\\.|[^'\\\n])*'?)
    |(?P<number>\.?\d(?:[eEpP][+-]|'\w|[\w.])*)
    |(?P<word>[^\W\d]\w*)
    |(?P<directive>\#[^\S\n]*\w*)
    |(?P<sign>"""
    + "|".join(re.escape(sign) for sign in sorted(_SIGNS, key=len, reverse=True))
    + r""")
    |(?P<other>.)""",
    re.DOTALL | re.VERBOSE,
)
_CALL = re.compile(r"[^\S\n]*\(")


def token_classes(text: str, token_bytes: NDArray[np.int64]) -> NDArray[np.uint8]:
    """The class of every token of a text.

    Args:
        text: The text.
        token_bytes: UTF-8 length of each token in order; their sum is the text's length.

    Returns:
        uint8 [tokens], ids of `CLASSES`.

    Raises:
        ValueError: The tokens do not add up to the text's length.
    """
    classes = byte_classes(text)
    ends = np.cumsum(token_bytes)
    if (ends[-1] if ends.size else 0) != classes.size:
        raise ValueError(f"the tokens have {int(ends[-1]) if ends.size else 0} bytes, and the text has {classes.size}")
    if not ends.size:
        return np.zeros(0, dtype=np.uint8)
    # for each byte, the first byte from it on that is not white space, or the end of the text
    place = np.where(classes != WHITESPACE, np.arange(classes.size), classes.size)
    following = np.minimum.accumulate(place[::-1])[::-1]
    starts = ends - token_bytes
    found = following[np.minimum(starts, classes.size - 1)]
    return np.where(found < ends, classes[np.minimum(found, classes.size - 1)], WHITESPACE).astype(np.uint8)


def byte_classes(text: str) -> NDArray[np.uint8]:
    """The class of every UTF-8 byte of a text, uint8."""
    pieces = list(_pieces(text))
    kinds = np.fromiter((kind for kind, _ in pieces), dtype=np.uint8, count=len(pieces))
    lengths = np.fromiter((length for _, length in pieces), dtype=np.int64, count=len(pieces))
    return np.repeat(kinds, lengths)


def _pieces(text: str) -> Iterator[tuple[int, int]]:
    """(class, number of bytes) of each lexical token in order."""
    fresh = True  # the line has only white space before it
    for match in _TEXT.finditer(text):
        group, piece = str(match.lastgroup), match.group()
        yield _class(group, piece, text, match.end(), fresh=fresh), len(piece) if piece.isascii() else len(piece.encode())
        fresh = group == "whitespace" and (fresh or "\n" in piece)


def _class(group: str, piece: str, text: str, end: int, *, fresh: bool) -> int:
    match group:
        case "word":
            return _WORDS.get(piece, _ID["called_identifier" if _CALL.match(text, end) else "identifier"])
        case "number":
            hexadecimal = piece[:2] in ("0x", "0X")
            floating = "." in piece or any(mark in piece for mark in ("pP" if hexadecimal else "eE"))
            return _ID["floating" if floating else "integer"]
        case "sign":
            return _SIGNS[piece]
        case "directive":
            return _ID["directive"] if fresh else OTHER
        case "raw":
            return _ID["string"]
        case _:
            return _ID[group]
