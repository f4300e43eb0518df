"""The scans and recurrences that `benchmarks/gpu/run.py` measures."""

from functools import partial

from gpu.case import KernelCase

from megakernels import gated_delta, m2rnn, mamba3, selective_scan, ssd
from megakernels.ops.gated_delta.facts import DeltaSizes
from megakernels.ops.m2rnn.facts import RecurrenceSizes
from megakernels.ops.mamba3.facts import TrapezoidalScan
from megakernels.ops.selective_scan.facts import SelectiveSizes
from megakernels.ops.ssd.facts import Ssd
from megaplan.blocks.work import Workload

SAVE_EVERY, M2RNN_SAVE_EVERY, DELTA_CHUNK = 256, 64, 64


def selective_case(load: Workload, rows: tuple[int, int], channels: int, state: int, every: int = SAVE_EVERY) -> KernelCase:
    """Mamba-1: channels, each with a state."""
    shapes: dict[str, tuple[int, ...]] = {
        **dict.fromkeys(("x", "dt"), (*rows, channels)),
        "A_log": (channels, state),
        **dict.fromkeys(("B", "C"), (*rows, state)),
        **dict.fromkeys(("D", "dt_bias"), (channels,)),
    }
    work = SelectiveSizes(*rows, channels, state, every, load.itemsize).work(load.seq_length)
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
    work = Ssd(*rows, heads, groups, width, state, chunk, load.itemsize).work(load.seq_length)
    call = partial(ssd, chunk_size=chunk)
    return KernelCase(f"ssd {heads}x{width}x{state}", load.num_tokens, shapes, call, work, "matmul", tile=chunk)


def mamba3_case(
    load: Workload, rows: tuple[int, int], heads: int, width: int, state: int, groups: int, rank: int, angles: int
) -> KernelCase:
    """Case of Mamba-3's scan; one rank is the single-input form."""
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
    chunk, every = 64 // rank, SAVE_EVERY
    work = TrapezoidalScan(*rows, heads, groups, rank, width, state, angles, chunk, every, load.itemsize).work(load.seq_length)
    absent = dict.fromkeys(("mimo_x", "mimo_z", "mimo_o")) if rank == 1 else {}
    call = partial(mamba3, chunk_size=chunk, save_every=every, **absent)
    name, scales = f"mamba3 {heads}x{width}x{state}/{rank}", dict.fromkeys(per_rank, 0.5)
    return KernelCase(name, load.num_tokens, shapes, call, work, "matmul", scales, tile=chunk)


def m2rnn_case(load: Workload, rows: tuple[int, int], heads: int, keys: int, values: int) -> KernelCase:
    """Heads with a state of keys by values.

    The state map contracts: its largest singular value, about twice the deviation times the root of its size, stays below 1. With a larger
    one the recurrence is chaotic, and a rounding error grows to the size of the state within some hundred positions, in any implementation.
    """
    work = RecurrenceSizes(*rows, heads, keys, values, M2RNN_SAVE_EVERY, load.itemsize).work(load.seq_length)
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
    call = partial(m2rnn, save_every=M2RNN_SAVE_EVERY)
    name, scales = f"m2rnn {heads}x{keys}x{values}", {"state_map": 0.35 * values**-0.5}
    return KernelCase(name, load.num_tokens, shapes, call, work, "copy", scales)


def delta_case(
    load: Workload, rows: tuple[int, int], key_heads: int, heads: int, keys: int, values: int, *, per_row: bool = False
) -> KernelCase:
    """Case of the delta rule; with `per_row` each row of the state has a decay, as in Kimi delta attention."""
    work = DeltaSizes(*rows, heads, key_heads, keys, values, per_row, DELTA_CHUNK, SAVE_EVERY, load.itemsize).work(load.seq_length)
    decays = (keys,) if per_row else ()
    shapes: dict[str, tuple[int, ...]] = {
        **dict.fromkeys(("q", "k"), (*rows, key_heads, keys)),
        "v": (*rows, heads, values),
        "decay": (*rows, heads, *decays),
        "beta": (*rows, heads),
        "A_log": (heads,),
        "dt_bias": (heads, *decays),
    }
    call = partial(gated_delta, chunk_size=DELTA_CHUNK, save_every=SAVE_EVERY)
    name = f"gated_delta {key_heads}/{heads} {keys}x{values}{' rows' if per_row else ''}"
    return KernelCase(name, load.num_tokens, shapes, call, work, "matmul", tile=DELTA_CHUNK)
