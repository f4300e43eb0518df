"""Files of this folder run in Triton's interpreter, or on a device.

    TRITON_INTERPRET=1 pytest tests/kernels/interpreted/check_*.py          the interpreter, programs of a grid shuffled
    pytest tests/kernels/interpreted --device cuda [--lines FILE]           a GPU: the compiled kernels
    TRITON_INTERPRET=1 pytest tests/kernels/interpreted --device cpu        the way of a GPU, with the interpreter in its place

The interpreter needs its own process: triton reads the variable when it is imported. With `--device` every tensor that a check makes
is on that device, with the values that the host's generators give, and programs run in the device's order. `--lines` appends a line of
JSON a test.
"""

import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from on_device import OnDevice


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--device", default=None, help="run the kernel checks on this device: cuda, or cpu with TRITON_INTERPRET=1")
    parser.addoption("--lines", default=None, type=Path, help="append every kernel check's result to this file")


def pytest_collect_file(file_path: Path, parent: Any) -> Any:
    device, interpreted = parent.config.getoption("--device"), os.environ.get("TRITON_INTERPRET") == "1"
    named = parent.session.isinitpath(file_path)
    if device is None:
        if named and not interpreted:
            raise pytest.UsageError("TRITON_INTERPRET=1 pytest tests/kernels/interpreted/check_*.py, or --device cuda")
        return None
    if interpreted is not (torch.device(device).type == "cpu"):
        raise pytest.UsageError(f"--device {device} {'without' if interpreted else 'with'} TRITON_INTERPRET=1")
    collects = file_path.match("check_*.py") and not named  # pytest itself collects named files
    return pytest.Module.from_parent(parent, path=file_path) if collects else None


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    if config.getoption("--device") not in (None, "cpu"):
        for item in items:
            if item.get_closest_marker("interpreter"):
                item.add_marker(pytest.mark.skip(reason="what the interpreter or the host's allocator does"))


@pytest.fixture(autouse=True)
def order_of_the_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.config.getoption("--device") is not None:
        monkeypatch.setattr("kernel_checks.SHUFFLES", False)


class Lines:
    """Writes a test's result at once; with pytest-xdist in the process that collects the results."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        line = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 3)}
        if report.outcome != "passed":
            line["failure"] = str(report.longrepr)[-2000:]
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def pytest_configure(config: Any) -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        from fast_interpreter import speed_up  # noqa: PLC0415  needs triton, which the folder is collected without

        speed_up()
    path = config.getoption("--lines")
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Lines(path), "lines")
    if (name := config.getoption("--device")) is not None:  # from here on: files make tensors when they are imported too
        device, stack = torch.device(name), ExitStack()
        stack.enter_context(device)
        stack.enter_context(OnDevice(device))  # type: ignore[no-untyped-call]
        config.add_cleanup(stack.close)
