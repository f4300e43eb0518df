"""`python -m megarun`, alone or under torchrun."""

import faulthandler
import sys

from megarun.cli.main import run
from megarun.launch.failure import exit_process

if __name__ == "__main__":
    if sys.stderr is not None:
        faulthandler.enable()  # SIGBUS and SIGSEGV, in libraries or on a failing disk, say where
    exit_process(run())
