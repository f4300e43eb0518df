"""The public names: documented, typed, imported when asked for, and their examples run."""

import ast
import doctest
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import megaplan
from megaplan.api import estimate, load, plans, schedule, split

ROOT = Path(__file__).parents[3]
MODULES = {"load": load, "estimate": estimate, "split": split, "diff": plans, "check": plans, "schedule": schedule}


@pytest.mark.parametrize("name", megaplan.__all__)
def test_a_public_name_is_documented_and_typed(name):
    value = getattr(megaplan, name)
    assert inspect.getdoc(value), f"megaplan.{name} has no docstring"
    if inspect.isclass(value):
        for attribute, member in list(vars(value).items()):
            getter = getattr(member, "fget", None) or getattr(member, "func", None) or member
            if not attribute.startswith("_") and inspect.isfunction(getter):
                assert getter.__doc__, f"megaplan.{name}.{attribute} has no docstring"
                assert "return" in getter.__annotations__, f"megaplan.{name}.{attribute} has no return type"
        return
    assert set(value.__annotations__) == {*inspect.signature(value).parameters, "return"}
    assert {"Raises:", "Examples:"} <= set(map(str.strip, value.__doc__.splitlines()))
    documented = {word for line in value.__doc__.splitlines() for word in [line.strip().partition(":")[0].lstrip("*")]}
    assert set(inspect.signature(value).parameters) <= documented, f"megaplan.{name}: an argument is not described"


@pytest.mark.parametrize("name", megaplan.__all__)
def test_the_page_of_the_api_lists_every_public_name(name):
    page = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    assert f"::: megaplan.{name}\n" in page or f"`{name}`" in page


def test_a_type_checker_sees_what_is_imported_when_asked_for():
    """The names imported for types are those of `__all__`, from the modules that `__getattr__` takes them from."""
    tree = ast.parse(Path(megaplan.__file__).read_text(encoding="utf-8"))
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        (statement.module.removeprefix("megaplan."), name.name)
        for statement in guarded.body
        if isinstance(statement, ast.ImportFrom)
        for name in statement.names
    }
    assert seen == {(module, name) for module, names in megaplan._HOMES.items() for name in names}
    assert {name for _, name in seen} == set(megaplan.__all__)


def test_importing_megaplan_imports_nothing_else():
    code = "import sys, megaplan; print(*(name for name in sys.modules if name.startswith(('megaplan.', 'pydantic', 'yaml', 'torch'))))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="bogus"):
        getattr(megaplan, "bogus")  # noqa: B009
    assert set(megaplan.__all__) <= set(dir(megaplan))


@pytest.mark.parametrize("name", MODULES)
def test_the_example_prints_what_it_says(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    function = getattr(MODULES[name], name)
    (example,) = doctest.DocTestFinder(recurse=False).find(function, f"megaplan.{name}", globs={})
    assert example.examples
    failed, _ = doctest.DocTestRunner().run(example)
    assert failed == 0


def test_the_packages_are_typed():
    for package in ("src/megaplan", "src/megarun", "kernels/megakernels"):
        if (ROOT / package).is_dir():
            assert (ROOT / package / "py.typed").is_file()
