"""Helpers that lie beside the tests, imported by path: pytest's importlib mode has no package here."""

import gc
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

NEED_TORCH = ["test_*ledger*.py", "test_model_flops.py"]
collect_ignore_glob = [] if importlib.util.find_spec("torch") else NEED_TORCH  # the planner's lane has no torch


def _load(name: str) -> ModuleType:
    found = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def random_specs() -> ModuleType:
    return _load("random_specs")


@pytest.fixture(scope="session")
def live_storages() -> ModuleType:
    return _load("live_storages")


@pytest.fixture(scope="module", autouse=True)
def _quick_collections() -> Iterator[None]:
    """Collections look only at what a test made, not at all of torch."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
