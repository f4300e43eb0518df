"""The operations that the GPU benchmark checks and times: right and counted at small sizes, and inputs that any precision can follow."""

import importlib
import math
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from gpu import checks, peers, times
from gpu.case import KernelCase
from gpu.kernel_cases import cases

from megakernels import mamba3, use_kernels
from megakernels.facts import Work

pytestmark = pytest.mark.runtime
SMALL = cases(small=True)
AT_300 = [*cases(small=True, small_length=300), *(case for case in cases() if case.name.startswith("m2rnn"))]
"""Every operation at the positions of a check; the recurrence, whose errors grow with its state, also at its full width."""


@pytest.fixture(autouse=True)
def plain_torch() -> Iterator[None]:
    yield
    use_kernels("triton")


def test_every_case_has_a_small_size() -> None:
    assert len(cases()) == 31  # one norm more than the small ones
    assert {case.name.split()[0] for case in cases()} == {case.name.split()[0] for case in SMALL}


@pytest.mark.parametrize("case", AT_300, ids=lambda case: case.name)
def test_fp32_follows_fp64(case: Any) -> None:
    """Else no kernel is comparable with fp64: of a chaotic recurrence, any two precisions differ wholly after some hundred positions."""
    assert checks.worst_error(case, "cpu", torch.float32, num_tokens=300) < 1e-4


def test_the_recurrences_state_map_contracts() -> None:
    for case in cases():
        if case.name.startswith("m2rnn"):
            state_map = case.make("cpu", torch.float32, 1)["state_map"].detach()
            assert 0.5 < torch.linalg.matrix_norm(state_map, 2).max() < 1


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_small_cases_are_checked_at_every_size(case: Any) -> None:
    lines: list[dict[str, Any]] = []
    checks.check_case(case, lines.append, "cpu", small=True)
    assert [line["num_tokens"] for line in lines] == ([1] if case.name.startswith("newton") else [1, 3, 17])
    assert [line for line in lines if not line["right"]] == []


def test_sizes_are_around_the_tile() -> None:
    by_name = {case.name.split()[0]: checks.sizes_of(case) for case in cases()}
    assert by_name["attention"] == (1, 3, 127, 129, 300, 2048)
    assert by_name["ssd"] == (1, 3, 255, 257, 300, 2048)
    assert by_name["newton_schulz"] == (1,)


def test_work_and_statements_are_counted() -> None:
    use_kernels("triton")  # kernels state what they hold, where plain torch replaces them too
    by_name = {case.name.split()[0]: case for case in SMALL}
    counted = {name: times.counted(case) for name, case in by_name.items()}
    assert by_name.keys() >= {"rms_norm", "gated_rms_norm", "swiglu", "relu2", "ssd", "mamba3", "gated_delta", "head_gated_norm", "m2rnn"}
    assert (counted["swiglu"]["forward_bytes"], counted["swiglu"]["backward_bytes"]) == (3 * 65 * 96 * 2, 5 * 65 * 96 * 2)
    head = counted["linear_cross_entropy"]
    assert (head["forward_flops"], head["backward_flops"]) == (2 * 65 * 24 * 200, 4 * 65 * 24 * 200)
    moe = counted["moe"]  # six tokens' width of each of two experts, three matrices
    assert (moe["forward_flops"], moe["backward_flops"]) == (6 * 65 * 2 * 24 * 16, 12 * 65 * 2 * 24 * 16)
    pairs = 4 * 65 * 66 // 2  # 24 and 16 wide, of four heads; backward two products more, and the scores again
    assert (counted["attention"]["forward_flops"], counted["attention"]["backward_flops"]) == (2 * pairs * 40, 2 * pairs * (2 * 40 + 24))
    assert counted["newton_schulz"]["forward_flops"] == 2 * (3 * 24**2 * 40 + 24**3)
    assert counted["cross_entropy"]["backward_bytes"] == 65 * (2 * 200 * 2 + 4)
    stated = {name: times.stated_bytes(case.call, case.make("cpu", torch.bfloat16)) for name, case in by_name.items()}
    scans = {"ssd", "mamba3", "gated_delta", "m2rnn", "selective_scan"}
    assert {name for name, size in stated.items() if size} == {
        "attention",
        "indexed_attention",
        "linear_cross_entropy",
        "moe",
        "newton_schulz",
        *scans,
    }
    assert stated["attention"] == 4 * 4 * 65
    pairs = (
        65 * 2
    )  # backward: activated rows, a copy of the tokens in the rows' order and its index; the sums of six experts' rows and tiles
    assert stated["moe"] == 2 * (pairs * 16 + pairs * 24) + 4 * pairs + 2 * 6 * 4


@pytest.mark.parametrize(("error", "right"), [(0.0, True), (0.1, False)])
def test_a_sum_that_cancels_may_be_as_far_as_rounding_its_inputs_moves_it(error: float, right: bool) -> None:
    """The operation rounds its operand to bf16 once more than the exact one; a tenth too much is wrong all the same."""

    def cancels(x: Tensor) -> Tensor:
        exact = x.dtype == torch.float64
        scaled = x * 1.01 if exact else (x * 1.01).bfloat16().float()
        return ((scaled[..., :32].sum(-1) - scaled[..., 32:].sum(-1)) * (1 if exact else 1 + error)).to(x.dtype)

    values = torch.rand(1, 64, 64, generator=torch.Generator().manual_seed(0)) + 3
    case = KernelCase("cancels", 64, {"x": (1, 64, 64)}, cancels, Work(), "copy")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KernelCase, "make", lambda *_: {"x": values.bfloat16().requires_grad_()})
        line = checks.check(case, 64, "cpu", torch.bfloat16)
    assert line["error"] > checks.TOLERANCE[torch.bfloat16]
    assert line["right"] is right


def test_full_sizes_are_those_of_the_published_ones() -> None:
    by_name = {case.name.split()[0]: case for case in cases()}
    head, moe = by_name["linear_cross_entropy"], by_name["moe"]
    assert (head.num_tokens, head.shapes["weight"]) == (16384, (131072, 4096))
    assert (moe.num_tokens, moe.shapes["gate"]) == (32768, (128, 768, 2048))


def test_an_error_is_relative_but_of_what_is_zero() -> None:
    exact = torch.tensor([1.0, -1.0], dtype=torch.float64)
    assert checks.rms_ratio(torch.tensor([1.5, -1.5]), 1e3 * exact) == pytest.approx(0.9985)
    assert checks.rms_ratio(torch.tensor([1e-8, 1e-8]), 1e-17 * exact) == pytest.approx(1e-8)
    assert math.isnan(checks.worst([0.1, math.nan, 0.2]))


class Module:
    """A library's module."""

    def __init__(self, **names: Any) -> None:
        vars(self).update(names)


def attend(q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float) -> tuple[Tensor, None]:
    """Linear attention with a decay of each head."""
    decay = g.cumsum(1)
    later = torch.ones(q.shape[1], q.shape[1]).triu(1).bool().unsqueeze(-1)
    weights = (decay.unsqueeze(2) - decay.unsqueeze(1)).masked_fill(later, -torch.inf).exp()
    return torch.einsum("bihk,bjhk,bijh,bjhv->bihv", q, k, weights, v) * scale, None


def chunked(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk: int, D: Tensor, dt_bias: Tensor, dt_softplus: bool) -> Tensor:
    """Mamba-2 with the arguments of mamba-ssm."""
    assert chunk == 32
    assert dt_softplus
    step = torch.nn.functional.softplus(dt + dt_bias)
    keys, queries = (each.repeat_interleave(x.shape[2] // B.shape[2], 2) for each in (B, C))
    return attend(queries, keys, x * step.unsqueeze(-1), A * step, 1.0)[0] + D.unsqueeze(-1) * x


def siso(**given: Any) -> Tensor:
    """Mamba-3 of one rank with the arguments of mamba-ssm: our formulas, with what softplus maps to the step and the rate."""
    step, values = given["DT"].mT, given["V"]
    rate = -given["ADT"].mT / step
    raw_step, raw_rate = (each + torch.log(-torch.expm1(-each)) for each in (step, rate))
    gate = torch.full_like(values, 60.0)  # whose silu is 60
    rows, biases = [given[name].unsqueeze(2) for name in "KQ"], [given[f"{name}_bias"].unsqueeze(1) for name in "KQ"]
    zeros = torch.zeros(values.shape[2], dtype=values.dtype)
    scan = mamba3(
        values, gate, *rows, raw_step, raw_rate, given["Trap"].mT, given["Angles"][:, :, 0], *biases, zeros, zeros, *[None] * 3, 16
    )
    return scan / 60.0


def test_libraries_are_called_as_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules of the libraries compute the documented results."""
    cross_entropy = torch.nn.functional.cross_entropy
    modules = {
        "liger_kernel.transformers.functional": Module(
            liger_cross_entropy=cross_entropy,
            liger_fused_linear_cross_entropy=lambda x, weight, labels, reduction: cross_entropy(x @ weight.T, labels, reduction=reduction),
        ),
        "fla.modules.fused_linear_cross_entropy": Module(
            fused_linear_cross_entropy_loss=lambda x, labels, weight, reduction: cross_entropy(x @ weight.T, labels, reduction=reduction)
        ),
        "fla.ops.simple_gla": Module(chunk_simple_gla=attend),
        "mamba_ssm.ops.triton.ssd_combined": Module(mamba_chunk_scan_combined=chunked),
        "mamba_ssm.ops.triton.mamba3.mamba3_siso_combined": Module(mamba3_siso_combined=siso),
    }
    monkeypatch.setattr(peers, "import_module", modules.__getitem__)
    installed = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: installed(name) or ModuleSpec(name, None))
    tried = []
    for case in SMALL:
        for library, call in peers.peers(case):
            if case.name.split()[0] in ("cross_entropy", "linear_cross_entropy", "ssd", "mamba3"):
                assert checks.worst_error(case, "cpu", torch.float32, call) < 3e-5, (library, case.name)
                tried.append(library)
    assert sorted(tried) == ["fla"] * 3 + ["liger_kernel"] * 2 + ["mamba_ssm"] * 3


def test_torchs_libraries_are_named_as_torch_has_them() -> None:
    one_width, two_widths = (next(case for case in SMALL if case.name == f"attention {sizes}") for sizes in ("4/2 16/16", "4/4 24/16"))
    by_library = dict(peers.peers(one_width))
    assert by_library.keys() == {"torch flash", "torch cudnn"}
    assert dict(peers.peers(two_widths)).keys() == {"torch cudnn"}
    inputs = one_width.make("cpu", torch.bfloat16)
    assert by_library["torch flash"](**inputs).shape == inputs["q"].shape
    with pytest.raises(RuntimeError):  # no kernel of that library on a CPU, but its name is one
        by_library["torch cudnn"](**inputs)


def test_what_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in SMALL if case.name.startswith("relu2"))
    monkeypatch.setattr(times, "MOST_SECONDS", 0.0)
    lines: list[dict[str, Any]] = []
    times.time_own(case, lines.append, "cpu")
    assert [line["part"] for line in lines] == ["wall", "kernels"]
    assert all(lines[1][key] for key in ("forward_ns", "backward_ns"))
    lines.clear()
    times.time_peer(case, "a library", lambda x: case.call(x) * 1.01, lines.append, "cpu")
    assert [line["failure"] for line in lines] == ["past the tolerance; not timed"]
    with pytest.raises(AttributeError):
        times.time_peer(case, "a library", lambda x: x.no_such_thing, lines.append, "cpu")
