"""Sizes of tiles and segments are facts: each has one name, which is assigned once, in a `facts.py` or in `_common`."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "kernels" / "megakernels"
PLANNED = [ROOT / "src" / "megaplan" / folder for folder in ("blocks", "families", "budget", "cost", "hosts/megarun")]
"""The planner's folders that price these kernels."""
OTHERS = ROOT / "src" / "megaplan" / "cost" / "step"
"""The model of other frameworks' kernels, whose tiles are theirs."""
WORDS = {
    *("TILE", "TILES", "SEGMENT", "CHUNK", "BLOCK", "SPAN", "SLICE", "PART", "STEP", "DEPTH", "SIDE", "WIDTH", "WIDTHS", "SAMPLES"),
    *("POSITIONS", "CHANNELS", "COLUMNS", "COLS", "ROWS", "PAIRS", "QUERIES", "HEADS", "SCRATCH", "ELEMENTS"),
}
"""A constant whose name has one of these is the size of a tile, of a segment, or of a part of either."""
FOREIGN = {"PRODUCT_ROWS", "PRODUCT_COLUMNS", "CHUNK_ELEMENTS", "STEP_BYTES"}
"""Sizes in the planner that are not a kernel's of this project: tiles of cuBLAS, chunks of torch's foreach operations, counts of steps."""


def constants(path: Path) -> Iterator[tuple[str, ast.expr]]:
    """Names that a module assigns in capitals, each with its value."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            pairs = [(node.target, node.value)]
        elif isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
            several = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
            pairs = list(zip(target.elts, value.elts, strict=True)) if several else [(target, value)]  # type: ignore[attr-defined]
        else:
            continue
        yield from ((target.id, value) for target, value in pairs if isinstance(target, ast.Name) and target.id.isupper())


def sizes_in(path: Path) -> dict[str, ast.expr]:
    return {name: value for name, value in constants(path) if WORDS & set(name.split("_"))}


def has_number(value: ast.expr) -> bool:
    """True if a number is written there, and not derived from another name."""
    names = {node.id for node in ast.walk(value) if isinstance(node, ast.Name)} - {"tl"}
    numbers = [node for node in ast.walk(value) if isinstance(node, ast.Constant) and isinstance(node.value, int | float)]
    return bool(numbers) and not names


def is_fact(path: Path) -> bool:
    return path.name == "facts.py" or path.parent.name == "_common"


def test_sizes_are_numbers_in_facts_alone() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted(KERNELS.rglob("*.py"))
        if not is_fact(path)
        for name, value in sizes_in(path).items()
        if has_number(value)
    ]
    assert found == []


def test_no_two_modules_assign_one_size() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted(KERNELS.rglob("*.py")):
        for name in sizes_in(path):
            places[name].append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_the_planner_defines_no_size_of_a_kernel() -> None:
    known = {name for path in KERNELS.rglob("*.py") for name in sizes_in(path)}
    files = [path for folder in PLANNED for path in sorted(folder.rglob("*.py")) if OTHERS not in path.parents]
    found = [f"{path.relative_to(ROOT)}: {name}" for path in files for name, value in sizes_in(path).items() if has_number(value)]
    assert [each for each in found if each.split(": ")[1] not in FOREIGN] == []
    assert known & {name for path in files for name, _ in constants(path)} == set()
    assert known & FOREIGN == set()


def test_the_check_finds_what_it_looks_for(tmp_path: Path) -> None:
    path = tmp_path / "kernel.py"
    path.write_text(
        "ROWS, COLS = 32, LARGEST + 1\nSIDE = tl.constexpr(16)\nSCALE = 2\nTILE: dict[int, int] = {2: 64}\nSPAN = tl.constexpr(ROWS)\n"
    )
    assert [name for name, value in sizes_in(path).items() if has_number(value)] == ["ROWS", "SIDE", "TILE"]
