"""Estimate torchtitan's published runs, and write `docs/reference/accuracy-torchtitan.md`.

python benchmarks/accuracy_torchtitan/run.py
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from accuracy_torchtitan.page import PAGE, compared, text


def main() -> int:
    """Estimate and write."""
    found = compared()
    PAGE.write_text(text(found), encoding="utf-8")
    for one in sorted(found, key=lambda one: -abs(one.error)):
        print(f"{one.error:+6.1f} %  {one.row.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
