"""Every kernel test runs with uninitialised memory filled with NaN, so that a buffer read before it is written shows, and on one thread."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # op_cases and op_checks


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # torch fills empty tensors with NaN (integers with their largest value) in this mode
    assert torch.empty(4).isnan().all()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are small: more threads only wait for each other
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(before)
