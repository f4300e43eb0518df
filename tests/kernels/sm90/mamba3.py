"""Shipped configurations of Mamba-3's kernels: the sizes of published models, and the widest of each dtype."""

from typing import Any

import torch
from compile import with_measured

from megakernels.ops.mamba3 import launch
from megakernels.ops.mamba3.facts import CHAIN, MAMBA3_HEADS_PER_TABLE, TILES_PER_SHARE, halves_turned, phase_rows, step_sides, tile_sides
from megakernels.ops.mamba3.kernel_groups import mamba3_group_kernel
from megakernels.ops.mamba3.kernel_outputs import mamba3_output_kernel
from megakernels.ops.mamba3.kernel_pairs import mamba3_pair_kernel
from megakernels.ops.mamba3.kernel_states import mamba3_state_kernel
from megakernels.ops.mamba3.kernel_steps import mamba3_last_phase_kernel, mamba3_phase_gradient_kernel, mamba3_step_gradient_kernel
from megakernels.ops.mamba3.kernel_tables import mamba3_angle_kernel, mamba3_table_kernel, mamba3_turn_kernel
from megakernels.ops.mamba3.kernel_values import mamba3_value_kernel
from megakernels.ops.mamba3.kernel_walk import mamba3_state_gradient_kernel

INPUTS = ("x", "z", "B", "C", "dt", "A", "trapezoid", "angles", "B_bias", "C_bias", "D", "dt_bias", "mimo_x", "mimo_z", "mimo_o")
MADE = (
    *("grad_y", "y", "states", "saved", "grad_states", "grad_rows", "grad_queries", "grad_keys", "grad_outputs"),
    *(f"grad_{name}" for name in INPUTS[:8]),
)
ACCUMULATED = (
    *("ahead", "first_states", "first_phases", "phases", "last_states", "last_phases", "grad_final", "grad_initial"),
    *("tables", "turns", "turned", "ends", "of_last", "steps", "shares", "passed_on"),
)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
ALIGNED = ("num_angles", "save_every", "num_positions", "num_heads", "num_rows", "tiles")


def configurations() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for rank, num_angles, width, state_width, dtype, whole in (
        (4, 32, 64, 128, "bf16", False),
        (4, 32, 64, 128, "bf16", True),
        (1, 32, 64, 128, "bf16", False),
        (1, 0, 64, 64, "bf16", True),
        (1, 16, 32, 32, "fp32", True),
        (4, 16, 32, 32, "fp32", False),
    ):
        types = dict.fromkeys((*INPUTS, *MADE), f"*{dtype}") | dict.fromkeys(ACCUMULATED, "*fp32") | {"starts": "*i32"}
        types |= dict.fromkeys(("cosines", "sines"), "*fp16" if dtype == "bf16" else "*fp32")
        strides = [f"{name}_stride_{axis}" for name in ("grad", "x", "B", "dt", "angle") for axis in "btrgh"]
        types |= dict.fromkeys((*strides, *ALIGNED), "i32:16")
        sides = tile_sides(rank, 64 // rank, width, state_width, DTYPES[dtype].itemsize)
        flags = {"HAS_STARTS": whole, "HAS_MIMO": rank > 1, "TURNS": halves_turned(num_angles, state_width), "PRECISE": dtype == "fp32"}
        sizes = {"rank_count": rank, "head_width": width, "state_width": state_width, "num_angles": num_angles}
        tile, kind = {**sides, **sizes, **flags}, "packed, continued" if whole else "plain"
        name = f"{width}x{state_width} rank {rank}, {num_angles} angles, {dtype}, {kind}"
        last, small, tail = step_sides(num_angles), {"HAS_STARTS": whole}, {"HEAVY_TAIL": whole}
        chain = {**small, "T": CHAIN, "N": last["N"]}
        rows = {**small, "T": phase_rows(sides["Q"]), "N": last["N"]}
        spans, of_group = {**tile, "SPAN": TILES_PER_SHARE}, (*"MQRS", "rank_count", "state_width", "num_angles", "SPAN", "TURNS")
        table = {**small, **tail, "HAS_AHEAD": whole, "H": MAMBA3_HEADS_PER_TABLE, "Q": sides["Q"]}
        for key, function, constants in (
            ("table", mamba3_table_kernel, table),
            ("turn", mamba3_turn_kernel, {"T": CHAIN, "N": last["N"]}),
            ("angle", mamba3_angle_kernel, {**chain, "HAS_INITIAL": whole, "FORWARD": True}),
            ("angle, segment", mamba3_angle_kernel, {**chain, "HAS_INITIAL": True, "FORWARD": False}),
            ("state", mamba3_state_kernel, {**tile, "HAS_INITIAL": whole, "WALKS": True}),
            ("state, segment", mamba3_state_kernel, {**tile, "HAS_INITIAL": True, "WALKS": False}),
            ("output", mamba3_output_kernel, {**spans, "GRADIENTS": False}),
            ("output, gradients", mamba3_output_kernel, {**spans, "GRADIENTS": True}),
            ("state_gradient", mamba3_state_gradient_kernel, {**tile, "HAS_FINAL": whole}),
            ("pair", mamba3_pair_kernel, tile),
            ("value", mamba3_value_kernel, spans),
            ("group", mamba3_group_kernel, {**{key: spans[key] for key in of_group}, "NEIGHBOURS": rank == 1}),
            ("last_phase", mamba3_last_phase_kernel, rows),
            ("phase_gradient", mamba3_phase_gradient_kernel, {**rows, "Q": sides["Q"], "HAS_FINAL": whole}),
            ("step_gradient", mamba3_step_gradient_kernel, {**last, **small, **tail, "ROTATES": num_angles > 0}),
        ):
            options = launch.OPTIONS[key.partition(",")[0]]
            if num_angles or not {"last_phase", "phase_gradient", "turn", "angle"} & {key.partition(",")[0]}:
                found[f"mamba3 {key} {name}"] = (function, types, constants, options)
    return found


CONFIGURATIONS = with_measured(configurations())

SHAPE = "4 x 4,096 tokens of 112 heads x 64 x 128, 8 groups, 4 ranks, 32 angles, bf16, states kept every 256; forward and backward"
SEQUENCES, POSITIONS, HEADS, GROUPS, SEGMENT, TILE = 4, 4096, 112, 8, 256, 16


def launches() -> dict[str, Any]:
    """Programs and turns of loops of each launch at `SHAPE`; the backward's over tiles are those of all its segments."""
    segments, tiles, rows = POSITIONS // SEGMENT, SEGMENT // TILE, SEQUENCES * HEADS
    parts, heads = tiles // TILES_PER_SHARE, HEADS // MAMBA3_HEADS_PER_TABLE
    # a program of states has one of two branches, each with its own loops: counted here as a program of both, for half as many
    counted: dict[str, tuple[int, tuple[int, ...]]] = {
        "table": (2 * SEQUENCES * segments * heads, (tiles,)),
        "turn": (2 * SEQUENCES * POSITIONS // CHAIN, ()),
        "angle": (rows, (segments, SEGMENT // CHAIN)),
        "angle, segment": (rows * segments, (SEGMENT // CHAIN,)),
        "state": (rows, 2 * (segments, tiles)),
        "state, segment": (rows * segments, 2 * (tiles,)),
        "output": (rows * segments * parts, (TILES_PER_SHARE,)),
        "output, gradients": (rows * segments * parts, (TILES_PER_SHARE,)),
        "state_gradient": (rows, 2 * (segments, tiles)),
        "pair": (rows * segments * tiles, ()),
        "value": (rows * segments * parts, (TILES_PER_SHARE,)),
        "group": (2 * SEQUENCES * GROUPS * segments * parts, (HEADS // GROUPS, HEADS // GROUPS)),
        "phase_gradient": (rows * segments * tiles, ()),
        "step_gradient": (SEQUENCES * POSITIONS // step_sides(32)["T"], (HEADS // step_sides(32)["H"],)),
    }
    return {f"mamba3 {key} 64x128 rank 4, 32 angles, bf16, plain": each for key, each in counted.items()}


LAUNCHES = launches()
