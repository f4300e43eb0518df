"""Known hazards of Triton and ptxas, by version."""

import re
from pathlib import Path

import pytest

import megakernels
from megakernels._common.hazards import HAZARDS, hazards_of

REGISTERS, LOOPS = "register operand of a product in flight", "loop values that start as one value"


@pytest.mark.parametrize(
    ("version", "names"),
    [("3.4.0", {REGISTERS}), ("3.6.0", {REGISTERS, LOOPS}), ("3.7.0", {LOOPS}), ("3.9.0+git1a2b", {LOOPS}), ("3.10.0", {LOOPS})],
)
def test_versions_of_triton(version: str, names: set[str]) -> None:
    assert {each.name for each in hazards_of("triton", version)} == names


def test_versions_of_ptxas() -> None:
    assert len(hazards_of("ptxas", "12.9.86")) == 2
    assert len(hazards_of("ptxas", "13.1.80")) == 1
    assert hazards_of("ptxas", "13.3.33") == ()


def test_each_names_kernels_that_exist() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in Path(megakernels.__path__[0]).rglob("kernel*.py"))
    kernels = set(re.findall(r"^def (\w+_kernel)\(", source, re.MULTILINE))
    assert {name for each in HAZARDS for name in each.kernels} <= kernels
    assert len({each.name for each in HAZARDS}) == len(HAZARDS)
