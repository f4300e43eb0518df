"""Locked requirements of CI and `make`: every file by its hash, in the versions of constraints.txt."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOCKS = sorted((ROOT / "locks").glob("*.txt"))
REGISTRY_TORCH = "torch"
"""The registry's build of torch asks for a Triton and CUDA its own libraries."""
BY_HAND = "torch-cpu-wheels"


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(path: Path) -> dict[str, str]:
    """Version by name."""
    return {canonical(name): version for name, version in re.findall(r"^([\w.-]+)==([^\s;]+)", path.read_text(), re.MULTILINE)}


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.stem)
def test_every_requirement_is_pinned_with_a_hash(path: Path) -> None:
    requirements = [each for each in re.sub(r"\\\n", " ", path.read_text()).splitlines() if each.strip() and not each.startswith("#")]
    assert requirements
    for requirement in requirements:
        assert re.fullmatch(r"[\w.-]+==\S+( ; [^#]+?)?(\s+--hash=sha256:[0-9a-f]{64})+(\s+#.*)?", requirement), requirement[:120]


@pytest.mark.parametrize("path", [path for path in LOCKS if path.stem not in (REGISTRY_TORCH, BY_HAND)], ids=lambda path: path.stem)
def test_the_versions_are_those_of_the_constraints(path: Path) -> None:
    known, elsewhere = pins(ROOT / "constraints.txt"), {"httpx2-jsfetch"}  # in a browser alone
    assert {name: version for name, version in pins(path).items() if name not in elsewhere and known.get(name) != version} == {}


def test_the_builds_of_torch_are_one_version() -> None:
    version = pins(ROOT / "constraints.txt")["torch"]
    assert pins(ROOT / "locks" / f"{REGISTRY_TORCH}.txt")["torch"] == version
    assert pins(ROOT / "locks" / f"{BY_HAND}.txt")["torch"] == f"{version}+cpu"


@pytest.mark.parametrize(("lock", "extras"), [("run", ["run", "dev"]), ("docs", ["docs"]), ("wheel", [])])
def test_what_the_project_asks_for_is_locked(lock: str, extras: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *(each for extra in extras for each in project["optional-dependencies"][extra])]
    names = {canonical(re.match(r"[\w.-]+", each)[0]) for each in asked}  # type: ignore[index]
    locked = pins(ROOT / "locks" / f"{lock}.txt").keys() | ({"torch", "triton"} if lock == "run" else set())
    assert names <= locked


def test_nothing_that_ci_runs_installs_without_hashes() -> None:
    """The other lanes install packages of others to compare with, in their own environments."""
    for name in ("Makefile", "scripts/install.sh", "scripts/test_wheel.sh", "scripts/test_browser.sh"):
        text = (ROOT / name).read_text()
        installs = re.findall(r"^.*(?:pip install|\bpip |cpu_torch ).*$", text, re.MULTILINE)
        unchecked = [
            each.strip()
            for each in installs
            if not re.search(r"--require-hashes|--no-deps|pip\(\) \{|cpu_torch( \|\||  *--retries)|^\s*#|help|error", each)
        ]
        assert unchecked == [], name
