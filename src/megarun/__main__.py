"""`python -m megarun`, alone or under torchrun."""

import sys

from megarun.cli import run

if __name__ == "__main__":
    sys.exit(run())
