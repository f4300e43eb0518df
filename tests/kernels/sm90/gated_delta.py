"""Shipped configurations of the delta rule's kernels: head widths of published models, and the widest of each dtype."""

from typing import Any

import torch

from megakernels.facts import block_of
from megakernels.ops.gated_delta import facts, launch
from megakernels.ops.gated_delta.kernel_gradients import delta_key_gradient_kernel, delta_value_gradient_kernel
from megakernels.ops.gated_delta.kernel_pairs import delta_pair_gradient_kernel
from megakernels.ops.gated_delta.kernel_row_pairs import delta_row_pair_gradient_kernel
from megakernels.ops.gated_delta.kernel_rows import delta_row_decay_gradient_kernel, delta_unit_gradient_kernel
from megakernels.ops.gated_delta.kernel_scores import delta_row_decay_kernel, delta_row_scores_kernel, delta_scores_kernel
from megakernels.ops.gated_delta.kernel_solve import delta_solve_kernel
from megakernels.ops.gated_delta.kernel_walk import delta_walk_gradient_kernel, delta_walk_kernel

INPUTS = ("q", "k", "v", "decay", "beta", "A_log", "dt_bias", "grad_y", "y", "grad_q", "grad_k", "grad_v", "grad_decay", "grad_beta")
BUFFERS = ("queries", "keys", "reads", "scores", "inverses", "between", "grad_between", "written", "solved", "of_queries", "of_keys")
ACCUMULATED = ("initial", "states", "last", "grad_final", "grad_initial", "shares", *facts.SUMMED)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def kernels(rows: bool, packed: bool, tile: dict[str, int], precise: bool) -> list[tuple[str, str, Any, dict[str, Any]]]:
    """Name, launch options, kernel and constants of each."""
    Q, K, V = tile.values()
    keys, part = {"Q": Q, "K": K}, launch.part_of
    starts, exact = {"HAS_STARTS": packed}, {"PRECISE": precise}
    walk = {**tile, "W": part(V, "walk")}
    own = (
        [
            ("row_decay", delta_row_decay_kernel, {**keys, "W": part(K, "row_decay"), **starts, **exact}),
            ("row_scores", delta_row_scores_kernel, {**keys, **starts, **exact}),
            ("row_pair_gradient", delta_row_pair_gradient_kernel, {**keys, **starts, **exact}),
            ("row_decay_gradient", delta_row_decay_gradient_kernel, {**keys, "W": part(K, "row_decay_gradient"), **exact}),
        ]
        if rows
        else [
            ("scores", delta_scores_kernel, {**keys, "W": part(K, "scores"), **starts}),
            ("pair_gradient", delta_pair_gradient_kernel, {**keys, "W": part(K, "pair"), **starts}),
        ]
    )
    shared = [
        ("solve", delta_solve_kernel, {"Q": Q}),
        ("walk", delta_walk_kernel, {**walk, "HAS_INITIAL": packed, "WALKS": True}),
        ("walk_gradient", delta_walk_gradient_kernel, {**walk, "HAS_FINAL": packed}),
        ("value_gradient", delta_value_gradient_kernel, {"Q": Q, "V": V, "W": part(V, "value")}),
        ("key_gradient", delta_key_gradient_kernel, {**tile, "L": part(K, "key_rows"), "W": part(V, "key")}),
        ("unit_gradient", delta_unit_gradient_kernel, keys),
    ]
    found = [(name, name, function, constants) for name, function, constants in (*own, *shared)]
    return [*found, ("walk, segment", "walk", delta_walk_kernel, {**walk, "HAS_INITIAL": False, "WALKS": False})]


def configurations() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key_width, value_width, dtype, rows, packed in (
        (128, 128, "bf16", False, False),
        (128, 128, "bf16", False, True),
        (128, 128, "bf16", True, False),
        (128, 128, "bf16", True, True),
        (64, 64, "bf16", False, True),
        (128, 256, "bf16", False, False),
        (64, 64, "fp32", False, True),
        (64, 64, "fp32", True, True),
    ):
        wide = DTYPES[dtype]
        types = dict.fromkeys((*INPUTS, *BUFFERS), f"*{dtype}") | dict.fromkeys(ACCUMULATED, "*fp32")
        types |= {"starts": "*i32", "scale": "fp32", "beta_limit": "fp32"}
        strides = [f"{name}_stride_{axis}" for name in ("q", "k", "v", "grad") for axis in "bth"]
        strides += [f"decay_stride_{axis}" for axis in "bth"] if rows else []
        types |= dict.fromkeys((*strides, "key_width", "value_width", "save_every", "plane"), "i32:16")
        tile = {"Q": facts.LARGEST_TILE[wide.itemsize], "K": block_of(key_width, 16), "V": block_of(value_width, 16)}
        name = f"{key_width}x{value_width} {'rows ' if rows else ''}{dtype}{' packed, continued' if packed else ''}"
        for key, options, function, constants in kernels(rows, packed, tile, wide == torch.float32):
            found[f"gated_delta {key} {name}"] = (function, types, constants, launch.OPTIONS[options])
    return found


CONFIGURATIONS = configurations()
