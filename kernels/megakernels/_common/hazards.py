"""Known hazards of Triton and of its assembler that concern these kernels, and the countermeasures. No torch, no triton."""

from dataclasses import dataclass

__all__ = ["HAZARDS", "Hazard", "hazards_of"]


@dataclass(frozen=True)
class Hazard:
    """A defect of a tool: its effect on a kernel, and why these kernels are not affected."""

    name: str
    tool: str
    """`triton`, or `ptxas`: the assembler that Triton starts, of its wheel or of TRITON_PTXAS_PATH."""
    first: str
    """The first version that is known to have it."""
    mended: str | None
    """The first version without it; None where none is known."""
    symptom: str
    kernels: tuple[str, ...]
    """Kernels of this package that had the symptom or contain its trigger."""
    measure: str
    """The countermeasure taken here, and what a user can do."""
    source: str

    def affects(self, version: str) -> bool:
        """True if a version such as `3.6.0`, or `12.9.86` of ptxas, has the defect."""
        return _numbers(self.first) <= _numbers(version) and (self.mended is None or _numbers(version) < _numbers(self.mended))


HAZARDS = (
    Hazard(
        name="loop values that start as one value",
        tool="triton",
        first="3.5.0",
        mended=None,
        symptom="a loop keeps the first value of a variable that it only renames (`b = a`), if both start as one value: wrong results "
        "without an error",
        kernels=("gated_conv_backward_kernel",),
        measure="each such variable starts as a separate value; a test compares the variables that loops change with those that they carry",
        source="triton/compiler/code_generator.py, _find_carries; 3.4.0 is right, 3.9.0 is the newest version looked at",
    ),
    Hazard(
        name="register operand of a product in flight",
        tool="triton",
        first="3.0.0",
        mended="3.7.0",
        symptom="registers of the left operand of a pipelined warp-group product are written again before the product is waited for",
        kernels=("ssd_edge_kernel",),
        measure="such products are not pipelined (num_stages=1); a test reads the machine code of the kernels that have such operands",
        source="triton 9433, mended by 9514",
    ),
    Hazard(
        name="wrong machine code for warp-group products",
        tool="ptxas",
        first="12.8",
        mended="13.1.80",
        symptom="from the same PTX 12.8 and 13.0 made wrong results or illegal writes, and 13.1 did not",
        kernels=(),
        measure="no kernel here is known to be hit; TRITON_PTXAS_PATH names another assembler",
        source="flash-linear-attention 1262",
    ),
    Hazard(
        name="packed 16-bit sums",
        tool="ptxas",
        first="12.9",
        mended="13.3.33",
        symptom="the second of two packed sums with one constant loses it",
        kernels=(),
        measure="no kernel here has packed 16-bit sums; TRITON_PTXAS_PATH names another assembler",
        source="triton 11581",
    ),
)


def hazards_of(tool: str, version: str) -> tuple[Hazard, ...]:
    """The hazards that a version of `triton` or `ptxas` has."""
    return tuple(each for each in HAZARDS if each.tool == tool and each.affects(version))


def _numbers(version: str) -> tuple[int, ...]:
    """`3.6.0+git1` as (3, 6, 0)."""
    found = []
    for part in version.partition("+")[0].split("."):
        digits = "".join(each for each in part if each.isdigit())
        if not digits:
            break
        found.append(int(digits))
    return tuple(found)
