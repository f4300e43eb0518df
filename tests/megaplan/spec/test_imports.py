"""Loading a spec stays light: pydantic and yaml, nothing for terminals or arrays."""

import subprocess
import sys

from spec_samples import REPOSITORY

HEAVY = {"torch", "triton", "numpy", "scipy", "rich", "typer", "difflib"}


def test_loading_a_spec_imports_nothing_heavy() -> None:
    program = (
        "import sys; from megaplan.spec.load import load_spec; "
        f"load_spec({str(REPOSITORY / 'tests' / 'megaplan' / 'spec' / 'sample.yaml')!r}); "
        f"print(sorted(set(sys.modules) & {HEAVY!r}))"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
