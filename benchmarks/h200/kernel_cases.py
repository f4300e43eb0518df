"""What `benchmarks/h200_kernels.py` measures: an operation at a size, its inputs, and its ideal bytes and FLOPs from megaplan's cost model.

Each operation has a full size and a small one; the small ones check the harness on a machine without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from megakernels.activation import relu2, swiglu
from megakernels.causal_conv1d import causal_conv1d
from megakernels.m2rnn import m2rnn
from megakernels.rms_norm import gated_rms_norm, rms_norm
from megakernels.rope import rope
from megakernels.ssd import ssd
from megaplan.cost import ops as cost
from megaplan.cost.mamba import ssd as ssd_work
from megaplan.cost.recurrent import m2rnn as m2rnn_work
from megaplan.cost.work import Work, Workload
from megaplan.spec.models import MatrixRecurrence
from megarun.model.rotary import Rotary, rotary_table

EPS = 1e-5
Inputs = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One row of the table.

    Attributes:
        name: Operation and size.
        num_tokens: Tokens of a call.
        shapes: Of the inputs, by argument; all have gradients.
        call: The operation on the inputs.
        work: Per token, from the cost model.
        bound: What the target is a share of: `copy` bandwidth, or `matmul` rate.
    """

    name: str
    num_tokens: int
    shapes: dict[str, tuple[int, ...]]
    call: Callable[..., Tensor]
    work: Work
    bound: str

    def make(self, device: str, dtype: torch.dtype) -> Inputs:
        """The same values on any device."""
        generator = torch.Generator().manual_seed(0)
        made = {name: torch.randn(shape, generator=generator, dtype=torch.float32) for name, shape in self.shapes.items()}
        for name in ("dt_bias",):
            if name in made:
                made[name] -= 4
        return {name: value.to(device, dtype).requires_grad_() for name, value in made.items()}


def cases(small: bool = False) -> list[KernelCase]:
    """The operations at their full sizes, or at sizes for a CPU."""
    batch, seq_length = (1, 65) if small else (4, 4096)
    load = Workload(seq_length=seq_length, num_tokens=batch * seq_length, itemsize=2)
    rows = (batch, seq_length)
    found = [
        *[_norm(load, rows, width) for width in ((96,) if small else (4096, 8192))],
        _gated_norm(load, rows, *((96, 3) if small else (8192, 8))),
        _activation(load, rows, 96 if small else 14336, gated=True),
        _activation(load, rows, 96 if small else 14336, gated=False),
        _conv(load, rows, 96 if small else 8448),
        _rope(load, rows, *((4, 16) if small else (32, 128))),
        _ssd(load, rows, *((4, 16, 16, 2, 32) if small else (64, 64, 128, 1, 256))),
        _m2rnn(load, rows, *((2, 8, 4) if small else (44, 64, 16))),
    ]
    return sorted(found, key=lambda case: case.name)


def _norm(load: Workload, rows: tuple[int, int], width: int) -> KernelCase:
    shapes = {"x": (*rows, width), "weight": (width,)}
    return KernelCase(f"rms_norm {width}", load.num_tokens, shapes, partial(rms_norm, eps=EPS), cost.norm(load, width), "copy")


def _gated_norm(load: Workload, rows: tuple[int, int], width: int, num_groups: int) -> KernelCase:
    shapes = {"x": (*rows, width), "gate": (*rows, width), "weight": (width,)}
    call = partial(gated_rms_norm, eps=EPS, num_groups=num_groups)
    return KernelCase(
        f"gated_rms_norm {width}/{num_groups}", load.num_tokens, shapes, call, cost.gated_norm(load, width, num_groups), "copy"
    )


def _activation(load: Workload, rows: tuple[int, int], width: int, *, gated: bool) -> KernelCase:
    name, names = ("swiglu", ("gate", "up")) if gated else ("relu2", ("x",))
    work = cost.activation(load, width, "swiglu" if gated else "relu2")
    return KernelCase(f"{name} {width}", load.num_tokens, dict.fromkeys(names, (*rows, width)), swiglu if gated else relu2, work, "copy")


def _conv(load: Workload, rows: tuple[int, int], channels: int, taps: int = 4) -> KernelCase:
    shapes: dict[str, tuple[int, ...]] = {"x": (*rows, channels), "weight": (channels, taps), "bias": (channels,)}
    work = cost.causal_conv1d(load, channels, taps)
    return KernelCase(f"causal_conv1d {channels}x{taps}", load.num_tokens, shapes, causal_conv1d, work, "copy")


def _rope(load: Workload, rows: tuple[int, int], heads: int, width: int) -> KernelCase:
    @cache
    def table(device: torch.device) -> Rotary:
        return rotary_table(torch.arange(rows[1]), width, 1e4, device)

    def call(x: Tensor) -> Tensor:
        return rope(x, *(angles[: x.shape[1]] for angles in table(x.device)))

    return KernelCase(f"rope {heads}x{width}", load.num_tokens, {"x": (*rows, heads, width)}, call, cost.rope(load, heads * width), "copy")


def _ssd(load: Workload, rows: tuple[int, int], heads: int, width: int, state: int, groups: int, chunk: int) -> KernelCase:
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
    return KernelCase(f"ssd {heads}x{width}x{state}", load.num_tokens, shapes, partial(ssd, chunk_size=chunk), work, "matmul")


def _m2rnn(load: Workload, rows: tuple[int, int], heads: int, keys: int, values: int) -> KernelCase:
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
    return KernelCase(f"m2rnn {heads}x{keys}x{values}", load.num_tokens, shapes, call, m2rnn_work(load, sizes), "copy")
