"""A pytest plugin: records which lines of megaplan each test runs and how long it takes, or runs chosen tests in a given order.

MUTATION_RECORD names the file to record to, MUTATION_SELECT a file of node ids, one per line, in order. A test has its own setup; what a
wider fixture does, or a module when it is imported, is counted to the first test that asks for it.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

RECORD, SELECT = os.environ.get("MUTATION_RECORD"), os.environ.get("MUTATION_SELECT")


class Recorder:
    """Seconds of each test on a processor, its child processes' too, and lines by test."""

    def __init__(self, path: Path) -> None:
        import coverage  # noqa: PLC0415  (only recording needs it)

        self.path, self.seconds = path, dict[str, float]()
        self.coverage = coverage.Coverage(data_file=None, include=["*/src/megaplan/*"], config_file=False)
        self.coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Lines from here on are the test's."""
        began = sum(os.times()[:4])
        self.coverage.switch_context(item.nodeid)
        result = yield
        self.coverage.switch_context("")
        self.seconds[item.nodeid] = sum(os.times()[:4]) - began
        return result

    def pytest_sessionfinish(self) -> None:
        """Write tests with their seconds, and for each line the indices of its tests."""
        self.coverage.stop()
        data, tests = self.coverage.get_data(), list(self.seconds)
        index = {test: number for number, test in enumerate(tests)}
        lines: dict[str, dict[int, list[int]]] = {}
        for file in data.measured_files():
            place = "src/" + file.rpartition("/src/")[2]
            lines[place] = {
                line: sorted(index[test] for test in contexts if test in index) for line, contexts in data.contexts_by_lineno(file).items()
            }
        self.path.write_text(json.dumps({"tests": [[test, round(self.seconds[test], 4)] for test in tests], "lines": lines}))


class Chosen:
    """Runs the tests of a list, in its order, and none that is not on it."""

    def __init__(self, path: Path) -> None:
        self.order = {test: number for number, test in enumerate(path.read_text().splitlines())}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Deselect the others."""
        others = [item for item in items if item.nodeid not in self.order]
        items[:] = sorted((item for item in items if item.nodeid in self.order), key=lambda item: self.order[item.nodeid])
        config.hook.pytest_deselected(items=others)


def pytest_configure(config: pytest.Config) -> None:
    """Register what the environment asks for."""
    chosen: list[Any] = []
    if RECORD:
        chosen.append(Recorder(Path(RECORD)))
    if SELECT:
        chosen.append(Chosen(Path(SELECT)))
    for plugin in chosen:
        config.pluginmanager.register(plugin)
