"""The ideal work of single operations for a workload, as the facts of each state it."""

from typing import Any

from megakernels.facts import Work
from megakernels.ops.attention.facts import AttentionSizes
from megakernels.ops.mamba3.facts import TrapezoidalScan
from megakernels.ops.selective_scan.facts import SelectiveSizes
from megakernels.ops.ssd.facts import Ssd
from megaplan.blocks.work import Workload
from megaplan.families.linear_attention.program import delta_sizes
from megaplan.families.recurrent.program import recurrence_sizes


def attention_core(
    load: Workload, *, num_heads: int, num_kv_heads: int, head_dim: int, value_dim: int, window_size: int | None = None
) -> Work:
    positions = load.sequences, load.positions, load.seq_length
    return AttentionSizes(*positions, num_heads, num_kv_heads, head_dim, value_dim, load.itemsize, window_size).work()


def ssd(load: Workload, *, num_heads: int, head_dim: int, state_dim: int, num_groups: int, chunk_size: int) -> Work:
    sizes = num_heads, num_groups, head_dim, state_dim, chunk_size, load.itemsize
    return Ssd(load.sequences, load.positions, *sizes).work(load.seq_length)


def mimo_ssd(
    load: Workload, *, num_heads: int, head_dim: int, state_dim: int, num_groups: int, mimo_rank: int, chunk_size: int, save_every: int
) -> Work:
    sizes = num_heads, num_groups, mimo_rank, head_dim, state_dim, 0, chunk_size, save_every, load.itemsize
    return TrapezoidalScan(load.sequences, load.positions, *sizes).work(load.seq_length)


def selective_scan(load: Workload, *, channels: int, state_dim: int, save_every: int) -> Work:
    return SelectiveSizes(load.sequences, load.positions, channels, state_dim, save_every, load.itemsize).work(load.seq_length)


def delta_rule(load: Workload, linear: Any) -> Work:
    heads = linear.num_value_heads // load.tp, linear.num_key_heads // load.tp
    return delta_sizes(linear, load.sequences, load.positions, *heads, load.itemsize).work(load.seq_length)


def m2rnn(load: Workload, recurrent: Any) -> Work:
    return recurrence_sizes(recurrent, load.sequences, load.positions, recurrent.num_heads // load.tp, load.itemsize).work(load.seq_length)
