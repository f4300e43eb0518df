"""`python -m megarun`, alone or under torchrun."""

from megarun.cli import run
from megarun.failure import leave

if __name__ == "__main__":
    leave(run())
