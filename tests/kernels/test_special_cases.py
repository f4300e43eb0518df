"""Promises of single operations that the common checks do not reach: bounded scratch, extremes, refusals, imports, FSDP2."""

import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType

import pytest
import torch
from op_cases import CASES
from op_checks import TOLERANCE, gradients, peak_bytes, rms_ratio
from op_exact import exact_m2rnn, exact_ssd
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import megakernels
from megakernels import (
    add_rms_norm,
    attention,
    causal_conv1d,
    combine,
    cross_entropy,
    decayed_add_,
    dispatch,
    dispatch_plan,
    experts,
    gated_rms_norm,
    indexed_attention,
    linear_cross_entropy,
    m2rnn,
    mamba3,
    mla_kv,
    newton_schulz_,
    rms_norm,
    rope,
    route,
    ssd,
    swiglu,
)
from megakernels.ops.attention import reference as attention_reference
from megakernels.ops.cross_entropy import reference as cross_entropy_reference
from megakernels.ops.linear_cross_entropy import facts as linear_facts
from megakernels.ops.moe import grouped as grouped_products

MEBIBYTE = 1 << 20


def forward_and_backward(call: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
    output = call(*inputs)
    return output, *gradients([output], [tensor for tensor in inputs if tensor.requires_grad], [torch.ones_like(output)])


def test_attention_never_holds_a_score_matrix_of_all_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_reference, "PLAIN_SCORES", MEBIBYTE // 4 // 8)  # 128 KiB of fp32 scores
    q, k, v = (torch.randn(1, 1024, 4, 16, requires_grad=True) for _ in range(3))
    whole_matrix_bytes = 4 * 1024 * 1024 * 4
    assert peak_bytes(lambda: forward_and_backward(lambda q, k, v: attention(q, k, v, 0.25), q, k, v)) < whole_matrix_bytes // 4


def test_attention_blocks_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (torch.randn(2, 90, 4, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    for window in (None, 1, 37):
        whole = forward_and_backward(lambda q, k, v, window=window: attention(q, k, v, 0.3, window), q, k, v)
        with monkeypatch.context() as patch:
            patch.setattr(attention_reference, "PLAIN_QUERIES", 7)
            blocks = forward_and_backward(lambda q, k, v, window=window: attention(q, k, v, 0.3, window), q, k, v)
        assert max(rms_ratio(a, b) for a, b in zip(blocks, whole, strict=True)) < 1e-12


def test_cross_entropy_holds_no_fp32_copy_of_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy_reference, "PLAIN_LOGITS", 1 << 14)
    logits = torch.randn(1024, 1024, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.arange(1024)
    gradient_bytes = logits.numel() * 2
    assert peak_bytes(lambda: forward_and_backward(lambda z: cross_entropy(z, labels), logits)) < gradient_bytes + MEBIBYTE // 2


def test_logits_are_never_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_facts, "LOGITS_SLICE_ELEMENTS", 1 << 14)
    x, labels = torch.randn(256, 16, requires_grad=True), torch.zeros(256, dtype=torch.int64)
    weight = torch.randn(4096, 16)
    peak = peak_bytes(lambda: forward_and_backward(lambda x: linear_cross_entropy(x, weight, labels), x))
    assert peak < 256 * 4096 * x.element_size() // 4


def test_cross_entropy_of_ignored_rows_is_zero_with_zero_gradients() -> None:
    logits = torch.randn(3, 5, requires_grad=True)
    loss, gradient = forward_and_backward(lambda z: cross_entropy(z, torch.full((3,), 7), ignore_index=7), logits)
    assert loss.item() == 0
    assert gradient.count_nonzero() == 0


def test_cross_entropy_of_large_logits_is_finite() -> None:
    loss, gradient = forward_and_backward(
        lambda z: cross_entropy(z, torch.tensor([1])), torch.tensor([[3e38, -3e38, 0.0]], requires_grad=True)
    )
    assert math.isinf(loss.item()) or loss.item() > 1e38
    assert gradient.isfinite().all()


@pytest.mark.parametrize("rate", [1e-4, 1.0, 300.0])
def test_ssd_survives_any_decay(rate: float) -> None:
    """Factors such as exp(c_i) · exp(−c_j) would overflow at the strong end; sums that cancel would lose gradients at the weak one.

    At the strong end running sums reach thousands; a decay made of their differences would have their rounding for its relative error.
    """
    inputs = next(case for case in CASES if case.name == "ssd").make(200, torch.float32)
    with torch.no_grad():
        inputs["A_log"].fill_(math.log(rate))
    wide = {name: value.detach().double().requires_grad_() for name, value in inputs.items()}
    y, exact = ssd(**inputs, chunk_size=64), exact_ssd(**wide)
    found = gradients([y], list(inputs.values()), [torch.ones_like(y)])
    expected = gradients([exact], list(wide.values()), [torch.ones_like(exact)])
    ratios = dict(zip(["y", *inputs], map(rms_ratio, (y, *found), (exact, *expected)), strict=True))
    assert {name: ratio for name, ratio in ratios.items() if not ratio <= TOLERANCE[torch.float32]} == {}


def test_ssd_chunks_do_not_change_the_result() -> None:
    inputs = next(case for case in CASES if case.name == "ssd").make(70, torch.float64)
    whole = ssd(**inputs, chunk_size=70)
    assert max(rms_ratio(ssd(**inputs, chunk_size=size), whole) for size in (1, 7, 64, 500)) < 1e-12


def test_mamba3_chunks_do_not_change_the_result() -> None:
    inputs = next(case for case in CASES if case.name == "mamba3").make(70, torch.float64)
    whole = mamba3(**inputs, chunk_size=70)
    assert max(rms_ratio(mamba3(**inputs, chunk_size=size), whole) for size in (1, 7, 64, 500)) < 1e-12
    assert max(rms_ratio(mamba3(**inputs, chunk_size=7, save_every=size), whole) for size in (1, 7, 20, 500)) < 1e-12


@pytest.mark.parametrize("name", ["mamba3", "mamba3_single", "mamba3_single_unrotated", "mamba3_packed"])
def test_gradients_of_mamba3_are_finite_differences(name: str) -> None:
    """In fp64, across chunks of two positions."""
    inputs = next(case for case in CASES if case.name == name).make(5, torch.float64)
    absent = {each: None for each in ("angles", "mimo_x", "mimo_z", "mimo_o") if each not in inputs}

    def call(*tensors: Tensor) -> Tensor:
        return mamba3(**dict(zip(inputs, tensors, strict=True)), **absent, chunk_size=2, save_every=4, heavy_tail=name == "mamba3_single")

    assert torch.autograd.gradcheck(call, tuple(inputs.values()), fast_mode=True)


def test_mamba3_that_adds_nothing_later_is_mamba2() -> None:
    """One rank, no angles, λ = 1, and the slowest rate where A asks for none."""
    plain = next(case for case in CASES if case.name == "mamba3_single_unrotated").make(40, torch.float64, requires_grad=False)
    inputs = {**plain, "trapezoid": torch.full_like(plain["trapezoid"], 60), "A": torch.zeros_like(plain["A"]).log()}
    inputs |= {name: torch.zeros_like(plain[name]) for name in ("B_bias", "C_bias")}
    y = mamba3(**inputs, angles=None, mimo_x=None, mimo_z=None, mimo_o=None, chunk_size=16)
    A_log = torch.full((4,), math.log(1e-4), dtype=torch.float64)
    B, C = (inputs[name].squeeze(2) for name in ("B", "C"))
    expected = ssd(inputs["x"], inputs["dt"], A_log, B, C, inputs["D"], inputs["dt_bias"], 16) * torch.nn.functional.silu(inputs["z"])
    assert rms_ratio(y, expected) < 1e-12


def test_m2rnn_keeps_slow_states_exact() -> None:
    """At decay 1 − 1e−5 the gain 1 − decay is a difference of nearly equal numbers, so it must be computed directly."""
    inputs = next(case for case in CASES if case.name == "m2rnn").make(65, torch.float32)
    with torch.no_grad():
        inputs["A_log"].fill_(math.log(1e-5))
        inputs["D"].zero_()
    y = m2rnn(**inputs, save_every=16)
    wide = {name: value.detach().double() for name, value in inputs.items()}
    assert rms_ratio(y, exact_m2rnn(**wide)) < 1e-5


def test_dispatch_plan_sorts_stably_and_counts_every_expert() -> None:
    indices = torch.tensor([[3, 0], [0, 5], [3, 5], [5, 0]], dtype=torch.int32)
    rows, counts = dispatch_plan(indices, 7)
    assert rows.tolist() == [1, 2, 7, 0, 4, 3, 5, 6]
    assert counts.tolist() == [3, 0, 0, 2, 0, 3, 0]
    assert rows.dtype == counts.dtype == torch.int32


def test_dispatch_and_combine_are_transposes() -> None:
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randn(12, 4, dtype=torch.float64)
    rows, _ = dispatch_plan(torch.randint(0, 3, (6, 2), dtype=torch.int32), 3)
    assert torch.allclose((dispatch(x, rows, 2) * y).sum(), (x * combine(y, rows, 2)).sum())


def test_a_bf16_expert_layer_uses_the_grouped_product_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = torch.nn.functional.grouped_mm

    def counting(left: Tensor, right: Tensor, offs: Tensor) -> Tensor:
        calls.append(left.shape)
        return original(left, right, offs=offs)

    monkeypatch.setattr(grouped_products, "grouped_mm", counting)
    for name, expected in (("experts_swiglu_16x24", 9), ("experts_swiglu_7x9", 0)):
        case = next(case for case in CASES if case.name == name)
        inputs = case.make(9, torch.bfloat16)
        calls.clear()
        outputs = case.call(inputs)
        gradients(outputs, [inputs[name] for name in case.differentiable(inputs)], [torch.ones_like(outputs[0])])
        assert len(calls) == expected  # three products forward, six backward


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_expert_without_rows_gets_zero_gradients(dtype: torch.dtype) -> None:
    case = next(case for case in CASES if case.name == "experts_swiglu_16x24")
    inputs = case.make(9, dtype)
    outputs = case.call(inputs)
    names = ("gate", "up", "down")
    found = gradients(outputs, [inputs[name] for name in names], [torch.ones_like(outputs[0])])
    empty = (inputs["counts"] == 0).nonzero().flatten()
    assert empty.tolist() == [3]
    assert all(gradient[3].count_nonzero() == 0 and gradient[[0, 1, 2, 4]].count_nonzero() > 0 for gradient in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_rank_without_rows_gets_zero_gradients(dtype: torch.dtype) -> None:
    up, down = torch.ones(2, 8, 16, dtype=dtype, requires_grad=True), torch.ones(2, 16, 8, dtype=dtype, requires_grad=True)
    none = torch.empty(0, dtype=torch.int32)
    y = experts(torch.empty(0, 16, dtype=dtype), torch.empty(0, 2), none, torch.zeros(2, dtype=torch.int32), None, up, down, "relu2")
    assert y.shape == (0, 16)
    assert all(gradient.count_nonzero() == 0 for gradient in gradients([y], [up, down], [torch.ones_like(y)]))


def test_unequal_gradients_of_mla_kv_reach_their_inputs() -> None:
    """A loss that uses the values alone leaves the rotary key without influence."""
    case = next(case for case in CASES if case.name == "mla_kv")
    inputs = case.make(9, torch.float32)
    _, v = case.call(inputs)
    grad_kv, grad_rope = gradients([v], [inputs["kv"], inputs["k_rope"]], [torch.ones_like(v)])
    assert torch.equal(grad_kv[..., 4:], torch.ones_like(v))
    assert grad_kv[..., :4].count_nonzero() == grad_rope.count_nonzero() == 0


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


def small_indexed(top_k: int = 1, rotated: int = 2, index_heads: int = 1) -> Tensor:
    heads, index_q, index_k, table = ones(1, 4, 2, 3), ones(1, 4, index_heads, 5), ones(1, 4, 5), ones(4, rotated)
    tensors = (heads, heads, heads, index_q, index_k, ones(1, 4, 1), ones(5), ones(5), table, table)
    return indexed_attention(*tensors, scale=1.0, top_k=top_k, loss_factor=1.0, eps=1e-5)


def small_mamba3(num_groups: int = 2, rank: int = 1, angles: Tensor | None = None) -> Tensor:
    wide, shared, narrow, bias, scalar = ones(1, 2, 4, 3), ones(1, 2, rank, num_groups, 5), ones(1, 2, 4), ones(4, rank, 5), ones(4)
    return mamba3(wide, wide, shared, shared, narrow, narrow, narrow, angles, bias, bias, scalar, scalar, None, None, None, 8)


NO_ROWS = torch.zeros(2, dtype=torch.int32)
REFUSALS = [
    (lambda: rms_norm(ones(2, 4), ones(3), 1e-5), r"rms_norm: weight must be \[D\].*x = \(2, 4\), weight = \(3,\)"),
    (lambda: add_rms_norm(ones(2, 4), ones(2, 4).double(), ones(4), 1e-5), "add_rms_norm: x and branch must have one shape and dtype"),
    (lambda: gated_rms_norm(ones(2, 4), ones(2, 4), ones(4), 1e-5, 3), "num_groups must divide D; got D = 4, num_groups = 3"),
    (lambda: swiglu(ones(2), ones(3)), "swiglu: gate and up must have one shape"),
    (lambda: rope(ones(1, 4, 1, 2), ones(4, 2), ones(4, 2)), "rope: cos and sin must be .* at most the width; got T = 4, width = 2"),
    (lambda: mla_kv(ones(1, 4, 1, 6), ones(1, 4, 4), ones(4, 1), ones(4, 1), 2), "mla_kv: k_rope must be"),
    (lambda: attention(ones(1, 2, 3, 4), ones(1, 2, 2, 4), ones(1, 2, 2, 4), 1.0), "attention: Hkv must divide Hq; got Hq = 3, Hkv = 2"),
    (lambda: attention(ones(1, 2, 2, 4), ones(1, 2, 2, 4), ones(1, 2, 2, 4), 1.0, 0), "window must be at least 1; got window = 0"),
    (lambda: causal_conv1d(ones(1, 2, 3), ones(2, 4)), "causal_conv1d: x must be"),
    (
        lambda: causal_conv1d(ones(1, 2, 3), ones(3, 4), starts=torch.zeros(1, 2, dtype=torch.int64)),
        r"causal_conv1d: starts must be int32 \[B,T\]; got starts = \(1, 2\), dtype = torch.int64",
    ),
    (
        lambda: ssd(ones(1, 2, 3, 4), ones(1, 2, 3), ones(3), ones(1, 2, 2, 4), ones(1, 2, 2, 4), ones(3), ones(3), 8),
        "ssd: G must divide H",
    ),
    (
        lambda: m2rnn(ones(1, 2, 3), ones(1, 2, 3), ones(1, 2, 3, 4), ones(1, 2, 3), ones(3, 4, 5), ones(3, 4), ones(3), ones(3), 8),
        r"m2rnn: for v \[B,T,H,V\], state_map must be",
    ),
    (lambda: small_indexed(top_k=0), "indexed_attention: top_k must be at least 1; got top_k = 0"),
    (lambda: small_indexed(rotated=3), "indexed_attention: cos and sin must be .* at most D; got T = 4, D = 5"),
    (lambda: small_indexed(index_heads=2), r"indexed_attention: index_q must be .*index_weights \[B,T,I\]"),
    (lambda: small_mamba3(num_groups=3), "mamba3: G must divide H; got H = 4, G = 3"),
    (lambda: small_mamba3(angles=ones(1, 2, 3)), r"mamba3: angles must be \[B,T,N\] with 0 < 2N ≤ S; got angles = \(1, 2, 3\), S = 5"),
    (lambda: small_mamba3(rank=2), "mamba3: mimo_x, mimo_z and mimo_o must be .*, or None where R = 1; got R = 2"),
    (lambda: route(ones(2, 3), ones(4, 3), 5, True), "route: top_k must be in 1 … E; got top_k = 5, E = 4"),
    (lambda: dispatch_plan(torch.zeros(2, 2, dtype=torch.int64), 2), "dispatch_plan: indices must be int32"),
    (lambda: dispatch(ones(2, 3), torch.zeros(3, dtype=torch.int32), 2), "dispatch: x must be"),
    (lambda: combine(ones(3, 3), torch.zeros(3, dtype=torch.int32), 2), "combine: x must be"),
    (
        lambda: experts(ones(2, 3), ones(2, 1), NO_ROWS, NO_ROWS, None, ones(2, 4, 3), ones(2, 3, 4), "swiglu"),
        "experts: swiglu and geglu take a gate, relu2 and gelu take none; got activation = swiglu, gate = None",
    ),
    (lambda: causal_conv1d(ones(1, 2, 3), ones(3, 4), initial=ones(1, 2, 3)), "causal_conv1d: initial must be"),
    (lambda: newton_schulz_(ones(2, 4, 3).mT, 5), r"newton_schulz_: x must be contiguous \[n,rows,cols\]"),
    (lambda: decayed_add_([ones(2, 3)], [ones(2, 4)], ones(), 0.1, [0.1]), r"decayed_add_: tensors must have equal numbers of elements"),
    (lambda: linear_cross_entropy(ones(2, 3), ones(5, 4), NO_ROWS), r"linear_cross_entropy: x must be \[N,h\]"),
    (lambda: linear_cross_entropy(ones(2, 3), ones(5, 3).double(), torch.zeros(2, dtype=torch.int64)), "must have one dtype"),
    (lambda: linear_cross_entropy(ones(2, 3), ones(5, 3), torch.zeros(2, dtype=torch.int32)), "labels must be int64"),
    (lambda: cross_entropy(ones(2, 3), torch.zeros(2, dtype=torch.int32)), "cross_entropy: labels must be int64"),
]


@pytest.mark.parametrize(("call", "message"), REFUSALS, ids=[message.split(":")[0][:30] for _, message in REFUSALS])
def test_inputs_that_do_not_fit_are_refused_with_their_values(call: Callable[[], Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_the_package_imports_without_triton_and_without_loading_it() -> None:
    program = """
import sys
from importlib.machinery import PathFinder
class WithoutTriton:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return None if name == "triton" else PathFinder.find_spec(name, path, target)
sys.meta_path = [WithoutTriton if finder is PathFinder else finder for finder in sys.meta_path]
sys.path[:0] = {paths}
import torch
from megakernels import rms_norm
assert rms_norm(torch.ones(2, 4), torch.ones(4), 0.0).sum() == 8
assert not {{"triton", "megaplan", "megarun"}} & set(sys.modules)
"""
    program = program.format(paths=sys.path)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_name_of_the_package_is_a_function() -> None:
    """`from megakernels import rms_norm` gives the operation, not a module of that name."""
    assert [name for name in megakernels.__all__ if not isinstance(getattr(megakernels, name), FunctionType)] == []


class Block(nn.Module):
    """A little of everything that shards: vectors, matrices, an expert bank."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.linspace(0.5, 1.5, 16))
        self.router = nn.Parameter(torch.sin(torch.arange(4 * 16.0)).view(4, 16))
        self.gate = nn.Parameter(torch.cos(torch.arange(4 * 24 * 16.0)).view(4, 24, 16))
        self.up = nn.Parameter(torch.sin(torch.arange(4 * 24 * 16.0)).view(4, 24, 16))
        self.down = nn.Parameter(torch.cos(torch.arange(4 * 24 * 16.0)).view(4, 16, 24))

    def forward(self, x: Tensor) -> Tensor:
        normed = rms_norm(x, self.norm, 1e-5)
        weights, indices, _ = route(normed, self.router, 2, True)
        rows, counts = dispatch_plan(indices, 4)
        return combine(experts(dispatch(normed, rows, 2), weights, rows, counts, self.gate, self.up, self.down, "swiglu"), rows, 2)


@pytest.fixture
def one_process_group(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process_group")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reshard", [False, True])
def test_a_sharded_module_equals_a_plain_one(dtype: torch.dtype, reshard: bool) -> None:
    plain, sharded = Block(), Block()
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    fully_shard(sharded, reshard_after_forward=reshard, mp_policy=policy)
    x = torch.randn(12, 16, generator=torch.Generator().manual_seed(0))
    sharded(x.to(dtype)).float().square().sum().backward()
    low = plain.to(dtype)
    low(x.to(dtype)).float().square().sum().backward()
    for (name, expected), found in zip(low.named_parameters(), sharded.parameters(), strict=True):
        assert expected.grad is not None
        assert isinstance(found.grad, DTensor)
        assert torch.equal(found.grad.full_tensor(), expected.grad.float()), name
