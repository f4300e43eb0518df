"""`python -m megaplan`."""

import sys

from megaplan.cli.main import run

if __name__ == "__main__":
    sys.exit(run())
