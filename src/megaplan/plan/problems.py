"""Diagnostics about a plan: one function per diagnostic (MP401 … MP413)."""

from collections.abc import Iterable, Sequence

from megaplan.diagnostics import diagnostic
from megaplan.errors import Diagnostic, Location, Severity
from megaplan.wording import is_newer

MAKE_A_PLAN = "megaplan split SPEC -o plan.json"
MAX_DIGITS = 100


def dotted(path: Sequence[str | int]) -> str:
    """`decisions.stages.0.layers`."""
    return ".".join(str(step) for step in path)


def shortened(text: str, length: int = 60) -> str:
    """At most `length` characters, with a mark where text was cut."""
    return text if len(text) <= length else text[: length - 3] + "..."


def not_json(detail: str, location: Location) -> Diagnostic:
    """The text is not JSON."""
    return diagnostic("MP109", detail, location, (MAKE_A_PLAN,))


def key_twice(key: str, location: Location) -> Diagnostic:
    """One object has a key twice."""
    return diagnostic("MP110", f"the key {shortened(key)} occurs twice in one object", location, (MAKE_A_PLAN,))


def too_deep(location: Location) -> Diagnostic:
    """The nesting is too deep for a plan."""
    return diagnostic("MP117", "its arrays or objects are nested thousands of levels deep", location, (MAKE_A_PLAN,))


def not_an_integer(text: str, location: Location) -> Diagnostic:
    """The number is of a kind that plans do not hold."""
    return diagnostic("MP401", f"{shortened(text)} is not an integer of at most {MAX_DIGITS:,} digits", location, (MAKE_A_PLAN,))


def truncated(num_bytes: int, location: Location) -> Diagnostic:
    """The text ends inside the document."""
    return diagnostic("MP402", f"the file ends after {num_bytes:,} bytes, before its closing brace", location, (MAKE_A_PLAN,))


def not_a_plan(detail: str, location: Location) -> Diagnostic:
    """The diagnostic for JSON that is not a plan."""
    return diagnostic("MP403", detail, location, (MAKE_A_PLAN,))


def other_format(written: str, location: Location) -> Diagnostic:
    """The file is a spec, another document of megaplan, or a plan of an older or newer major version."""
    newer = is_newer(written, "megaplan.plan/1")
    if newer is not None:
        detail = f"format = {shortened(written)}, {'newer' if newer else 'older'} than megaplan.plan/1, which this version reads"
        return diagnostic("MP404", detail, location, ("pip install --upgrade megaplan" if newer else MAKE_A_PLAN,))
    detail = f"format = {shortened(written)}, expected megaplan.plan/1"
    name = location.file if location.file not in (None, "<stdin>") else "SPEC"
    hint = f"megaplan split {name} -o plan.json" if written.startswith("megaplan.spec/") else MAKE_A_PLAN
    return diagnostic("MP403", detail, location, (hint,))


def unknown_key(path: Sequence[str | int], location: Location) -> Diagnostic:
    """Plans of this minor version do not have the key."""
    return diagnostic("MP405", f"{dotted(path)} is not a key of a plan", location, ("megaplan schema plan",))


def missing_key(path: Sequence[str | int], location: Location) -> Diagnostic:
    """A required key is missing."""
    return diagnostic("MP405", f"{dotted(path)} is missing", location, ("megaplan schema plan",))


def wrong_field(key: str, detail: str, location: Location) -> Diagnostic:
    """The value has the wrong type or is out of range."""
    return diagnostic("MP405", f"{key} = {detail}", location, ("megaplan schema plan",))


def digest_mismatch(written: str, computed: str, location: Location) -> Diagnostic:
    """The inputs or decisions do not match the digest."""
    detail = f"written  {written}\ncomputed {computed}"
    return diagnostic("MP406", detail, location, ("change the spec, then " + MAKE_A_PLAN, "megaplan check PLAN"))


def contradiction(detail: str, location: Location) -> Diagnostic:
    """The diagnostic for a part of the plan that does not follow from its other parts."""
    return diagnostic("MP407", detail, location, (MAKE_A_PLAN,))


def newer_minor(written: int, ours: int, ignored: Iterable[str], location: Location) -> Diagnostic:
    """Keys of a newer minor version were ignored."""
    detail = f"format_minor = {written}, ours = {ours}; ignored in estimates and in training: {', '.join(ignored)}"
    return diagnostic("MP409", detail, location, ("pip install --upgrade megaplan",), severity=Severity.WARNING)
