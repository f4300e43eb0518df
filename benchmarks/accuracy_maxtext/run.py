"""Estimate MaxText's published runs on TPUs, and write `docs/reference/maxtext.md`.

python benchmarks/accuracy_maxtext/run.py
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from accuracy_maxtext.page import PAGE, compared, text


def main() -> int:
    """Estimate and write."""
    found = compared()
    PAGE.write_text(text(found), encoding="utf-8")
    for one in found:
        print(f"{one.error:+6.1f} %  {one.name}{f': {one.reason}' * bool(one.reason)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
