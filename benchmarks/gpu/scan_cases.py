"""The scans and recurrences that `benchmarks/gpu/run.py` measures."""

from __future__ import annotations

from functools import partial

from gpu.case import KernelCase

from megakernels import gated_delta, m2rnn, mamba3, selective_scan, ssd
from megaplan.blocks.work import Workload
from megaplan.families.linear_attention.work import delta_rule
from megaplan.families.mamba.work import mimo_ssd
from megaplan.families.mamba.work import selective_scan as selective_work
from megaplan.families.mamba.work import ssd as ssd_work
from megaplan.families.recurrent.work import m2rnn as m2rnn_work
from megaplan.spec.models import GatedDeltaNet, KimiDeltaAttention, MatrixRecurrence


def selective_case(load: Workload, rows: tuple[int, int], channels: int, state: int, every: int = 256) -> KernelCase:
    """Mamba-1: channels, each with a state."""
    shapes: dict[str, tuple[int, ...]] = {
        **dict.fromkeys(("x", "dt"), (*rows, channels)),
        "A_log": (channels, state),
        **dict.fromkeys(("B", "C"), (*rows, state)),
        **dict.fromkeys(("D", "dt_bias"), (channels,)),
    }
    work = selective_work(load, channels=channels, state_dim=state, save_every=every)
    return KernelCase(
        f"selective_scan {channels}x{state}", load.num_tokens, shapes, partial(selective_scan, save_every=every), work, "copy"
    )


def ssd_case(load: Workload, rows: tuple[int, int], heads: int, width: int, state: int, groups: int, chunk: int) -> KernelCase:
    """Mamba-2: heads of a width, a state, groups that share B and C, positions of a chunk."""
    shapes: dict[str, tuple[int, ...]] = {
        "x": (*rows, heads, width),
        "dt": (*rows, heads),
        "A_log": (heads,),
        "B": (*rows, groups, state),
        "C": (*rows, groups, state),
        "D": (heads,),
        "dt_bias": (heads,),
    }
    work = ssd_work(load, num_heads=heads, head_dim=width, state_dim=state, num_groups=groups, chunk_size=chunk)
    call = partial(ssd, chunk_size=chunk)
    return KernelCase(f"ssd {heads}x{width}x{state}", load.num_tokens, shapes, call, work, "matmul", tile=chunk)


def mamba3_case(
    load: Workload, rows: tuple[int, int], heads: int, width: int, state: int, groups: int, rank: int, angles: int
) -> KernelCase:
    """With one rank the single-input form."""
    per_rank = {"mimo_x", "mimo_z", "mimo_o"} if rank > 1 else set()
    shapes: dict[str, tuple[int, ...]] = {
        **dict.fromkeys(("x", "z"), (*rows, heads, width)),
        **dict.fromkeys(("B", "C"), (*rows, rank, groups, state)),
        **dict.fromkeys(("dt", "A", "trapezoid"), (*rows, heads)),
        "angles": (*rows, angles),
        **dict.fromkeys(("B_bias", "C_bias"), (heads, rank, state)),
        **dict.fromkeys(("D", "dt_bias"), (heads,)),
        **dict.fromkeys(sorted(per_rank), (heads, rank, width)),
    }
    chunk, every = 64 // rank, 256
    work = mimo_ssd(
        load,
        num_heads=heads,
        head_dim=width,
        state_dim=state,
        num_groups=groups,
        mimo_rank=rank,
        chunk_size=chunk,
        save_every=every,
    )
    absent = dict.fromkeys(("mimo_x", "mimo_z", "mimo_o")) if rank == 1 else {}
    call = partial(mamba3, chunk_size=chunk, save_every=every, **absent)
    name, scales = f"mamba3 {heads}x{width}x{state}/{rank}", dict.fromkeys(per_rank, 0.5)
    return KernelCase(name, load.num_tokens, shapes, call, work, "matmul", scales, tile=chunk)


def m2rnn_case(load: Workload, rows: tuple[int, int], heads: int, keys: int, values: int) -> KernelCase:
    """Heads with a state of keys by values.

    The state map contracts: its largest singular value, about twice the deviation times the root of its size, stays below 1. With a larger
    one the recurrence is chaotic, and a rounding error grows to the size of the state within some hundred positions, in any implementation.
    """
    sizes = MatrixRecurrence(kind="m2rnn", num_heads=heads, key_dim=keys, value_dim=values)
    shapes: dict[str, tuple[int, ...]] = {
        "q": (*rows, keys),
        "k": (*rows, keys),
        "v": (*rows, heads, values),
        "f": (*rows, heads),
        "state_map": (heads, values, values),
        "D": (heads, values),
        "dt_bias": (heads,),
        "A_log": (heads,),
    }
    call = partial(m2rnn, save_every=sizes.save_every)
    name, scales = f"m2rnn {heads}x{keys}x{values}", {"state_map": 0.35 * values**-0.5}
    return KernelCase(name, load.num_tokens, shapes, call, m2rnn_work(load, sizes), "copy", scales)


def delta_case(
    load: Workload, rows: tuple[int, int], key_heads: int, heads: int, keys: int, values: int, *, per_row: bool = False
) -> KernelCase:
    """With `per_row` a decay for each row of the state, as in Kimi delta attention."""
    linear: GatedDeltaNet | KimiDeltaAttention = (
        KimiDeltaAttention(kind="kda", num_heads=heads, head_dim=keys)
        if per_row
        else GatedDeltaNet(kind="gated_delta", num_key_heads=key_heads, num_value_heads=heads, key_dim=keys, value_dim=values)
    )
    decays = (keys,) if per_row else ()
    shapes: dict[str, tuple[int, ...]] = {
        **dict.fromkeys(("q", "k"), (*rows, key_heads, keys)),
        "v": (*rows, heads, values),
        "decay": (*rows, heads, *decays),
        "beta": (*rows, heads),
        "A_log": (heads,),
        "dt_bias": (heads, *decays),
    }
    call = partial(gated_delta, chunk_size=linear.chunk_size, save_every=linear.save_every)
    name = f"gated_delta {key_heads}/{heads} {keys}x{values}{' rows' if per_row else ''}"
    return KernelCase(name, load.num_tokens, shapes, call, delta_rule(load, linear), "matmul", tile=linear.chunk_size)
