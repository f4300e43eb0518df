"""Compiles the norm kernels for Hopper without a GPU and prints each one's resources as JSON.

A process of its own: nothing compiles where triton was imported to interpret.
"""

import json
import re
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megakernels.rms_norm import kernel

POINTERS = ("x", "weight", "y", "grad_y", "grad_x")
WIDTHS = (200, 3584, kernel.LARGEST_WIDTH)


def resources(function: object, constants: dict[str, int], dtype: str, num_warps: int) -> dict[str, int]:
    """Registers a thread, stack (spill) bytes and shared-memory bytes a block."""
    types = dict.fromkeys(POINTERS, f"*{dtype}") | {"rstd": "*fp32", "partial": "*fp32", "eps": "fp32"}
    names = function.arg_names  # type: ignore[attr-defined]
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    source = ASTSource(fn=function, signature=signature, constexprs={(names.index(name),): value for name, value in constants.items()})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})
    tool = next(Path(triton.__file__).parent.glob("backends/nvidia/bin/cuobjdump"))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = dict(re.findall(r"(REG|STACK):(\d+)", text))
    return {"registers": int(found["REG"]), "stack_bytes": int(found["STACK"]), "shared_bytes": compiled.metadata.shared}


def main() -> None:
    report = {}
    for width in WIDTHS:
        block, num_warps = kernel.launch_options(width)
        for dtype in ("bf16", "fp32"):
            report[f"forward {width} {dtype}"] = resources(kernel.rms_norm_forward_kernel, {"BLOCK": block}, dtype, num_warps)
            for needs_x in (True, False):
                constants = {"BLOCK": block, "NEEDS_X": needs_x}
                report[f"backward {width} {dtype} {needs_x}"] = resources(kernel.rms_norm_backward_kernel, constants, dtype, num_warps)
    print(json.dumps(report))  # noqa: T201  read by the test


if __name__ == "__main__":
    main()
