"""Runs the norm kernels in Triton's interpreter and prints what it found as JSON.

A process of its own: TRITON_INTERPRET is read when triton is imported.

The interpreter runs programs in order, which hides races between them: every check runs again with the programs shuffled.
"""

import contextlib
import json
import os
import random
from collections.abc import Iterator

os.environ["TRITON_INTERPRET"] = "1"

import torch
from op_checks import rms_ratio
from torch import Tensor
from triton.runtime import interpreter

from megakernels.rms_norm import kernel, reference

EPS = 1e-5
NUM_PROGRAMS = 4
ALL = [True, True]


@contextlib.contextmanager
def shuffled_grid(seed: int) -> Iterator[None]:
    builder = type(interpreter.interpreter_builder)
    original, orders = builder.set_grid_idx, {}

    def set_grid_idx(self: object, x: int, y: int, z: int) -> None:
        count = self.grid_dim[0]  # type: ignore[attr-defined]
        if count not in orders:
            orders[count] = random.Random(seed).sample(range(count), count)
        original(self, orders[count][x], y, z)

    builder.set_grid_idx = set_grid_idx
    try:
        yield
    finally:
        builder.set_grid_idx = original


def inputs(num_rows: int, num_cols: int, dtype: torch.dtype, strided: bool) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_rows * 1000 + num_cols)
    padding = 3 if strided else 0
    x, grad = (torch.randn(num_rows, 1, num_cols + padding, generator=generator).to(dtype)[..., padding:] for _ in range(2))
    return x, torch.randn(num_cols, generator=generator).to(dtype), grad


def run(x: Tensor, weight: Tensor, grad: Tensor) -> list[Tensor]:
    y, rstd = kernel.forward(x, weight, EPS)
    found = kernel.backward(grad, x, weight, rstd, ALL, NUM_PROGRAMS)
    return [y, rstd, *[gradient for gradient in found if gradient is not None]]


def exact(x: Tensor, weight: Tensor, grad: Tensor) -> list[Tensor]:
    x, weight, grad = x.double(), weight.double(), grad.double()
    y, rstd = reference.rms_norm_forward(x, weight, EPS)
    found = reference.rms_norm_backward(grad, x, weight, rstd, ALL)
    return [y, rstd, *[gradient for gradient in found if gradient is not None]]


def far_rows() -> float:
    """Rows so far apart that a 32-bit offset would wrap; the memory between them is never touched."""
    rows = torch.empty((2 << 30) + 64, dtype=torch.bfloat16).as_strided((3, 64), (1 << 30, 1))
    near, weight, grad = inputs(3, 64, torch.bfloat16, strided=False)
    rows.copy_(near.squeeze(1))
    arguments = (rows, weight, grad.squeeze(1))
    return max(rms_ratio(a, b) for a, b in zip(run(*arguments), exact(*arguments), strict=True))


def main() -> None:
    far = far_rows()
    torch.use_deterministic_algorithms(True)  # NaN in uninitialised memory
    worst: dict[str, float] = {}
    repeats = True
    wanted = True
    for dtype in (torch.float32, torch.bfloat16):
        for num_rows, num_cols, strided in ((1, 5, False), (2, 37, True), (11, 64, False), (9, 200, True)):
            arguments = inputs(num_rows, num_cols, dtype, strided)
            in_order = run(*arguments)
            with shuffled_grid(seed=num_cols):
                shuffled = run(*arguments)
            repeats &= all(torch.equal(first, second) for first, second in zip(in_order, shuffled, strict=True))
            for name, a, b in zip(("y", "rstd", "grad_x", "grad_weight"), in_order, exact(*arguments), strict=True):
                key = f"{dtype} {name}"
                worst[key] = max(worst.get(key, 0.0), rms_ratio(a, b))
            x, weight, grad = arguments
            only_weight = kernel.backward(grad, x, weight, in_order[1], [False, True], NUM_PROGRAMS)
            only_x = kernel.backward(grad, x, weight, in_order[1], [True, False], NUM_PROGRAMS)
            wanted &= only_weight[0] is None and only_x[1] is None
            wanted &= only_weight[1] is not None and torch.equal(only_weight[1], in_order[3])
            wanted &= only_x[0] is not None and torch.equal(only_x[0], in_order[2])
    print(json.dumps({"worst": worst, "repeats": repeats, "wanted": wanted, "far_rows": far}))  # noqa: T201  read by the test


if __name__ == "__main__":
    main()
