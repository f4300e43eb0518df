"""Train random layouts of random small models on 2 to 8 processes and compare with one process; exits 1 if one differs.

python scripts/parity_random.py [--seed 0] [--count 40]
"""

import argparse
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests/megarun/parity"))

import yaml  # noqa: E402
from parity_compare import course_difference  # noqa: E402
from parity_world import CellFailedError, Worlds  # noqa: E402
from random_cells import random_cell  # noqa: E402


def _perturbed(worlds: Worlds, reference: dict[str, Any], seed: int) -> dict[str, Any]:
    return worlds.reference({**reference, "perturbed": seed})


def main() -> int:
    """Print each layout with its distance, and the spec of each that differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=40)
    given = parser.parse_args()
    os.environ["PYTHONWARNINGS"] = "ignore"  # of the worlds' processes
    began, failed = time.monotonic(), []
    with Worlds() as worlds:
        for seed in range(given.seed, given.seed + given.count):
            cell = random_cell(seed)
            case, reference = ({**each, "run": "course"} for each in (cell.case, cell.reference))
            try:
                records, expected = worlds.train(case, cell.world_size), worlds.reference(reference)
                found = course_difference(case, records, expected, cell.bound, partial(_perturbed, worlds, reference))
            except CellFailedError as error:
                found = error
            model = case["spec"]["model"]
            said = f"seed {seed}: {model['pattern']} x {model['num_layers']}, {cell.axes}, bound {cell.bound:.0e}"
            print(f"{said}: {found or 'ok'}", flush=True)
            if found is not None:
                failed.append(seed)
                print(yaml.safe_dump(case, sort_keys=False, default_flow_style=None, width=120), flush=True)
    print(f"{given.count} layouts, {len(failed)} differ: {failed}; {time.monotonic() - began:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
