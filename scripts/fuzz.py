"""Read mutated files and options; exits 1 if one gives a traceback, takes 2 s of processor time, or memory passes 512 MiB.

python scripts/fuzz.py [--count 2000] [--seed 0] [--lines 2000 [--files DIR]]

`--lines` also runs command lines that hypothesis draws from the parser's options, on mutated files: those of this tree, and of a folder,
such as unpacked packages of the index.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests/megarun/fuzz"))

from fuzz_commands import Commands  # noqa: E402
from fuzz_foreign import ForeignFiles  # noqa: E402
from fuzz_grammar import files_of, run_lines  # noqa: E402
from fuzz_inputs import LARGEST_BYTES, Inputs, fuzz, peak_bytes  # noqa: E402

from megarun.data.corpus import read_corpus  # noqa: E402
from megarun.data.tokenize import tokenize  # noqa: E402
from megarun.data.tokenizer import TokenizerKind  # noqa: E402


def main() -> int:
    """Print how many of each kind were loaded and refused, and every input that was answered wrongly."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lines", type=int, default=0)
    parser.add_argument("--files", type=Path)
    chosen = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text").mkdir()
        (folder / "text" / "a.txt").write_text(Path(__file__).read_text())
        tokenize(read_corpus(folder / "text"), TokenizerKind.BYTES, 257, folder / "small.tokens")
        tokens = folder / "small.tokens"
        readers = Inputs(folder, tokens).readers | Commands(folder).readers | ForeignFiles(folder / "foreign", tokens).readers
        before = peak_bytes()
        found = fuzz(readers, chosen.count, chosen.seed)
        (folder / "lines").mkdir()
        lines = run_lines(folder / "lines", files_of(chosen.files), chosen.lines, chosen.seed) if chosen.lines else None
    for kind in readers:
        print(f"{kind}: {found.loaded[kind]} loaded, {found.refused[kind]} refused")
    wrong = found.wrong + (lines.wrong if lines else [])
    for command in sorted({*lines.taken, *lines.refused}) if lines else ():
        print(f"{command}: {lines.taken[command]} answered, {lines.refused[command]} refused")
    if lines:
        print(f"slowest command line: {lines.slowest[0]:.2f} s of processor time: {lines.slowest[1][:300]}")
    print(f"seed {chosen.seed}, {time.monotonic() - began:.1f} s, {peak_bytes() / 2**20:.0f} MiB, {before / 2**20:.0f} before")
    for line in wrong:
        print(f"wrong: {line}", file=sys.stderr)
    return 1 if wrong or peak_bytes() - before > LARGEST_BYTES else 0


if __name__ == "__main__":
    sys.exit(main())
