"""Words that the finished folders must not use: each hit fails with file, line, word and the plain alternative.

Checked are comments, strings, the words of identifiers, and pages. `FOLDERS` lists the folders that are finished; add a folder after its
text is revised. `ALLOWED` has the places where a listed word is the field's own term.
"""

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = (
    "benchmarks",
    "docs",
    "kernels",
    "scripts",
    "src/megaplan",
    "src/megarun",
    "tests/kernels",
    "tests/megarun",
    "tests/static",
)
"""Folders whose texts are revised."""
PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "README.md")
LATER = (
    "docs/decisions/0010-peak-moments.md",
    "docs/errors/README.md",
)
"""Parts of them that are not; the index of the errors has the words of their titles without their context."""

_UNIT = "layer|rank|token|slot|step|stage|sequence|program|head|line|file|row"
WORDS = {
    r"beside": "next to, with, in addition to, compared with",
    r"stands?|stood|standing": "is, has, occurs",
    r"anew": "again, new",
    r"heeds?": "check, poll",
    r"hand(?:s|ed|ing)?(?: it| them)? on": "pass on, send",
    r"handed over|hands over": "pass, send",
    r"moments?": "time, point, peak; only the optimizer has moments",
    r"born|births?|dies|died|deaths?": "allocated, freed, started, ended",
    r"gone": "freed, removed, closed",
    r"nobody": "no process, no one, nothing",
    r"alike": "equal, equally, the same",
    r"apart": "separate, separately, distinguish",
    r"aside": "except, separately",
    r"told|tells?|telling": "reported, shows, distinguishes",
    r"lies|lay|laid": "is, is stored, is located",
    r"spoils?|spoilt": "corrupt, corrupted",
    r"torn": "aborted, split",
    r"strangers?": "another program",
    r"wants|wished?|wishes": "needs, requires",
    r"likewise": "also; repeat the phrase",
    r"now and then": "at intervals",
    r"all else": "everything else, the rest",
    r"lest|hence|thence|whence|upon|amid|thereof|whereof|wherein|thereby": "so that, therefore, from, on, in",
    r"came of|comes? of|come of": "is a descendant of, results from",
    r"under way": "in progress",
    r"goes on|go on|going on|went on": "continues",
    r"at its highest|at the highest": "at the peak",
    r"to the bit": "bitwise",
    rf"(?:{_UNIT}|group|column|second) an? (?:{_UNIT})": "per",
    rf"(?:bytes|elements|FLOPs|tokens|sequences|launches) an? (?:{_UNIT}|GPU|device|parameter|head)(?! (?:of|that|in|is|has|whose))": "per",
    r"(?:all|nothing|anything|everything|none) but|but for (?!each|every|all|this)": "except, only",
    r"(?:an? (?:[\w-]+ ){1,2}|\w+s )of (?:its|their|one's) own(?=[.,;:)`]|$)": "its own, a separate, a custom",
    r"on as many GPUs": "on the same number of GPUs",
    r"in the median|at the least": "a median of, at least",
    r"(?:is|are) none of|where (?:that|it) is free": "is not one of, if equally good",
    r"comes? with the (?:published )?weights": "is published with the weights",
    r"(?<!there )(?:is|are|was|were) no (?!longer|more|such|less|help|worse|better|one|\w+er\b)": "is not a, are not",
}
"""Word to plain alternative."""

OF_OPTIMIZERS = (
    "src/megaplan/budget/megatron.py",
    "src/megaplan/cost",
    "src/megaplan/hosts",
    "src/megaplan/post_training/columns.py",
)
"""Places whose moments are the optimizer's."""

ALLOWED = {
    r"^(?:\"moments\"|moments(?: dtype)?)$": "the spec's key precision.moments and its variables: moments of the optimizer",
    r"precision[.]moments|moments: (?:bf16|fp32)|store its moments|AdamW.* moments|[Mm]oments (?:of zero|in a dtype)": "of the optimizer",
    r"[Mm]oments of (?:the (?:matrix group|rest)|evenly|their parameters)|rounding of moments": "of the optimizer",
    r"(?:parameters|gradients) and moments|moments: \{|optimizer moments|keeps? moments|both moments|^Moment Type$": "of the optimizer",
    r"[|] moments [|]|[Oo]ptimizer.* moments?": "of the optimizer",
    r"where it has moments": "statistical moments of a distribution",
    r"one E layer a stage": "a reason that pinned random plans have drawn",
    r"-beside-|cost/beside[.]py": "names of plans of the accuracy matrix and of decision 19, and a module of megaplan",
    r"0010-peak-moments|schedules?[.]moments": "a decision on that module",
    r"^\"Of[|]What[|]Whether": "the words that begin fragments, in test_fragments.py",
}
"""Pattern of a text in which a listed word is legal, with the reason."""


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of every comment, string and identifier of a Python file; identifiers as words separated by spaces."""
    if path.suffix == ".md":
        yield from enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        return
    if path.suffix != ".py":
        yield from ((number, line.partition("#")[2]) for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1))
        return
    strings = {tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        if token.type in strings:
            for offset, line in enumerate(token.string.splitlines()):
                yield token.start[0] + offset, line
        elif token.type == tokenize.NAME:
            yield token.start[0], re.sub(r"(?<=[a-z])(?=[A-Z])", " ", token.string).replace("_", " ")


def hits(path: Path, root: Path = ROOT) -> list[str]:
    """One line per word of a file that is listed and not allowed."""
    return [
        f"{path.relative_to(root)}:{line}: {found[0]!r}, write: {plain}"
        for line, text in texts(path)
        if not any(allowed.search(text.strip()) for allowed in _ALLOWED)
        for pattern, plain in _WORDS
        if not (plain == WORDS["moments?"] and path.relative_to(root).as_posix().startswith(OF_OPTIMIZERS))
        if (found := pattern.search(text))
    ]


_WORDS = [(re.compile(rf"\b(?:{words})\b", re.IGNORECASE), plain) for words, plain in WORDS.items()]
_ALLOWED = [re.compile(pattern) for pattern in ALLOWED]


@pytest.mark.parametrize("folder", [*FOLDERS, *PAGES])
def test_no_listed_word(folder: str) -> None:
    place = ROOT / folder
    files = [place] if place.is_file() else [path for suffix in ("md", "py", "sh") for path in sorted(place.rglob(f"*.{suffix}"))]
    assert files
    revised = [path for path in files if path != Path(__file__) and not path.relative_to(ROOT).as_posix().startswith(LATER)]
    found = [hit for path in revised for hit in hits(path)]
    assert not found, "\n".join(found)


def test_hits_are_found_in_comments_strings_and_names(tmp_path: Path) -> None:
    """Each with its line; a longer word that contains a listed one is none."""
    file = tmp_path / "some.py"
    file.write_text('x = 1  # beside y\nhanded_on = f"{x} is gone"\nbesides = """a\nb anew"""\n', encoding="utf-8")
    assert [hit.partition(", ")[0] for hit in hits(file, tmp_path)] == [
        "some.py:1: 'beside'",
        "some.py:2: 'handed on'",
        "some.py:2: 'gone'",
        "some.py:4: 'anew'",
    ]


@pytest.mark.parametrize("pattern", ALLOWED)
def test_every_exception_is_needed(pattern: str) -> None:
    """An exception without a place that uses it is removed."""
    files = (
        path for folder in FOLDERS for path in (ROOT / folder).rglob("*.*") if path.suffix in (".md", ".py") and path != Path(__file__)
    )
    assert any(re.search(pattern, text.strip()) for path in files for _, text in texts(path))
