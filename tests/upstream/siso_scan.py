"""Runs mamba-ssm's own kernels of Mamba-3 in Triton's interpreter, in its own process: python -O siso_scan.py FROM.pt TO.pt

The package asserts that tensors are on CUDA, which -O leaves out, tries configurations on a device, of which the first is taken here, and
writes sines and the like as PTX, for which Triton's functions stand in. The interpreter multiplies bf16 wrongly, so what the package rounds
to bf16 stays fp32. Everything else is as published.
"""

import contextlib
import os
import sys
from types import ModuleType
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
import torch
import triton
import triton.language as tl

sys.modules["selective_scan_cuda"] = ModuleType("selective_scan_cuda")  # compiled, of Mamba-1


class FirstConfiguration:
    """An autotuned kernel that tries nothing."""

    def __init__(self, function: Any, config: Any) -> None:
        self.function, self.configs = function, [config]

    def __getitem__(self, grid: Any) -> Any:
        def launch(*operands: Any, **options: Any) -> Any:
            options = {**self.configs[0].kwargs, **options}
            return self.function[grid(options) if callable(grid) else grid](*operands, **options)

        return launch


triton.autotune = lambda configs, **_: lambda function: FirstConfiguration(function, configs[0])
torch.cuda.device = lambda *_: contextlib.nullcontext()
from mamba_ssm.ops.triton.mamba3.mamba3_siso_combined import mamba3_siso_combined  # noqa: E402  as the lines above leave it


@triton.jit
def cosine(x):
    return tl.cos(x)


@triton.jit
def sine(x):
    return tl.sin(x)


@triton.jit
def sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def tanh(x):
    return 2 / (1 + tl.exp(-2 * x)) - 1


@triton.jit
def sech2(x):
    y = 2 / (1 + tl.exp(-2 * x)) - 1
    return 1 - y * y


@triton.jit
def silu(x):
    return x / (1 + tl.exp(-x))


PLAIN = {"cos_approx": cosine, "sin_approx": sine, "sigmoid_approx": sigmoid, "tanh_approx": tanh, "sech2_approx": sech2, "silu": silu}
for name, module in list(sys.modules.items()):
    if name.startswith("mamba_ssm.ops.triton.mamba3"):
        for function in PLAIN.keys() & vars(module).keys():
            setattr(module, function, PLAIN[function])


def main() -> None:
    cases, results, narrow = torch.load(sys.argv[1]), [], torch.bfloat16
    torch.bfloat16 = torch.float32
    for given, seed in cases:
        own = {name: tensor.requires_grad_(seed is not None) for name, tensor in given.items()}
        y = mamba3_siso_combined(**own, chunk_size=16)
        gradients = [] if seed is None else torch.autograd.grad(y, list(own.values()), seed)
        results.append((y.detach(), dict(zip(own, gradients, strict=False))))
    torch.bfloat16 = narrow
    torch.save(results, sys.argv[2])


main()
