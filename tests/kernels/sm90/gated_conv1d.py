"""Shipped configurations of the kernels of gated convolutions: narrow and wide rows of three taps, and four with all they can take."""

from typing import Any

from megakernels._common.walks import UNROLLED
from megakernels.ops.gated_conv1d import kernel
from megakernels.ops.gated_conv1d.facts import GATED_FORWARD_POSITIONS, POSITIONS_PER_SHARE

TENSORS = ("input_gate", "output_gate", "value", "before", "weight", "bias", "y", "grad_y")
GRADIENTS = ("grad_input", "grad_output", "grad_value", "grad_before")
SIZES = (
    *(f"{each}_{step}" for each in ("grad", "input", "output", "value") for step in ("row", "stride")),
    "num_positions",
    "num_channels",
)


def configurations() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for channels, taps, whole in ((96, 3, False), (2048, 3, False), (2048, 4, True)):
        for dtype in ("bf16", "fp32"):
            types = dict.fromkeys((*TENSORS, *GRADIENTS), f"*{dtype}") | {"starts": "*i32", "partial": "*fp32"}
            types |= dict.fromkeys(SIZES, "i32:16")
            flags = {"TAPS": taps, "HAS_BIAS": whole, "PACKED": whole, "HAS_BEFORE": whole}
            forward, backward = kernel.forward_options(channels), kernel.backward_options(channels)
            launches = [{"num_warps": options.pop("num_warps")} for options in (forward, backward)]
            name = f"{channels} {dtype}{' four taps, bias, packed, pieces' if whole else ''}"
            found[f"gated conv forward {name}"] = (kernel.gated_conv_forward_kernel, types, {**forward, **flags}, launches[0])
            needs = dict.fromkeys(("NEEDS_INPUT", "NEEDS_OUTPUT", "NEEDS_VALUE", "NEEDS_WEIGHT"), True)
            found[f"gated conv backward {name}"] = (kernel.gated_conv_backward_kernel, types, {**backward, **flags, **needs}, launches[1])
    return found


CONFIGURATIONS = configurations()

SHAPE = "16,384 positions of 2,048 channels, bf16, three taps"
ROWS, WIDTH = 16384, 2048
ELEMENTS = ROWS * WIDTH


def launches() -> dict[str, Any]:
    """Programs and turns of loops at `SHAPE`: the positions that a walk takes together, and none that are left."""
    found: dict[str, tuple[int, tuple[int, ...]]] = {}
    for name, positions, options in (
        ("forward", GATED_FORWARD_POSITIONS, kernel.forward_options(WIDTH)),
        ("backward", POSITIONS_PER_SHARE, kernel.backward_options(WIDTH)),
    ):
        programs = ROWS // positions * (WIDTH // options["CHANNELS"])
        found[f"gated conv {name} {WIDTH} bf16"] = (programs, (positions // UNROLLED.value, 0))
    return found


LAUNCHES = launches()
