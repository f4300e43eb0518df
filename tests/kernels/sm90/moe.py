"""Shipped configurations of the experts' kernels: many rows an expert and few, gated and not."""

from typing import Any

from megakernels.ops.moe import kernel, kernel_plan, sizes

LAUNCH = ("num_warps", "num_stages")
NUM_EXPERTS, HIDDEN, WIDTH, TOP_K = 128, 2048, 768, 8


def configurations() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for dtype, size in (("bf16", 2), ("fp32", 4)):
        own = ("x", "gate", "up", "down", "a", "b", "other_a", "other_b", "out", "y", "grad_y", "hidden")
        types = dict.fromkeys((*own, "gate_out", "up_out", "grad_gate_out", "grad_up_out"), f"*{dtype}")
        types |= dict.fromkeys(("rows", "ends", "tile_ends", "positions"), "*i32") | {"weights": "*fp32", "grad_weights": "*fp32"}
        widths = ("x_stride", "grad_stride", "a_stride", "b_stride", "inner", "num_cols", "num_across", "width", "num_pairs")
        types |= dict.fromkeys((*widths, "b_inner_stride", "b_col_stride"), "i32:16")
        for tokens in (32768, 256):
            tile = kernel_plan.tile_rows(tokens * TOP_K, NUM_EXPERTS, size)
            rows = {"TILE": tile, "EXPERTS": NUM_EXPERTS}
            where = f"{dtype}, tiles of {tile} rows"
            for kind, activation in ((0, "swiglu"), (1, "relu2"), (2, "gelu")):
                options, launch = split(sizes.product_options(WIDTH, size, kernel.UP_COLS[activation]))
                found[f"up {activation} {where}"] = (kernel.up_kernel, types, {"KIND": kind, **rows, **options}, launch)
                options, launch = split(sizes.product_options(WIDTH, size, largest=sizes.PULL_COLS))
                found[f"pull {activation} {where}"] = (kernel.pull_kernel, types, {"KIND": kind, **rows, **options}, launch)
            options, launch = split(sizes.product_options(HIDDEN, size))
            for name, pair, dense in (
                ("down", False, "b_inner_stride"),
                ("up back", True, "b_col_stride"),
                ("up back alone", False, "b_col_stride"),
            ):
                found[f"{name} {where}"] = (kernel.down_kernel, types, {"PAIR": pair, dense: 1, **rows, **options}, launch)
        for gathers in (False, True):
            options, launch = split(sizes.product_options(WIDTH if gathers else HIDDEN, size))
            constants = {"GATHERS_A": gathers, "TILE": kernel.outer_rows(HIDDEN, size), **options}
            found[f"matrix gradient {'down' if gathers else 'up'} {dtype}"] = (kernel.outer_kernel, types, constants, launch)
        for indirect in (False, True):
            options, launch = split(kernel_plan.sum_options(HIDDEN))
            name = f"sum of slots {'by position ' if indirect else ''}{dtype}"
            found[name] = (kernel_plan.sum_slots_kernel, types, {"INDIRECT": indirect, **options}, launch)
    indices = {"indices": "*i32", "counts": "*i32", "starts": "*i32", "rows": "*i32"}
    counting = {"PAIRS": kernel_plan.PAIRS, "EXPERTS": kernel_plan.EXPERTS_AT_ONCE}
    found["count"] = (kernel_plan.count_kernel, indices, counting, {"num_warps": 4})
    found["place"] = (kernel_plan.place_kernel, indices, {"PAIRS": kernel_plan.PAIRS}, {"num_warps": 8})
    return found


def split(options: dict[str, int]) -> tuple[dict[str, int], dict[str, int]]:
    """Constants, and what the launch takes."""
    return {name: value for name, value in options.items() if name not in LAUNCH}, {
        name: options[name] for name in LAUNCH if name in options
    }


CONFIGURATIONS = configurations()
