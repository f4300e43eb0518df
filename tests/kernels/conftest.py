"""Every kernel test runs with uninitialised memory filled with NaN, so that reading an unwritten buffer fails, and on one thread."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # op_cases and op_checks


@pytest.fixture(autouse=True)
def poisoned_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    on_gpu = request.config.getoption("--device", None) not in (None, "cpu")
    # torch fills empty tensors with NaN (integers with their largest value) in this mode; on a GPU the fp64 formulas of the checks may
    # use operations that are not deterministic
    torch.use_deterministic_algorithms(True, warn_only=on_gpu)
    assert torch.empty(4).isnan().all()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are small: more threads only wait for each other
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(before)
