"""Shipped configurations of the scan's kernels: the head and state widths of published models, and the widest of each dtype."""

from typing import Any

import torch
from compile import with_measured

from megakernels.facts import LARGEST_TILE
from megakernels.ops.ssd.facts import HEADS_PER_PART, LARGEST_BLOCK, PASS_COLUMNS, SSD_HEADS_PER_TABLE, tile_sides
from megakernels.ops.ssd.kernel_groups import ssd_edge_kernel, ssd_group_kernel
from megakernels.ops.ssd.kernel_outputs import ssd_output_kernel
from megakernels.ops.ssd.kernel_pairs import ssd_pair_kernel, ssd_value_kernel
from megakernels.ops.ssd.kernel_states import ssd_chunk_kernel, ssd_pass_kernel, ssd_state_kernel, ssd_table_kernel
from megakernels.ops.ssd.kernel_steps import ssd_step_kernel
from megakernels.ops.ssd.launch import OPTIONS

INPUTS = ("x", "dt", "A_log", "B", "C", "D", "dt_bias", "grad_y", "y", "states", "grad_x", "grad_dt", "rows", "keys", "gradient")
MADE = ("boundary", "tile_states", "tile_gradients")
ACCUMULATED = (
    *("outer", "last", "through", "tables", "passed", "pairs", "edges", "reads", "of_steps", "of_decays", "across", "skips", "shares"),
)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
ALIGNED = ("num_positions", "num_rows", "size")
HEADS, CHUNK = 64, 256


def taken(function: Any, constants: dict[str, Any]) -> dict[str, Any]:
    """Constants that a kernel takes."""
    return {name: value for name, value in constants.items() if name in function.arg_names}


def options_of(key: str) -> dict[str, int]:
    """Options of a kernel, or of one of its two forms."""
    form = key.replace(",", "")
    return OPTIONS[form if form in OPTIONS else key.partition(",")[0]]


def configurations() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for head_width, state_width, dtype, whole in (
        (64, 128, "bf16", False),
        (64, 128, "bf16", True),
        (128, 128, "bf16", False),
        (32, 32, "bf16", False),
        (32, 32, "fp32", True),
    ):
        types = dict.fromkeys((*INPUTS, *MADE), f"*{dtype}") | dict.fromkeys(ACCUMULATED, "*fp32")
        types |= {"starts": "*i32", "dt_min": "fp32", "dt_max": "fp32"}
        row = HEADS * head_width + 2 * state_width  # x, B and C are parts of the convolution's output
        types |= dict.fromkeys((*(f"{name}_stride_b" for name in ("x", "B", "C", "grad", "rows", "keys")), *ALIGNED), "i32:16")
        sizes = {"num_heads": HEADS, "heads_per_group": HEADS, "head_width": head_width, "state_width": state_width}
        sizes |= {
            "chunk_size": CHUNK,
            "tiles_per_chunk": CHUNK // LARGEST_TILE[DTYPES[dtype].itemsize],
            "num_blocks": -(-head_width // LARGEST_BLOCK),
        }
        sizes |= {f"{name}_stride_{axis}": row if axis == "t" else head_width for name in ("x", "rows") for axis in "th"}
        sizes |= {f"{name}_stride_{axis}": row if axis == "t" else state_width for name in ("B", "C", "keys") for axis in "tg"}
        sizes |= {"grad_stride_t": HEADS * head_width, "grad_stride_h": head_width, "dt_stride_t": HEADS, "dt_stride_h": 1}
        sizes |= {"parts": -(-HEADS // HEADS_PER_PART)}
        sides, precise = tile_sides(256, head_width, state_width, DTYPES[dtype].itemsize), {"PRECISE": dtype == "fp32"}
        tile = {**sides, **precise, "HAS_STARTS": whole}
        heads, columns, part = {"H": SSD_HEADS_PER_TABLE, "Q": sides["Q"]}, {"COLUMNS": PASS_COLUMNS}, {**tile, "SPAN": HEADS_PER_PART}
        shared = {"Q": sides["Q"], "S": sides["S"]}
        name = f"{head_width}x{state_width} {dtype}{' packed, continued' if whole else ''}"
        for key, function, constants in (
            ("table", ssd_table_kernel, {**heads, **precise}),
            ("chunk", ssd_chunk_kernel, {**tile, "GRADIENTS": False}),
            ("chunk, gradients", ssd_chunk_kernel, {**tile, "GRADIENTS": True}),
            ("pass", ssd_pass_kernel, {**columns, "HAS_OUTER": whole, "GRADIENTS": False}),
            ("pass, gradients", ssd_pass_kernel, {**columns, "HAS_OUTER": whole, "GRADIENTS": True}),
            ("output", ssd_output_kernel, tile),
            ("state", ssd_state_kernel, {**tile, "GRADIENTS": False}),
            ("state, gradients", ssd_state_kernel, {**tile, "GRADIENTS": True}),
            ("pair", ssd_pair_kernel, part),
            ("value", ssd_value_kernel, part),
            ("edge, of C", ssd_edge_kernel, {**part, "QUERIES": True}),
            ("edge, of B", ssd_edge_kernel, {**part, "QUERIES": False}),
            ("group, of C", ssd_group_kernel, {**shared, "QUERIES": True}),
            ("group, of B", ssd_group_kernel, {**shared, "QUERIES": False}),
            ("step", ssd_step_kernel, {**heads, **precise}),
        ):
            found[f"ssd {key} {name}"] = (function, types, taken(function, {**sizes, **constants}), options_of(key))
    return found


CONFIGURATIONS = with_measured(configurations())

SHAPE = "16,384 tokens of 64 heads x 64 x 128, bf16, one group, chunks of 256; forward and backward"
CHUNKS, TILES = 64, 256


def launches() -> dict[str, Any]:
    """Programs and turns of loops of each launch at `SHAPE`; the backward's over tiles are those of all its segments."""
    tables, of_heads, of_parts = TILES * HEADS // SSD_HEADS_PER_TABLE, CHUNKS * HEADS, TILES * HEADS // HEADS_PER_PART
    walks, per_chunk = HEADS * 64 * 128 // PASS_COLUMNS, TILES // CHUNKS
    counted: dict[str, tuple[int, tuple[int, ...]]] = {
        "table": (2 * tables, ()),
        "chunk": (of_heads, (per_chunk,)),
        "chunk, gradients": (of_heads, (per_chunk,)),
        "pass": (walks, (CHUNKS,)),
        "pass, gradients": (walks, (CHUNKS,)),
        "output": (of_heads, (per_chunk,)),
        "state": (of_heads, (per_chunk,)),
        "state, gradients": (of_heads, (per_chunk,)),
        "pair": (of_parts, (HEADS_PER_PART,)),
        "value": (of_parts, (HEADS_PER_PART,)),
        "edge, of C": (of_parts, (HEADS_PER_PART,)),
        "edge, of B": (of_parts, (HEADS_PER_PART,)),
        "group, of C": (TILES, (HEADS // HEADS_PER_PART,)),
        "group, of B": (TILES, (HEADS // HEADS_PER_PART,)),
        "step": (tables, ()),
    }
    return {f"ssd {key} 64x128 bf16": each for key, each in counted.items()}


LAUNCHES = launches()
