"""A benchmark's part in a process of its own, so that none inherits another's allocator."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from h200.measure import clean_environment


def run_alone(script: str, *arguments: str, seconds: float, gpu: bool = True) -> dict[str, Any]:
    """What a fresh process of `script` prints as its last line, JSON; {"failure": …} if it fails or takes too long."""
    environment = clean_environment() if gpu else {**clean_environment(), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, script, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"failure": f"stopped after {seconds:.0f} s"}
    if done.returncode:
        sys.stderr.write(done.stderr)
        return {"failure": (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
