"""Kernels as Triton's compiler optimises them, run with numpy, against the fp64 formulas: forward and every gradient.

The interpreter runs a kernel's Python instead, and does not test the compiler's result.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from kernel_checks import TOLERANCE, run, seeds_of
from launches import Launch, launches_to, optimised_ttir
from op_cases import CASES
from op_checks import rms_ratio
from op_makers import Case, gated_conv_case, routed_case
from ttir import Kernel, execute, translated

import megakernels._common.tiles  # noqa: F401  it is imported before a test has kernels chosen: they are compiled, not interpreted
from megakernels._common import device

pytestmark = pytest.mark.jobs

BY_NAME = {case.name: case for case in CASES}
WALKS = ("causal_conv1d", "causal_conv1d_plain", "causal_conv1d_initial", "causal_conv1d_packed", "selective_scan", "selective_scan_packed")
PLAIN = (
    *("rms_norm", "rms_norm_offset", "add_rms_norm", "gated_rms_norm", "head_gated_norm_sigmoid_False", "head_gated_norm_sigmoid_True"),
    *("swiglu", "geglu", "relu2glu", "relu2", "gelu", "xielu", "rope", "mla_kv", "gated_add", "cross_entropy"),
    *("dispatch", "combine", "route_normalize_True", "route_normalize_False"),
)
"""Whose kernels have no matrix product; in CI."""
WITHOUT_KERNEL = (*(name for name in BY_NAME if name.startswith("experts_")), "gated_conv1d_bias", "gated_conv1d_bias_packed")
"""Plain torch runs them on a GPU, too: the experts of rows that are sorted already, by its grouped product, and five taps."""
FLOATS = (torch.float32, torch.bfloat16)
KERNELS: dict[str, Kernel] = {}
"""Translated modules, keyed by the values that decide their code."""


@pytest.fixture
def launched() -> Iterator[list[Launch]]:
    """Operations choose their kernels for CPU tensors, and the compiled ones run: the launches, in order."""
    launches: list[Launch] = []

    def taken(launch: Launch) -> None:
        if launch.key not in KERNELS:
            KERNELS[launch.key] = translated(optimised_ttir(launch))
        launches.append(launch)
        execute(launch, KERNELS[launch.key])

    with pytest.MonkeyPatch.context() as patch, launches_to(taken):
        patch.setattr(device, "INTERPRETED", True)
        yield launches


def name_of(launch: Launch) -> str:
    return str(launch.source.fn.__name__)


def ratios(case: Case, num_positions: int, dtype: torch.dtype) -> dict[str, float]:
    """Relative error of each output and gradient compared with the fp64 formula."""
    inputs = case.make(num_positions, dtype)
    wide = {
        name: value.detach().double().requires_grad_(value.requires_grad) if value.is_floating_point() else value
        for name, value in inputs.items()
    }
    found = run(case, inputs)
    outputs = found[: len(found) - len(case.differentiable(inputs))]
    exact = run(replace(case, call=case.exact), wide, [seed.double() for seed in seeds_of(outputs)])
    names = [*[f"output {index}" for index in range(len(outputs))], *case.differentiable(inputs)]
    return {name: rms_ratio(a, b) for name, a, b in zip(names, found, exact, strict=True)}


def check(case: Case, num_positions: int, dtype: torch.dtype, launched: list[Launch]) -> None:
    check_values(case, num_positions, dtype)
    assert launched


def check_values(case: Case, num_positions: int, dtype: torch.dtype) -> None:
    found = ratios(case, num_positions, dtype)
    assert {name: ratio for name, ratio in found.items() if not ratio <= TOLERANCE[dtype]} == {}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("taps", [2, 3, 4])
def test_the_gated_convolution(taps: int, dtype: torch.dtype, launched: list[Launch]) -> None:
    """Two rows of two tiles of positions and two of channels."""
    wide = gated_conv_case(f"gated_conv1d_{taps}", taps, bias=taps == 4)
    case = replace(
        wide, inputs=lambda n, t: {name: n(*(300 if side == 11 else side for side in x.shape)) for name, x in wide.inputs(n, t).items()}
    )
    check(case, 131, dtype, launched)
    assert {name_of(launch) for launch in launched} == {"gated_conv_forward_kernel", "gated_conv_backward_kernel"}


@pytest.mark.parametrize("name", WALKS)
def test_walks_over_more_than_a_tile(name: str, launched: list[Launch]) -> None:
    check(BY_NAME[name], 131, torch.bfloat16, launched)


@pytest.mark.parametrize("name", PLAIN)
def test_kernels_without_products(name: str, launched: list[Launch]) -> None:
    check(BY_NAME[name], 37, torch.bfloat16, launched)


@pytest.mark.parametrize(
    ("activation", "hidden", "width", "kernels"),
    [
        ("swiglu", 128, 192, {"up_kernel", "down_kernel", "pull_kernel", "outer_kernel"}),
        pytest.param("gelu", 192, 320, {"up_kernel", "down_kernel", "pull_kernel", "outer_kernel"}, marks=pytest.mark.slow),
        pytest.param("relu2", 128, 136, {"up_kernel", "pull_kernel", "outer_kernel"}, marks=pytest.mark.slow),
    ],
)
def test_experts_read_by_descriptors(activation: str, hidden: int, width: int, kernels: set[str], launched: list[Launch]) -> None:
    """Full tiles of 128 rows and a remainder; columns that are not a multiple of tiles and steps."""
    check(routed_case(activation, hidden, width), 165, torch.bfloat16, launched)
    assert {name_of(launch) for launch in launched if "tensordesc" in str(launch.source.signature)} == kernels


@pytest.mark.slow
def test_indexed_attention_of_keys_that_fill_no_block(launched: list[Launch]) -> None:
    """The 384 columns are taken in a block of 512."""
    check(BY_NAME["indexed_attention"], 300, torch.float32, launched)
    assert "index_difference_kernel" in map(name_of, launched)


@pytest.mark.slow
@pytest.mark.parametrize("num_positions", [1, 70])
@pytest.mark.parametrize("name", [name for name in BY_NAME if name not in WITHOUT_KERNEL])
def test_all_kernels(name: str, num_positions: int, launched: list[Launch]) -> None:
    """Kernels with matrix products too."""
    check(BY_NAME[name], num_positions, torch.float32, launched)


@pytest.mark.parametrize("name", WITHOUT_KERNEL)
def test_cases_without_a_kernel(name: str, launched: list[Launch]) -> None:
    """Nothing compiled runs: one that gets a kernel joins the others."""
    check_values(BY_NAME[name], 5, torch.float32)
    assert not launched
