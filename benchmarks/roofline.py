"""Roofline of a training step: bytes, FLOPs and launches of every operation, counted on fake tensors, and a lower bound of the step time.

python benchmarks/roofline.py PLAN|SPEC [--set KEY=VALUE] [--json]
python benchmarks/roofline.py --write

It needs no GPU. For one rank per pipeline stage it runs megarun's forward, backward and optimizer step without values and records every
operation: HBM bytes, FLOPs by dtype, launches, sequential steps, host synchronisations and collectives. Operations of `megakernels` run
their own CUDA code with Triton launches recorded, so an operation that still runs plain torch on CUDA counts as its torch operations.
Each operation is priced at the device's peak rates; the result is a lower bound of the step time and an upper bound of the MFU, not a
prediction. Only a few microbatches are run, because all between the first and the last are identical.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rooflines.report import document, lines, page_section
from rooflines.runs import count_ranks, with_few_microbatches
from rooflines.step import Roofline, roofline

import megaplan
from megaplan.errors import MegaplanError, render_diagnostic
from megarun.job.job import Job
from megarun.job.support import refuse_unbuilt

ROOT = Path(__file__).parents[1]
SPECS = Path(__file__).parent / "rooflines"
PAGE = ROOT / "docs" / "reference" / "roofline.md"
INTRODUCTION = SPECS / "page.md"
JOBS = (
    ("NAM56R on 8 H200", ROOT / "plans" / "nam56r-8xh200.yaml", ()),
    ("An 8 B dense model on 8 H200", SPECS / "dense-8b.yaml", ()),
    ("A hybrid like Nemotron-3-Nano on 8 H200", SPECS / "nemotron-3-nano.yaml", ()),
)
"""Cases of the page: title, spec, and keys that are set in it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Count and print, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("path", nargs="?", help="a plan or a spec")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a value that replaces the spec's")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--write", action="store_true", help="write docs/reference/roofline.md")
    given = parser.parse_args(arguments)
    if given.write == (given.path is not None):
        parser.error("name a plan or a spec, or --write")
    try:
        if given.write:
            write_page()
            return 0
        found = counted(given.path, given.set)
    except MegaplanError as error:
        for diagnostic in error.diagnostics:
            sys.stderr.write(f"{render_diagnostic(diagnostic)}\n")
        return 1
    print(json.dumps(document(found), indent=1) if given.json else "\n".join(lines(found)))
    return 0


def counted(path: str, overrides: Sequence[str]) -> Roofline:
    """The roofline of a plan or spec.

    Raises:
        MegaplanError: The file is wrong, or megarun does not build what it asks for.
    """
    loaded = megaplan.load(path, *overrides)
    job = Job(loaded.spec, loaded.inventory, loaded.layout)
    refuse_unbuilt(job.spec)
    return roofline(job, count_ranks(with_few_microbatches(job)))


def write_page() -> None:
    """The page of `JOBS`."""
    text = [INTRODUCTION.read_text(encoding="utf-8").rstrip(), ""]
    for title, path, overrides in JOBS:
        text += page_section(title, counted(str(path), overrides))
    PAGE.write_text("\n".join(text).rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
