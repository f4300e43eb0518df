"""The kernel checks on a device, without one: the same way with the interpreter in its place, and where tensors are made."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from on_device import OnDevice

FOLDER = Path(__file__).parent / "interpreted"
FILES = ("check_tiles", "check_head_gated_norm")


def check(*words: str, interpreted: bool) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("TRITON_", "PYTEST_"))}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), **({"TRITON_INTERPRET": "1"} if interpreted else {})}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.mark.jobs
def test_the_checks_run_on_a_device_and_write_a_line_each(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    lines = tmp_path / "lines.jsonl"
    paths = [str(FOLDER / f"{name}.py") for name in FILES]
    done = check(*paths, "--device", "cpu", "--lines", str(lines), "-m", "not slow", interpreted=True)
    assert done.returncode == 0, done.stdout
    found = [json.loads(line) for line in lines.read_text().splitlines()]
    assert {line["outcome"] for line in found} == {"passed"}
    assert {line["test"].rpartition("/")[2].partition(".")[0] for line in found} == set(FILES)
    assert f"{len(found)} passed" in done.stdout


@pytest.mark.slow
def test_the_folder_is_collected_for_a_device() -> None:
    pytest.importorskip("triton")
    listed = check(str(FOLDER), "--device", "cpu", "--collect-only", "-m", "not slow", interpreted=True)
    files = {line.partition("::")[0].rpartition("/")[2] for line in listed.stdout.splitlines() if "::" in line}
    assert files == {path.name for path in FOLDER.glob("check_*.py")}
    refused = check(str(FOLDER / "check_tiles.py"), "--device", "cpu", interpreted=False)
    assert refused.returncode != 0
    assert "--device cpu with TRITON_INTERPRET=1" in refused.stdout + refused.stderr


def test_what_a_check_makes_is_on_the_device_with_the_hosts_values() -> None:
    """The device `meta` has no values, but every tensor has a device."""
    device = torch.device("meta")
    with device, OnDevice(device):
        generator = torch.Generator().manual_seed(0)
        made = [torch.randn(3, generator=generator), torch.rand((2, 2)), torch.randint(5, (3,), generator=generator), torch.empty(2)]
        made += [torch.tensor([1.0]), torch.arange(3), torch.from_numpy(np.zeros(2)), torch.empty(3).normal_(generator=generator)]
        made += [torch.randn_like(made[-1]), torch.as_tensor(np.zeros(2)), torch.full((2,), 1.0)]
    assert {each.device.type for each in made} == {"meta"}
    assert torch.from_numpy(np.zeros(2)).device.type == "cpu"
    expected = torch.randn(3, generator=torch.Generator().manual_seed(0))
    with torch.device("cpu"), OnDevice(torch.device("cpu")):
        assert torch.equal(torch.randn(3, generator=torch.Generator().manual_seed(0)), expected)
        assert torch.equal(torch.empty(3).normal_(generator=torch.Generator().manual_seed(0)), expected)
        assert torch.from_numpy(expected.numpy()).equal(expected)
