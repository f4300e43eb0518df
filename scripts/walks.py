"""Counts the files, functions and moves between files of megaplan in a command: how much code a reader walks through to follow it.

A file counts if one of its named functions is called; lambdas, comprehensions and the statements of a module or of a class do not count.
A move is a call of a named function in another file than that of the last one.
"""

import argparse
import inspect
import io
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src/megaplan"
FLAGSHIP, SMALL = ROOT / "plans/nam56r-8xh200.yaml", ROOT / "plans/tiny-hybrid.yaml"


@dataclass(slots=True)
class Walk:
    """Calls of named functions of the package.

    Attributes:
        functions: Called functions, as (file, qualified name).
        moves: Calls that change the file.
        file: File of the last call.
    """

    functions: set[tuple[str, str]] = field(default_factory=set)
    moves: int = 0
    file: str = ""

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        """Record a call; the function that `sys.setprofile` takes."""
        code = frame.f_code
        is_named = code.co_flags & inspect.CO_NEWLOCALS and not code.co_name.startswith("<")
        if event != "call" or not is_named or not code.co_filename.startswith(str(PACKAGE)):
            return
        self.functions.add((code.co_filename, code.co_qualname))
        self.moves += code.co_filename != self.file
        self.file = code.co_filename

    @property
    def files(self) -> set[str]:
        """Files of the functions."""
        return {file for file, _ in self.functions}


def _command(*words: str) -> Callable[[], object]:
    from megaplan.cli.main import run as megaplan  # noqa: PLC0415

    def run() -> None:
        with redirect_stdout(io.StringIO()):
            megaplan(list(words))

    return run


def _budget() -> Callable[[], object]:
    from megaplan.api.load import load  # noqa: PLC0415
    from megaplan.budget.peaks import build_budget  # noqa: PLC0415

    job = load(str(FLAGSHIP))
    subject = job.spec, job.inventory, job.layout
    return lambda: build_budget(*subject)


def walks(folder: str) -> dict[str, Callable[[], Callable[[], object]]]:
    """Each walk's preparation by name, which returns the function that is counted."""
    return {
        "build_budget": _budget,
        "estimate": lambda: _command("estimate", str(FLAGSHIP)),
        "split": lambda: _command("split", str(FLAGSHIP), "-o", f"{folder}/plan.json"),
        "search": lambda: _command("search", str(SMALL)),
    }


def count(prepare: Callable[[], Callable[[], object]]) -> Walk:
    """The walk of a prepared function."""
    function, walk = prepare(), Walk()
    sys.setprofile(walk)
    try:
        function()
    finally:
        sys.setprofile(None)
    return walk


def main() -> int:
    """Print a line per walk."""
    with tempfile.TemporaryDirectory() as folder:
        known = walks(folder)
        parser = argparse.ArgumentParser(description=__doc__)
        parser.add_argument("walks", metavar="WALK", nargs="*", help=f"{', '.join(known)}; all of them by default")
        chosen = parser.parse_args().walks or [*known]
        if unknown := [name for name in chosen if name not in known]:
            parser.error(f"no walk is named {', '.join(unknown)}; choose from {', '.join(known)}")
        for name in chosen:
            walk = count(known[name])
            print(f"{name}: {len(walk.files)} files, {len(walk.functions)} functions, {walk.moves:,} moves between files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
