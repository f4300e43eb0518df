"""Compiles the kernels for Hopper without a GPU and prints each one's resources as JSON; --write commits them to NAME.csv in this folder.

    PYTHONPATH=src:kernels python tests/kernels/sm90/compile.py [--write] rms_norm attention:8 ...

`attention:8` compiles every eighth of its configurations, which its file NAME.py lists. A separate process: nothing compiles where triton
was imported to interpret.
"""

import csv
import importlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from overwritten import overwritten
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megakernels._common.tuning import measured_options, tuned

HERE = Path(__file__).parent
COLUMNS = ("triton", "kernel", "registers", "stack_bytes", "shared_bytes", "wgmma")
SM_90 = GPUTarget("cuda", 90, 32)
SM_90_CAPABILITY = (9, 0)
INTEGER_MAXIMUM = re.compile(r"(atom|red)(\.\w+)*\.max\.s32\b")
"""An atomic whose result does not depend on the order of programs."""
ALIGNMENT = 16
"""The launcher specialises on pointers, which torch's allocator aligns so, and on sizes that are multiples of it: type `i32:16`."""


def with_measured(configurations: dict[str, Any]) -> dict[str, Any]:
    """The configurations, and those with other options that were measured on an H200."""
    found = dict(configurations)
    for name, (function, types, constants, options) in configurations.items():
        measured = measured_options(tuned("h200", SM_90_CAPABILITY), function.__name__, frozenset(constants.items()))
        if {**options, **measured} != options:
            found[f"{name}, measured"] = function, types, constants, {**options, **measured}
    return found


def source_of(function: Any, types: dict[str, str], constants: dict[str, Any]) -> ASTSource:
    """Source of a kernel with these types, as the launcher specialises it. An argument without a type is `i32`."""
    names = function.arg_names
    kinds = {name: types.get(name, "i32") for name in names if name not in constants}
    signature = {name: kinds.get(name, "constexpr").removesuffix(":16") for name in names}
    aligned = {
        (names.index(name),): [["tt.divisibility", ALIGNMENT]]
        for name, kind in kinds.items()
        if kind.startswith("*") or kind.endswith(":16")
    }
    return ASTSource(function, signature, {(names.index(name),): value for name, value in constants.items()}, aligned)


def compiled_for_sm90(function: Any, types: dict[str, str], constants: dict[str, Any], options: dict[str, int]) -> Any:
    """The kernel, compiled as by the launcher."""
    return triton.compile(source_of(function, types, constants), target=SM_90, options=options)


def disassembled(compiled: Any, tool: str, flag: str) -> str:
    """Output of one of the tools that Triton ships about a compiled kernel."""
    path = next(Path(triton.__file__).parent.glob(f"backends/nvidia/bin/{tool}"))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        return subprocess.run([path, flag, file.name], capture_output=True, text=True, check=True).stdout


def overwritten_by(compiled: Any) -> list[str]:
    """Instructions that write registers which a product in flight reads; of a kernel that has such products."""
    reads = re.search(r"wgmma\.mma_async[^;]*\}\s*,\s*\{", compiled.asm["ptx"])
    return overwritten(disassembled(compiled, "cuobjdump", "-sass")) if reads else []


def resources(function: Any, types: dict[str, str], constants: dict[str, Any], options: dict[str, int]) -> dict[str, Any]:
    """Registers a thread, stack (spill) bytes, shared-memory bytes per block, and whether matrix products are the warp group's."""
    compiled = compiled_for_sm90(function, types, constants, options)
    text = disassembled(compiled, "cuobjdump", "-res-usage")
    found = dict(re.findall(r"(REG|STACK):(\d+)", text))
    if [line for line in re.findall(r"\b(?:atom|red)\..*", compiled.asm["ptx"]) if not INTEGER_MAXIMUM.match(line)]:
        raise SystemExit(f"{function.__name__} has atomics: its result would depend on the order of programs")
    for each in overwritten_by(compiled):
        raise SystemExit(f"{function.__name__} {constants}: {each}")
    wgmma = "yes" if "wgmma.mma" in compiled.asm["ptx"] else "no"
    return {
        "registers": int(found["REG"]),
        "stack_bytes": int(found["STACK"]),
        "shared_bytes": compiled.metadata.shared,
        "wgmma": wgmma,
    }


def rows_of(name: str, every: int) -> list[dict[str, Any]]:
    """The table of one operation, or every `every`-th row of it."""
    configurations = list(importlib.import_module(name).CONFIGURATIONS.items())
    return [{"triton": triton.__version__, "kernel": key, **resources(*each)} for key, each in configurations[::every]]


def main() -> None:
    sys.path.insert(0, str(HERE))
    asked = [argument.partition(":") for argument in sys.argv[1:] if argument != "--write"]
    found = {name: rows_of(name, int(every or 1)) for name, _, every in asked}
    if "--write" in sys.argv:
        if any(every for _, _, every in asked):
            raise SystemExit("--write compiles every configuration: leave out the number after the name")
        for name, rows in found.items():
            write(HERE / f"{name}.csv", rows)
    print(json.dumps(found))  # noqa: T201  read by the test


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Replaces this triton's rows and leaves those of others."""
    others = [row for row in csv.DictReader(path.open(encoding="utf-8")) if row["triton"] != triton.__version__] if path.exists() else []
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows([*others, *rows])


if __name__ == "__main__":
    main()
