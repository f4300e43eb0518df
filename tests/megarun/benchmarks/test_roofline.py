"""The roofline's counts: aten operations and our own against formulas by hand."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megakernels import use_kernels
from megakernels._common import cost
from megaplan.devices import load_device

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))  # rooflines

pytest.importorskip("triton")
from rooflines.aten import kernel_of  # noqa: E402
from rooflines.own import Bodies, Noted  # noqa: E402
from rooflines.work import Kernel, Work  # noqa: E402

pytestmark = pytest.mark.runtime
BF16, FP32, INT32, INT64 = torch.bfloat16, torch.float32, torch.int32, torch.int64
NEITHER = None, None, None
"""No sinks, no classes, no relations."""
UNCAPPED = None, True
"""No cap, and causal."""
SIZES = [Random(seed) for seed in range(4)]


@pytest.fixture(autouse=True)
def fake() -> Iterator[None]:
    use_kernels("triton")
    with FakeTensorMode(), torch.no_grad():
        yield


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def noted(run: Callable[[], Any]) -> list[Kernel]:
    kernels: list[Kernel] = []
    with Noted(kernels):
        run()
    return kernels


def work(name: str, *args: Any) -> Work:
    func = getattr(torch.ops.megakernels, name).default
    return Bodies(load_device("h200")).work_of(func, args, func(*args))


@pytest.mark.parametrize("random", SIZES)
def test_a_product_counts_a_multiply_add_as_two_and_each_operand_once(random: Random) -> None:
    m, n, k = (random.randint(1, 300) for _ in range(3))
    (found,) = noted(lambda: empty(m, k) @ empty(k, n))
    assert found.products == {"bf16": 2 * m * n * k}
    assert (found.num_bytes, found.launches, found.other_flops) == (2 * (m * k + k * n + m * n), 1, 0)
    (found,) = noted(lambda: torch.mm(empty(m, k), empty(k, n), out_dtype=FP32))
    assert (found.products, found.num_bytes) == ({"bf16": 2 * m * n * k}, 2 * (m * k + k * n) + 4 * m * n)


def test_a_grouped_product_counts_each_row_with_one_matrix() -> None:
    rows, matrices, ends = empty(96, 64), empty(4, 64, 32), empty(4, dtype=INT32)
    (found,) = noted(lambda: torch.nn.functional.grouped_mm(rows, matrices, offs=ends))
    assert found.products == {"bf16": 2 * 96 * 64 * 32}


def test_a_library_s_attention_counts_pairs_of_positions_half_of_them_where_it_is_causal() -> None:
    query, key, value = (torch.empty(2, heads, 128, width, dtype=BF16, device="meta") for heads, width in ((8, 96), (2, 96), (2, 64)))
    for causal, share in ((False, 1), (True, 2)):
        func = torch.ops.aten._scaled_dot_product_cudnn_attention.default
        found = kernel_of(func, (query, key, value, None, True, 0.0, causal), {}, query[..., :64].clone())
        assert found is not None
        assert (found.products, found.library) == ({"bf16": 2 * 2 * 8 * 128 * 128 * (96 + 64) // share}, True)
        assert Work("megakernels.attention", (found,)).inside == "library"


def test_what_moves_no_data_is_not_a_kernel() -> None:
    x = empty(8, 6)
    assert noted(lambda: (x.view(6, 8).mT[1:], x.detach(), torch.empty_like(x), x.expand(2, 8, 6), x.contiguous())) == []
    assert noted(lambda: x[2:].copy_(x[2:])) == []


def test_a_slice_that_is_added_to_is_not_copied_onto_itself() -> None:
    """`x[2:] += y` is an addition and a copy of the slice to itself, which torch leaves out; a copy to another slice is one."""
    x, y = empty(8, 6), empty(6, 6)
    assert [each.op for each in noted(lambda: x.__setitem__(slice(2, 8), x[2:].add_(y)))] == ["add_"]
    assert [each.op for each in noted(lambda: x[2:].copy_(x[:6]))] == ["copy_"]


def test_operations_read_and_write_what_they_touch() -> None:
    x, table, index = empty(8, 6), empty(1000, 6), empty(5, dtype=INT64)
    bytes_of = {
        "written over": noted(x.zero_)[0].num_bytes,
        "made like": noted(lambda: torch.zeros_like(x))[0].num_bytes,
        "copied": noted(lambda: x.copy_(empty(8, 6, dtype=FP32)))[0].num_bytes,
        "in place": noted(lambda: x.add_(x))[0].num_bytes,
        "broadcast": noted(lambda: x + empty(1, 6).expand(8, 6))[0].num_bytes,
        "rows read": noted(lambda: torch.nn.functional.embedding(index, table))[0].num_bytes,
        "rows written": noted(lambda: table.index_put_((index,), empty(5, 6)))[0].num_bytes,
        "rows added": noted(lambda: table.index_add_(0, index, empty(5, 6)))[0].num_bytes,
    }
    assert bytes_of == {
        "written over": 96,
        "made like": 96,
        "copied": 96 + 192,
        "in place": 2 * 96,
        "broadcast": 2 * 96 + 12,
        "rows read": 40 + 2 * 60,
        "rows written": 40 + 2 * 60,
        "rows added": 40 + 3 * 60,
    }


def test_a_list_of_tensors_takes_the_launches_that_its_chunks_need() -> None:
    parameters, gradients, first, second = ([empty(65536 * 200, dtype=FP32), empty(10, dtype=FP32)] for _ in range(4))
    (small,) = noted(lambda: torch._foreach_mul_(parameters[1:], 2.0))
    (large,) = noted(lambda: torch._foreach_mul_([*parameters, *parameters], 2.0))
    assert (small.launches, large.launches) == (1, 2)
    steps = [empty(dtype=FP32) for _ in parameters]
    options: dict[str, Any] = {
        "lr": 1e-3,
        "beta1": 0.9,
        "beta2": 0.95,
        "weight_decay": 0.1,
        "eps": 1e-8,
        "amsgrad": False,
        "maximize": False,
    }
    (fused,) = noted(lambda: torch._fused_adamw_(parameters, gradients, first, second, [], steps, **options))
    (of_device,) = noted(
        lambda: torch._fused_adamw_(parameters, gradients, first, second, [], steps, **{**options, "lr": empty(dtype=FP32)})
    )
    assert of_device.launches == fused.launches
    numel = sum(each.numel() for each in parameters)
    assert fused.num_bytes == 28 * numel + 8  # parameter, momentum and variance read and written, gradient read; two step counters


def test_a_number_that_the_host_reads_is_a_wait() -> None:
    kernels = noted(lambda: torch.ops.aten._local_scalar_dense(empty(dtype=FP32)))
    assert [(kernel.op, kernel.syncs) for kernel in kernels] == [("_local_scalar_dense", 1)]
    assert kernel_of(torch.ops.aten.nonzero.default, (empty(4),), {}, empty(4, 1, dtype=INT64)).syncs == 1  # type: ignore[union-attr]


@pytest.mark.parametrize("random", SIZES)
def test_fused_norms_and_activations_move_operands_once(random: Random) -> None:
    rows, width = random.randint(1, 500), 16 * random.randint(1, 200)
    x, weight = empty(rows, width), empty(width)
    norm = work("rms_norm", x, weight, 1e-5, 0.0)
    assert (norm.inside, norm.launches, norm.num_bytes, norm.ideal_bytes) == (
        "triton",
        1,
        *2 * (2 * (2 * rows * width + width) + 4 * rows,),
    )
    swiglu = work("swiglu", x, x.clone())
    assert (swiglu.launches, swiglu.num_bytes) == (1, 3 * 2 * rows * width)
    back = work("swiglu_backward", x.clone(), x, x.clone(), [True, True])
    assert (back.launches, back.num_bytes) == (1, 5 * 2 * rows * width)


@pytest.mark.parametrize("random", SIZES)
def test_convolution_moves_operands_once(random: Random) -> None:
    batch, length, channels = random.randint(1, 3), random.randint(1, 300), 8 * random.randint(1, 40)
    found = work("causal_conv1d", empty(batch, length, channels), empty(channels, 4), empty(channels), None, None, True)
    assert (found.inside, found.launches, found.num_bytes) == ("triton", 1, 2 * (2 * batch * length * channels + 5 * channels))


@pytest.mark.parametrize("random", SIZES)
def test_a_symmetric_product_computes_the_lower_triangle_of_tiles(random: Random) -> None:
    """One step: x xᵀ and its polynomial, of which a triangle of squares is computed, and the product with x."""
    num, squares, side = random.randint(1, 3), random.randint(1, 3), random.choice([128, 256])
    short = 128 if side == 128 else 256 * squares
    long = short + 64 * random.randint(1, 4)
    found = work("newton_schulz_", empty(num, short, long), 1)
    triangle = num * (short // side) * (short // side + 1) * side * side
    assert found.product_flops == {"bf16": triangle * long + num * 2 * short**2 * long, "fp16": triangle * short}


@pytest.mark.parametrize("random", SIZES)
def test_the_scan_computes_its_tiles(random: Random) -> None:
    batch, groups, per_group, chunks = (random.randint(1, 3) for _ in range(4))
    heads, length = groups * per_group, 128 * chunks
    x, keys, numbers = empty(batch, length, heads, 64), empty(batch, length, groups, 128), [empty(heads) for _ in range(3)]
    scan = (x, empty(batch, length, heads), numbers[0], keys, keys.clone(), *numbers[1:], None)
    found = work("ssd", *scan, 128, 0.0, 1e9)
    tiles = batch * heads * length // 64
    scores, values, states = 2 * 64 * 64 * 128, 2 * 64 * 64 * 64, 2 * 64 * 64 * 128
    assert found.product_flops == {
        "bf16": tiles * (scores + values + 3 * states)
    }  # a state of the chunk, then of each tile, and its output
    assert (found.launches, found.steps) == (4, 0)
    saved = empty(batch, chunks, heads, 64, 128)
    back = work("ssd_backward", x.clone(), *scan, saved, 128, 0.0, 1e9, [True] * 7)
    own = tiles * (2 * states + states + 2 * states + 2 * states + 2 * values)  # gradients of states, x, B and C; the tile's own
    shared = batch * groups * length // 64 * (2 + 2) * scores  # for at most 16 heads together: pairs twice, and gradients of B and C
    assert back.product_flops == {"bf16": own + shared}


@pytest.mark.parametrize("random", SIZES)
def test_the_recurrence_is_as_many_dependent_steps_as_positions(random: Random) -> None:
    batch, length, heads = random.randint(1, 3), random.randint(1, 200), random.randint(1, 9)
    q, v, parameters = empty(batch, length, 64), empty(batch, length, heads, 16), [empty(heads, 16), empty(heads), empty(heads)]
    given = (q, q.clone(), v, empty(batch, length, heads), empty(heads, 16, 16), *parameters, None)
    found = work("m2rnn", *given, 64)
    assert (found.steps, found.launches) == (length, 1)
    assert found.product_flops == {"tf32": 3 * 2 * batch * length * heads * 64 * 16 * 16}
    states = empty(batch, -(-length // 64) + 1, heads, 64, 16, dtype=FP32)
    back = work("m2rnn_backward", v.clone(), *given, states, 64, [True] * 8)
    again = min(64, length)  # the segments of the one span, at the same time
    assert (back.steps, back.product_flops) == (length + again, {"tf32": 3 * found.product_flops["tf32"]})


@pytest.mark.parametrize("random", SIZES)
@pytest.mark.parametrize("gated", [False, True])
def test_experts_multiply_each_row_with_every_matrix_and_gather_tokens(random: Random, gated: bool) -> None:
    tokens, slots, hidden, width, num = 16 * random.randint(1, 30), random.randint(2, 4), 64, 96, 8
    x, weights, rows, counts = (
        empty(tokens, hidden),
        empty(tokens, slots, dtype=FP32),
        empty(tokens * slots, dtype=INT32),
        empty(num, dtype=INT32),
    )
    up, down = empty(num, width, hidden), empty(num, hidden, width)
    if gated:
        found = work("routed_experts_gated", x, weights, rows, counts, up.clone(), up, down, None, None, None, "swiglu", None)
    else:
        found = work("routed_experts", x, weights, rows, counts, up, down, None, None, "relu2")
    product = 2 * tokens * slots * hidden * width
    assert found.product_flops == {"bf16": (3 if gated else 2) * product}
    assert found.repeated_bytes == 2 * tokens * (slots - 1) * hidden
    inner = empty(tokens * slots, width)
    if gated:
        given = (x, weights, rows, counts, up.clone(), up, down, None, None, None, inner, inner.clone())
        back = work("routed_experts_gated_backward", x.clone(), *given, "swiglu", None, [*[True] * 5, *[False] * 3])
    else:
        back = work(
            "routed_experts_backward",
            x.clone(),
            x,
            weights,
            rows,
            counts,
            up,
            down,
            None,
            None,
            inner,
            "relu2",
            [*[True] * 4, False, False],
        )
    assert back.product_flops == {"bf16": (6 if gated else 4) * product}
    assert back.repeated_bytes == found.repeated_bytes
    if gated:  # of the biases only that of down is of what is gathered
        biases = empty(num, width), empty(num, width), empty(num, hidden)
        given = (*given[:7], *biases, *given[10:])
        with_biases = work("routed_experts_gated_backward", x.clone(), *given, "swiglu", 7.0, [True] * 8)
        assert with_biases.product_flops == back.product_flops
        assert with_biases.repeated_bytes == 2 * found.repeated_bytes
        assert with_biases.launches == back.launches + 3


def test_products_inside_a_kernel_have_to_be_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(cost.REGISTERED, "megakernels.newton_schulz_.default")
    with pytest.raises(ValueError, match="symmetric_product_kernel use `dot`, but the operation registers no products"):
        work("newton_schulz_", empty(1, 128, 192), 1)


@pytest.mark.parametrize("random", SIZES)
@pytest.mark.parametrize("wide", [False, True])
def test_attention_multiplies_the_pairs_that_see_each_other(random: Random, wide: bool) -> None:
    """Wide heads have a second launch of the key kernel, which makes the scores again."""
    batch, length, groups, shared, window = (random.randint(1, each) for each in (3, 90, 3, 4, 40))
    width, value_width = (192, 128) if wide else (96, 64)
    q, k, v = empty(batch, length, groups * shared, width), empty(batch, length, groups, width), empty(batch, length, groups, value_width)
    found = work("attention", q, k, v, None, 0.1, window, *NEITHER, *UNCAPPED)
    pairs = batch * groups * shared * sum(min(window, position + 1) for position in range(length))
    assert (found.inside, found.launches) == ("triton", 1)
    assert found.product_flops == {"bf16": 2 * pairs * (width + value_width)}
    out, lse = empty(batch, length, groups * shared, value_width), empty(batch, groups * shared, length, dtype=FP32)
    back = work("attention_backward", out.clone(), q, k, v, None, *NEITHER, out, lse, 0.1, window, *UNCAPPED, [*[True] * 3, False, False])
    keys = 3 * width + 2 * value_width if wide else 2 * width + 2 * value_width
    assert back.launches == (3 if wide else 2)
    assert back.product_flops == {"bf16": 2 * pairs * (2 * width + value_width + keys)}


def test_attention_of_pieces_multiplies_the_pairs_of_its_queries() -> None:
    """Two ranks: the first has the pieces 0 and 3, the second 1 and 2. Together they have all pairs."""
    length, total = 40, 0
    for pieces in ([0, 3], [1, 2]):
        q, k = empty(1, 2 * length, 4, 64), empty(1, 4 * length, 2, 64)
        found = work("attention_pieces", q, k, k.clone(), None, 0.1, None, *NEITHER, *UNCAPPED, pieces, [0, 3, 1, 2])
        total += found.product_flops["bf16"]
    positions = 4 * length
    assert total == 2 * 4 * positions * (positions + 1) // 2 * (64 + 64)


@pytest.mark.parametrize("random", SIZES)
def test_indexed_attention_multiplies_visible_pairs_and_scores_them_in_fp32(random: Random) -> None:
    """Scores once forward and three times backward, each as three TF32 products; their gradients in bf16."""
    batch, length, heads, index_heads = (random.randint(1, each) for each in (3, 90, 4, 5))
    width, value_width, index_width = 96, 64, 64
    q, k, v = (empty(batch, length, heads, each) for each in (width, width, value_width))
    index = empty(batch, length, index_heads, index_width), empty(batch, length, index_width), empty(batch, length, index_heads)
    table = empty(length, 16, dtype=FP32), empty(length, 16, dtype=FP32)
    given = (q, k, v, *index, empty(index_width), empty(index_width), *table, None)
    pairs = batch * length * (length + 1) // 2
    scores = 2 * pairs * index_heads * index_width
    found = work("indexed_attention", *given, 0.1, 8, 1.0, 1e-5, None, None)
    assert found.inside == "triton"
    assert found.product_flops == {"bf16": 2 * pairs * heads * (width + value_width), "tf32": 3 * scores}
    made = (
        empty(batch, length, heads, value_width),
        *(empty(*each, dtype=FP32) for each in ((batch, heads, length), *[(batch, length)] * 2)),
    )
    back = work("indexed_attention_backward", made[0].clone(), *given, None, *made, 0.1, 8, 1.0, 1e-5, None, [*[True] * 8, False])
    attended = 2 * pairs * heads * (5 * width + 3 * value_width)  # the gradients, and the sum of attention over heads
    assert back.product_flops == {"bf16": attended + 2 * scores, "tf32": 3 * 3 * scores}


def test_an_operation_that_is_plain_torch_on_cuda_counts_as_all_that_it_runs() -> None:
    """Heads that no library and no kernel accepts."""
    q, k = empty(2, 128, 4, 320), empty(2, 128, 2, 320)
    found = work("attention", q, k, k.clone(), None, 0.125, None, *NEITHER, *UNCAPPED)
    assert found.inside == "torch"
    # two blocks of 64 queries against 64 and 128 keys, scores and values, in fp32
    assert found.product_flops == {"fp32": 2 * 2 * 2 * 4 * 64 * 320 * (64 + 128)}
    assert found.launches > 10
    assert found.num_bytes > found.ideal_bytes


def test_head_and_loss_multiply_three_times_backward_and_read_logits_in_place() -> None:
    x, weight, labels = empty(64, 128), empty(1000, 128), empty(64, dtype=INT64)
    found = work(
        "linear_cross_entropy_backward", empty(dtype=FP32), x, weight, labels, empty(64, dtype=FP32), -100, 0.0, "", "e4m3", [True, True]
    )
    assert found.product_flops == {"bf16": 3 * 2 * 64 * 128 * 1000}
    assert found.repeated_bytes == 2 * 64 * 1000


def test_the_kernels_of_a_plan_decide_what_runs() -> None:
    x, weight = empty(4, 64), empty(64)
    use_kernels("reference")
    assert work("rms_norm", x, weight, 1e-5, 0.0).inside == "torch"
    use_kernels("triton")
    assert work("rms_norm", x, weight, 1e-5, 0.0).inside == "triton"
