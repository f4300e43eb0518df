"""Estimate other people's runs, write `docs/reference/unseen-runs.md` and the interval `others` of `constants.json`.

python benchmarks/unseen/run.py [--check]     --check exits 1 if the page is out of date
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pages import write_page
from step_times.written import FILE, constants_text
from unseen.compare import compared, others, read_rows
from unseen.page import PAGE, text

from megaplan.cost.step.fitted import OTHERS


def main() -> int:
    """Write both, or compare the page."""
    found = compared(read_rows())
    if "--check" not in sys.argv[1:]:
        whole = json.loads(FILE.read_text(encoding="utf-8"))
        whole["intervals"][OTHERS] = [round(bound, 4) for bound in others(found)]
        FILE.write_text(constants_text(whole), encoding="utf-8")
    return write_page(PAGE, text(found))


if __name__ == "__main__":
    sys.exit(main())
