"""Shipped configurations of the experts' kernels: many rows per expert and few, gated and not; and of the router's."""

from typing import Any

from megakernels.ops.activation.kernel import KINDS
from megakernels.ops.moe import facts, kernel, kernel_losses, kernel_plan, kernel_products, kernel_route
from megakernels.ops.moe.facts import EXPERTS_AT_ONCE, INVERT_PAIRS, SORT_PAIRS

LAUNCH = ("num_warps", "num_stages")
NUM_EXPERTS, HIDDEN, WIDTH, TOP_K = 128, 2048, 768, 8
GATED = ("swiglu", "geglu")
KINDS_OF = (
    *((name, KINDS[name], False) for name in ("swiglu", "relu2", "gelu", "geglu")),
    *((name, KINDS[name], True) for name in ("swiglu", "relu2", "geglu")),
    ("swiglu", kernel_products.CLAMPED, True),
)
"""Activation, its compiled kind, and whether there are biases."""


def configurations() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for dtype, size in (("bf16", 2), ("fp32", 4)):
        own = ("x", "gate", "up", "down", "a", "b", "other_a", "other_b", "out", "y", "grad", "grad_y", "hidden")
        biases = ("bias", "gate_bias", "up_bias")
        types = dict.fromkeys((*own, *biases, "gate_out", "up_out", "grad_gate_out", "grad_up_out"), f"*{dtype}") | {"limit": "fp32"}
        types |= dict.fromkeys(("rows", "ends", "tile_ends", "positions"), "*i32") | {"weights": "*fp32", "grad_weights": "*fp32"}
        widths = ("x_stride", "grad_stride", "a_stride", "b_stride", "inner", "num_cols", "num_across", "width", "num_pairs")
        types |= dict.fromkeys(widths, "i32:16")
        for tokens, blocks in ((32768, False), (256, False), *([(32768, True)] if dtype == "bf16" else ())):
            tile = kernel_plan.tile_rows(tokens * TOP_K, NUM_EXPERTS, size)
            rows = {"TILE": tile, "EXPERTS": NUM_EXPERTS, "BLOCKS": blocks}
            where = f"{dtype}, tiles of {tile} rows{' by blocks' if blocks else ''}"
            for activation, kind, biased in KINDS_OF:
                flags = {"KIND": kind, "GATED": activation in GATED, **rows}
                name = f"{activation}{' clamped' if kind == kernel_products.CLAMPED else ''}{', biases,' if biased else ''} {where}"
                options, launch = split(facts.up_options(activation, WIDTH, size, blocks=blocks))
                added = {"HAS_UP_BIAS": biased, "HAS_GATE_BIAS": biased and activation in GATED}
                kinds = types | (described(("gate", "up"), options["COLS"], options["STEP"]) if blocks else {})
                found[f"up {name}"] = (kernel.up_kernel, kinds, {**flags, **added, **options}, launch)
                options, launch = split(facts.pull_options(WIDTH, size, blocks=blocks))
                kinds = types | (described(("down",), options["STEP"], options["COLS"]) if blocks else {})
                if not biased or (kind == kernel_products.CLAMPED and not blocks):
                    found[f"pull {name}"] = (kernel.pull_kernel, kinds, {**flags, **options}, launch)
            for name, pair, biased, turned in (
                ("down", False, False, True),
                ("down, bias,", False, True, True),
                ("up back", True, False, False),
                ("up back alone", False, False, False),
            ):
                options, launch = split(facts.down_options(HIDDEN, size, blocks=blocks, pair=pair))
                constants = {"PAIR": pair, "HAS_BIAS": biased, "TURNED": turned, **rows, **options}
                step, cols = options["STEP"], options["COLS"]
                matrices = described(("b", "other_b"), *((cols, step) if turned else (step, cols)))
                kinds = types | ({**described(("a", "other_a"), tile, step), **matrices} if blocks else {})
                found[f"{name} {where}"] = (kernel.down_kernel, kinds, constants, launch)
        options, launch = split(facts.bias_options())
        needs = {"NEEDS_BIAS": True, "NEEDS_WEIGHTS": True}
        found[f"bias gradient up {dtype}"] = (kernel.bias_kernel, types, options, launch)
        found[f"bias gradient down {dtype}"] = (kernel.down_bias_kernel, types, {**needs, **options}, launch)
        for name, across, cols in (("up", WIDTH, HIDDEN), ("down", HIDDEN, WIDTH)):
            for blocks in (False, *([True] if dtype == "bf16" else ())):
                options, launch = split(facts.outer_options(across, cols, size, blocks=blocks))
                kinds = types | {"a_blocks": types["a"], "b_blocks": types["b"]}
                if blocks:
                    sides = (("a_blocks", options["TILE"]), ("b_blocks", options["COLS"]))
                    kinds |= {key: kind for side, size_of in sides for key, kind in described((side,), options["STEP"], size_of).items()}
                key = f"matrix gradient {name} {dtype}{' by blocks' if blocks else ''}"
                found[key] = (kernel.outer_kernel, kinds, {"BLOCKS": blocks, **options}, launch)
        for indirect in (False, True):
            options, launch = split(kernel_plan.sum_options(HIDDEN))
            name = f"sum of slots {'by position ' if indirect else ''}{dtype}"
            found[name] = (kernel_plan.sum_slots_kernel, types, {"INDIRECT": indirect, **options}, launch)
        options, launch = split(kernel_plan.sum_options(HIDDEN))
        found[f"copies of tokens {dtype}"] = (kernel_plan.spread_kernel, types, options, launch)
    indices = {"indices": "*i32", "counts": "*i32", "starts": "*i32", "rows": "*i32"}
    counting = {"PAIRS": SORT_PAIRS, "EXPERTS": EXPERTS_AT_ONCE}
    found["count"] = (kernel_plan.count_kernel, indices, counting, {"num_warps": 4})
    found["place"] = (kernel_plan.place_kernel, indices, {"PAIRS": SORT_PAIRS}, {"num_warps": 8})
    found["inverse"] = (kernel_plan.invert_kernel, indices | {"positions": "*i32"}, {"PAIRS": INVERT_PAIRS}, {"num_warps": 4})
    return found | routers() | losses()


ROUTERS = (
    ("128 experts", 128, 8, False, 1, False),
    ("256 experts in 8 groups, sigmoid, corrected, losses", 256, 8, True, 8, True),
    ("160 experts in 8 groups, losses", 160, 6, False, 8, True),
    ("512 experts", 512, 10, False, 1, False),
    ("384 experts, sigmoid, corrected", 384, 8, True, 1, False),
)
"""Name, experts, slots, whether scores are sigmoids with a correction, groups, whether there are losses: those of published models."""


def routers() -> dict[str, Any]:
    found: dict[str, Any] = {}
    pointers = ("logits", "bias", "correction", "weights", "probs", "log_sums", "grad_weights", "grad_probs", "grad_log_sums", "kept")
    types = dict.fromkeys(pointers, "*fp32") | {"indices": "*i32", "counts": "*i32", "scale": "fp32"}
    types |= dict.fromkeys(("num_positions", "num_rows", "num_experts"), "i32:16")
    for name, experts, top_k, sigmoid, groups, scored in ROUTERS:
        flags = {"SIGMOID": sigmoid, "NORMALIZE": True, "SCORED": scored}
        options, launch = split(kernel_route.route_options(experts, groups, top_k))
        given = {"HAS_BIAS": False, "HAS_CORRECTION": sigmoid, **({"num_groups": 1, "top_groups": 1} if groups == 1 else {})}
        found[f"route {name}"] = (kernel_route.route_kernel, types, {**flags, **given, **options}, launch)
        options, launch = split(kernel_route.gradient_options(experts))
        for dtype, parts in (("bf16", 2), ("fp32", 1)):
            constants = {**flags, "PARTS": parts, **options}
            kinds = types | {"gradient": f"*{dtype}"}
            found[f"route backward {name} {dtype}"] = (kernel_route.route_gradient_kernel, kinds, constants, launch)
    return found


def losses() -> dict[str, Any]:
    pointers = ("weights", "probs", "log_sums", "weighted", "shares", "grad_weighted", "grad_weights", "grad_probs", "grad_log_sums")
    types = dict.fromkeys(pointers, "*fp32") | {"load": "*i32", "balance": "fp32", "z": "fp32"}
    types |= dict.fromkeys(("num_positions", "num_experts"), "i32:16")
    options, launch = split(kernel_losses.losses_options(128, 8))
    needs = dict.fromkeys(("NEEDS_WEIGHTS", "NEEDS_PROBS", "NEEDS_SUMS"), True)
    return {
        "router losses": (kernel_losses.losses_kernel, types, options, launch),
        "router losses backward": (kernel_losses.losses_gradient_kernel, types, {**options, **needs}, launch),
    }


def described(names: tuple[str, ...], rows: int, columns: int) -> dict[str, str]:
    """Types of descriptors of bf16 tiles."""
    return dict.fromkeys(names, f"tensordesc<bf16[{rows},{columns}]>")


def split(options: dict[str, int]) -> tuple[dict[str, int], dict[str, int]]:
    """Constants, and what the launch takes."""
    return {name: value for name, value in options.items() if name not in LAUNCH}, {
        name: options[name] for name in LAUNCH if name in options
    }


CONFIGURATIONS = configurations()

SHAPE = "32,768 tokens of 2,048, 8 of 128 experts of 768 columns, bf16; the matrices' gradients, whose products take 834 us each"
TOKENS = 32768


def launches() -> dict[str, Any]:
    """Programs, and the steps over an expert's rows, of the gradient of each kind of matrix."""
    found: dict[str, tuple[int, tuple[int, ...]]] = {}
    for name, across, cols in (("up", WIDTH, HIDDEN), ("down", HIDDEN, WIDTH)):
        options = facts.outer_options(across, cols, 2, blocks=True)
        programs = NUM_EXPERTS * -(-across // options["TILE"]) * -(-cols // options["COLS"])
        found[f"matrix gradient {name} bf16 by blocks"] = (programs, (-(-TOKENS * TOP_K // NUM_EXPERTS // options["STEP"]),))
    return found


LAUNCHES = launches()
