"""`python -m megarun`, alone or under torchrun."""

from megarun.cli.main import run
from megarun.launch.failure import exit_process

if __name__ == "__main__":
    exit_process(run())
