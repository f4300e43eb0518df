"""Megatron's hybrid pattern: `main ("/" module)*`, where `main` is segments between `|` and one symbol is one layer.

Source: `megatron/core/models/hybrid/hybrid_layer_allocation.py` at d98e8a64. There is no repetition and no space. Columns count from 1.
"""

from collections.abc import Iterator
from typing import NamedTuple

from megaplan.diagnostics import diagnostic
from megaplan.errors import Diagnostic, Location, MegaplanError

SYMBOLS = {
    "M": "Mamba-2",
    "G": "gated delta net",
    "*": "attention",
    "D": "sparse attention",
    "+": "latent attention",
    "-": "dense MLP",
    "E": "experts",
}
OURS = {"*": "A", "+": "A", "M": "M", "G": "G", "-": "D", "E": "E"}
"""Letter of megaplan for each symbol that has one."""
LETTERS = {ours: symbol for symbol, ours in reversed(OURS.items())}
"""The symbol of each letter of megaplan; for A, the symbol of attention that is not latent."""
MODULE, SEGMENT = "/", "|"
_OTHER_ATTENTION = "D+"
EMBEDDING, LOSS, MTP = "e", "l", "m"
"""Letters of embedding, loss and one prediction module in a rank's list of operators."""
SIXTEEN_BIT = {"a": "*", "d": "-", "s": "M", "g": "G", "x": "E"}
"""Letters for operators whose linears stay in 16 bits in a run with low precision, with the letter of each operator."""
IN_SIXTEEN_BIT = {letter: own for own, letter in SIXTEEN_BIT.items()}
ENDS = EMBEDDING + MTP + LOSS
"""Letters that are not operators."""
VARIED = {own: 0x10000 * (place + 1) for place, own in enumerate(("E", IN_SIXTEEN_BIT["E"], "*", IN_SIXTEEN_BIT["*"], "-"))}
"""First code points of the letters for variants: experts with their own skew, attention with another layer's keys, an MLP that reads the
norm of parallel attention.
"""


def operators(letters: str) -> str:
    """The operators of a chunk, without embedding, prediction modules and loss."""
    return "".join([letter for letter in letters if letter not in ENDS])


def plain(letter: str) -> str:
    """The letter of an operator without its own variant."""
    return letter if letter.isascii() else next(own for own, start in VARIED.items() if 0 <= ord(letter) - start < 0x10000)


def count(letters: str, operator: str) -> int:
    """Number of operators of a kind, in low precision or not, including every variant."""
    own = letters if letters.isascii() else "".join(map(plain, letters))
    return own.count(operator) + own.count(IN_SIXTEEN_BIT[operator])


class HybridPattern(NamedTuple):
    """A parsed pattern.

    Attributes:
        segments: Symbols of each segment, empty ones included; one segment if the text has no `|`.
        module: Symbols of one prediction module, None if there is none.
        num_modules: Prediction modules.
        has_pipes: True if the text states where stages begin.
    """

    segments: tuple[str, ...]
    module: str | None
    num_modules: int
    has_pipes: bool

    @property
    def main(self) -> str:
        """Symbols of the main model."""
        return "".join(self.segments)

    @property
    def offsets(self) -> tuple[int, ...]:
        """First layer of each segment."""
        return tuple(len("".join(self.segments[:index])) for index in range(len(self.segments)))

    def stages(
        self, pp: int, first: int | None = None, last: int | None = None, vpp: int = 1, where: Location | None = None
    ) -> tuple[str, ...]:
        """Symbols of each virtual stage: virtual stage v of rank r is at index v · pp + r.

        Args:
            pp: Pipeline ranks.
            first: Layers of the first rank, if the pattern has no `|`.
            last: Layers of the last rank, if the pattern has no `|`.
            vpp: Requested virtual stages per rank, if the pattern has no `|`.
            where: Location of the text, for diagnostics.

        Raises:
            MegaplanError: MP911.
        """
        at = where or Location(key="hybrid_layer_pattern")
        if self.has_pipes:
            if first is not None or last is not None:
                raise _unfit(
                    "the pattern has '|', which decides the layers of every stage, but counts for the first or last stage are given too",
                    at,
                    "remove the counts",
                )
            if len(self.segments) % pp:
                detail = f"{len(self.segments)} segments, pp = {pp}, and {len(self.segments)} % {pp} = {len(self.segments) % pp}"
                raise _unfit(detail, at, f"write a multiple of {pp} segments")
            return self.segments
        if vpp > 1:
            raise _unfit(f"{vpp} virtual stages per rank, but the pattern has no '|' that separates them", at, "write '|' between stages")
        given = (first or 0) + (last or 0)
        between = pp - (first is not None) - (last is not None)
        free = len(self.main) - given
        if free < 0 or (free % between if between else free):
            detail = f"{len(self.main)} layers, pp = {pp}" + (f", {given} of them on the ends" if given else "")
            raise _unfit(f"{detail}: {free} layers do not divide over {between} ranks", at, "write '|' between stages")
        sizes = [free // between] * between if between else []
        sizes = [*([] if first is None else [first]), *sizes, *([] if last is None else [last])]
        stops = [sum(sizes[: index + 1]) for index in range(pp)]
        return tuple(self.main[stop - size : stop] for size, stop in zip(sizes, stops, strict=True))


def parse_hybrid(text: str, where: Location | None = None) -> HybridPattern:
    """The segments and prediction modules of a pattern; an empty text is a model without layers.

    Raises:
        MegaplanError: MP910; all that are found.
    """
    at = where or Location(key="hybrid_layer_pattern")
    found = list(_faults(text, at))
    if found:
        raise MegaplanError(found)
    main, *modules = text.split(MODULE)
    modules = [module for module in modules if module]
    return HybridPattern(tuple(main.split(SEGMENT)), modules[0] if modules else None, len(modules), SEGMENT in main)


def format_hybrid(stages: tuple[str, ...], modules: tuple[str, ...] = ()) -> str:
    """The text of a pattern with these stages and prediction modules."""
    return MODULE.join((SEGMENT.join(stages), *modules))


def _faults(text: str, at: Location) -> Iterator[Diagnostic]:
    start = 0
    parts = text.split(MODULE)
    modules = parts[1:]
    for index, part in enumerate(parts):
        yield from _symbols(text, part, start, at, in_module=index > 0)
        yield from _mixture(text, part, start, at)
        start += len(part) + 1
    if any(modules) and len(set(modules)) > 1:
        other = next(index for index, module in enumerate(modules) if module != modules[0])
        column = len(MODULE.join(parts[: other + 1])) + 2
        detail = (
            f"{text!r}: module {other} is {modules[other]!r} at column {column}, and module 0 is {modules[0]!r}; all modules must be equal"
        )
        yield diagnostic("MP910", detail, at, (f"repeat /{modules[0]}",) if modules[0] else ())


def _symbols(text: str, part: str, start: int, at: Location, *, in_module: bool) -> Iterator[Diagnostic]:
    for offset, symbol in enumerate(part):
        column = start + offset + 1
        if symbol == SEGMENT and in_module:
            detail = f"{text!r}: '|' at column {column} is in a prediction module, which is on one stage"
            yield diagnostic("MP910", detail, at, ("remove the '|' after '/'",))
            return
        if symbol not in SYMBOLS and symbol != SEGMENT:
            known = ", ".join(f"{letter} ({name})" for letter, name in SYMBOLS.items())
            hint = "there is no repetition: write every layer" if symbol.isdigit() or symbol in "()" else "use a symbol of the list"
            yield diagnostic("MP910", f"{text!r}: {symbol!r} at column {column}; the symbols are {known}, '|' and '/'", at, (hint,))
            return


def _mixture(text: str, part: str, start: int, at: Location) -> Iterator[Diagnostic]:
    other = next((offset for offset, symbol in enumerate(part) if symbol in _OTHER_ATTENTION), None)
    if "*" in part and other is not None:
        column = start + max(part.index("*"), other) + 1
        detail = f"{text!r}: '*' and {part[other]!r} in one pattern, the second at column {column}; all attention is of one kind"
        yield diagnostic("MP910", detail, at, (f"write {part[other]} for *, or * for {part[other]}",))


def _unfit(detail: str, at: Location, hint: str) -> MegaplanError:
    return MegaplanError([diagnostic("MP911", detail, at, (hint,))])


def spread_pattern(layers: int, attention: float, mlp: float) -> str:
    """The pattern of shares of attention and MLP layers, each distributed evenly among Mamba layers, attention first.

    Args:
        layers: Number of layers.
        attention: Share of attention layers, from 0 to 1.
        mlp: Share of MLP layers, from 0 to 1 less `attention`.

    Source: `pattern_from_ratios` of `megatron/core/models/hybrid/hybrid_layer_allocation.py` at d98e8a64.
    """
    found = ["M"] * layers
    free = layers
    for symbol, number in (("*", round(layers * attention)), ("-", round(layers * mlp))):
        free -= number
        run = free / (number + 1) if symbol == "*" else free / max(number, 1)  # the stage does not begin or end with attention
        left = run
        for place in range(layers if number else 0):
            if found[place] != "M":
                continue
            if left < 0.5:
                found[place] = symbol
                left += run
            else:
                left -= 1
    return "".join(found)
