"""`python -m megaplan`."""

import sys

from megaplan.cli.main import run
from megaplan.terminal.streams import occupy_standard_descriptors

if __name__ == "__main__":
    occupy_standard_descriptors()
    sys.exit(run())
