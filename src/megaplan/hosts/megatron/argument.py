"""`Argument`: one launch argument of Megatron-LM, and the conversion of its value to and from a spec's."""

from collections.abc import Callable, Iterator
from enum import StrEnum
from functools import reduce
from typing import Any, NamedTuple

REQUIRED = "required"
"""Value instead of a default: a launch must give the argument."""


class Kind(StrEnum):
    """Kind of an argument's value."""

    SWITCH = "switch"
    COUNT = "positive integer"
    WHOLE = "integer from 0 on"
    NUMBER = "number"
    WORD = "word"
    TEXT = "text"


class Conversion(NamedTuple):
    """Conversion between an argument's value and the value of the spec's key.

    Attributes:
        says: One phrase for the reference page.
        read: The key's value, of the argument's value.
        write: The argument's value, of the key's value; None or False leaves the argument out.
    """

    says: str
    read: Callable[[Any], Any]
    write: Callable[[Any], Any]


def same(value: Any) -> Any:
    """The value itself."""
    return value


def nothing(_value: Any) -> None:
    """None: another argument's function writes it."""
    return


def words_of(words: dict[str, str]) -> Conversion:
    """Other words of the spec for the same choices; of several words for one choice the first is written."""
    back = {ours: theirs for theirs, ours in reversed(words.items())}
    says = ", ".join(f"{theirs} → {ours}" for theirs, ours in words.items())
    return Conversion(says, lambda value: words.get(value, value), lambda value: back.get(value, value))


SAME = Conversion("the value", same, same)
NEGATED = Conversion("negated", lambda value: not value, lambda value: not value)
ABSENT_IS_ZERO = Conversion("0 where it is absent", lambda value: 0 if value is None else value, lambda value: value or None)
ABSENT_IS_ONE = Conversion("1 where it is absent", lambda value: 1 if value is None else value, lambda value: value if value > 1 else None)
ZERO_IS_NONE = Conversion("null where it is 0", lambda value: value or None, lambda value: 0.0 if value is None else value)
WHOLE = Conversion("an integer where it is whole", same, lambda value: int(value) if float(value).is_integer() else value)
GIVEN_DISPATCHER = Conversion("the value, allgather for null", same, lambda value: value or "allgather")
OVERLAPS = Conversion("null where it is absent", lambda value: value or None, bool)
JOINT = Conversion("with other arguments", same, nothing)
ONLY = Conversion("one value is accepted", same, nothing)
FEATURE = Conversion("named in `host.features`, refused", same, nothing)
REPORTED = Conversion("not carried, listed in a warning", same, nothing)


class Argument(NamedTuple):
    """One launch argument.

    Attributes:
        name: Flag with underscores for dashes.
        kind: Kind of the value.
        key: Dotted key of the spec; empty if it corresponds to no single key.
        default: Megatron's default, `REQUIRED`, or None if absent.
        conversion: To the key's value and back.
        touches: Parts of memory or time that it decides; empty for values of tensors alone.
        words: The accepted words of a `WORD`.
        means: The accepted value of `ONLY`; the feature that `FEATURE` turns on.
        block: The kind of block without which it is not written; empty for any.
        dest: The attribute in which Megatron's parser stores it, if that is not `name`.
        note: Rule by which it is read together with other arguments, or the reason for its refusal.
    """

    name: str
    kind: Kind
    key: str = ""
    default: Any = None
    conversion: Conversion = SAME
    touches: str = ""
    words: tuple[str, ...] = ()
    means: Any = None
    block: str = ""
    dest: str = ""
    note: str = ""

    @property
    def flag(self) -> str:
        """`--tensor-model-parallel-size` of `tensor_model_parallel_size`."""
        return flag(self.name)

    @property
    def direct(self) -> bool:
        """True if no other argument sets this key."""
        return bool(self.key) and self.conversion not in (JOINT, ONLY, FEATURE, REPORTED)

    def written(self, spec: Any, blocks: frozenset[str]) -> Any:
        """The value for a spec that has these kinds of block; None or False if it is omitted."""
        if self.block and self.block not in blocks:
            return None
        if self.conversion is ONLY:
            return self.means if self.means != self.default else None
        found = value_at(spec, self.key) if self.direct else None
        return None if found is None and self.conversion not in (ZERO_IS_NONE, GIVEN_DISPATCHER) else self.conversion.write(found)


def flag(name: str) -> str:
    """`--tensor-model-parallel-size` of `tensor_model_parallel_size`."""
    return f"--{name.replace('_', '-')}"


def value_at(spec: Any, key: str) -> Any:
    """The value of a dotted key; None if a section of the path is absent or of another kind."""
    return reduce(lambda section, name: getattr(section, name, None), key.split("."), spec)


def switch(name: str, key: str = "", conversion: Conversion = SAME, **more: Any) -> Argument:
    """A switch, off if it is absent."""
    return Argument(name, Kind.SWITCH, key, default=False, conversion=conversion, **more)


def count(name: str, key: str = "", default: Any = None, conversion: Conversion = SAME, **more: Any) -> Argument:
    """A positive integer."""
    return Argument(name, Kind.COUNT, key, default, conversion, **more)


def number(name: str, key: str = "", default: Any = None, conversion: Conversion = SAME, **more: Any) -> Argument:
    """A number that is not negative."""
    return Argument(name, Kind.NUMBER, key, default, conversion, **more)


def text(name: str, key: str = "", default: Any = None, conversion: Conversion = SAME, **more: Any) -> Argument:
    """Any text, number or list."""
    return Argument(name, Kind.TEXT, key, default, conversion, **more)


def only(name: str, means: Any, default: Any, note: str, kind: Kind = Kind.TEXT, **more: Any) -> Argument:
    """An argument of which one value, `means`, is accepted."""
    return Argument(name, kind, "", default, ONLY, means=means, note=note, **more)


def feature(name: str, feature: str, note: str) -> Argument:
    """An argument that enables a feature which is recognised but not priced."""
    return Argument(name, Kind.TEXT, "host.features", conversion=FEATURE, means=feature, touches="buffers", note=note)


def reported(names: str, note: str) -> Iterator[Argument]:
    """Arguments without a counterpart in a spec; their names are the words of one text."""
    return (Argument(name, Kind.TEXT, conversion=REPORTED, note=note) for name in names.split())
