"""Counts the instructions of the kernels of operations on sm_90 without a GPU, and the time that issuing them takes at least.

    PYTHONPATH=src:kernels python tests/kernels/sm90/issue.py ssd causal_conv1d ...

An operation's file NAME.py has `LAUNCHES`: by name of a configuration, the programs of its launches at `SHAPE` and the turns of each loop
of its machine code, outermost first. A program's instructions are those outside of loops, whichever way its branches go, and those of
each loop times its turns; an SM issues at most one instruction of a warp on each of four schedulers in a clock. They are divided by
`ELEMENTS`, if it is given.
"""

import importlib
import re
import sys
from pathlib import Path
from typing import Any

from compile import compiled_for_sm90, disassembled

MULTIPROCESSORS, SCHEDULERS, HERTZ = 132, 4, 1.83e9
"""Values of an H100 or H200 SXM, at its boost clock."""
WARP = 32


def instructions(assembly: str, turns: tuple[int, ...]) -> int:
    """Instructions that one warp issues, from a disassembly and the turns of its loops in the order of their first instructions.

    Raises:
        ValueError: It has more or fewer loops.
    """
    labels: dict[str, int] = {}
    lines: list[str] = []
    for line in assembly.splitlines():
        if found := re.match(r"\s*\.(L_x_\d+):", line):
            labels[found[1]] = len(lines)
        elif found := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            lines.append(found[1])
    branches = [(labels[found[1]], index) for index, line in enumerate(lines) if (found := re.search(r"BRA.*`\(\.(L_x_\d+)\)", line))]
    loops = sorted(branch for branch in branches if branch[0] < branch[1])  # a branch to itself is the padding after the end
    if len(loops) != len(turns):
        raise ValueError(f"{len(loops)} loops, and the turns of {len(turns)}: {loops}")
    total = 0
    for index, line in enumerate(lines):
        times = 1
        for (first, last), count in zip(loops, turns, strict=True):
            times *= count if first <= index <= last else 1
        total += 0 if line.startswith("NOP") else times
    return total


def rows_of(name: str) -> list[dict[str, Any]]:
    """Instructions of a warp, warps, and the time at least, of each launch of an operation."""
    module = importlib.import_module(name)
    found = []
    for key, (programs, turns) in module.LAUNCHES.items():
        function, types, constants, options = module.CONFIGURATIONS[key]
        of_warp = instructions(disassembled(compiled_for_sm90(function, types, constants, options), "nvdisasm", "-c"), turns)
        warps = programs * options["num_warps"]
        microseconds = of_warp * warps / (MULTIPROCESSORS * SCHEDULERS * HERTZ) * 1e6
        per_element = of_warp * warps * WARP / module.ELEMENTS if hasattr(module, "ELEMENTS") else None
        found.append({"kernel": key, "instructions": of_warp, "warps": warps, "us": microseconds, "per_element": per_element})
    return found


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    for name in sys.argv[1:]:
        rows = rows_of(name)
        print(f"{name}: {importlib.import_module(name).SHAPE}")  # noqa: T201
        for row in rows:
            rest = "" if row["per_element"] is None else f"{row['per_element']:8.1f} an element"
            print(f"{row['kernel']:44}{row['instructions']:8}{row['warps']:10}{row['us']:8.1f} us{rest}")  # noqa: T201
        print(f"{'together':62}{sum(row['us'] for row in rows):8.1f} us")  # noqa: T201


if __name__ == "__main__":
    main()
