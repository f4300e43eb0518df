"""docs/reference/kernels.md matches the operations' docstrings and registrations, and the docstrings match the registrations."""

import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "kernels_page.py"
if not SCRIPT.exists():
    pytest.skip("megakernels is tested from an installed wheel", allow_module_level=True)


def script() -> ModuleType:
    found = importlib.util.spec_from_file_location("kernels_page", SCRIPT)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


page = script()
EACH = pytest.mark.parametrize(("name", "function"), page.operations(), ids=[name for name, _ in page.operations()])


def test_the_page_is_up_to_date() -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.page(), "run scripts/kernels_page.py"


@EACH
def test_a_docstring_lists_saved_tensors_besides_inputs(name: str, function: Callable[..., Any]) -> None:
    made = [each for each in page.saved(name) if each not in inspect.signature(function).parameters]
    assert list(page.entries(page.sections(function).get("Saves", ""))) == made


@EACH
def test_a_docstring_describes_registered_scratch(name: str, function: Callable[..., Any]) -> None:
    assert ("Scratch" in page.sections(function)) == bool(page.states_scratch(name)) or name.endswith("_backward")


@EACH
def test_every_argument_has_its_shape_or_meaning(name: str, function: Callable[..., Any]) -> None:
    listed = list(page.entries(page.sections(function).get("Args", "")))
    parameters = list(inspect.signature(function).parameters)
    assert not listed or listed == parameters


def test_folders_with_kernels_are_those_of_operations_with_kernels() -> None:
    ops = ROOT / "kernels" / "megakernels" / "ops"
    with_kernels = {page.folder_of(function) for name, function in page.operations() if page.triton_of(name)}
    own = {path.parent.name for path in ops.glob("*/kernel*.py")}
    assert with_kernels == own | {"linear_cross_entropy", "chosen_attention"}  # which run the kernels of cross_entropy and attention
    assert all((ops / page.folder_of(function) / "reference.py").exists() for _, function in page.operations())
