"""Compares what a step of each spec launched, as `launch_worker` saved it, with what is found on fake tensors.

python find_worker.py SPECS.json OUT
"""

import json
import pickle
import sys
from pathlib import Path
from typing import Any

from launch_worker import job_of

from megarun.kernels.launches import compile_for, keyed
from megarun.kernels.step import find_launches
from megarun.kernels.target import Target

INTERPRETER = Target((10, 0), num_sms=2, cudnn_version=None, has_flash=False)
"""A target for which operations choose what they choose on a CPU with the interpreter: no library's attention, large tiles."""


def main(specs: dict[str, Any], out: Path) -> None:
    compile_for(INTERPRETER)
    differences = {}
    for name, values in specs.items():
        job = job_of(values)
        for rank in range(job.spec.mesh.world_size):
            launched = {keyed(launch).identity for launch in pickle.loads((out / f"{name}.{rank}.pickle").read_bytes())}
            found: set[Any] = set()
            find_launches(job, rank, INTERPRETER, lambda launch, found=found: found.add(launch.identity))
            differences[f"{name} {rank}"] = {
                "launched": len(launched),
                "only launched": sorted(map(str, launched - found)),
                "only found": sorted(map(str, found - launched)),
            }
    print(json.dumps(differences))  # noqa: T201  read by the test


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
