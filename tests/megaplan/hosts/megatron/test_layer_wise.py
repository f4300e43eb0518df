"""Buffers of Muon's matrices, compared with layouts that Megatron-Core's own function computed."""

import pytest

import megaplan
from megaplan.columns import Column, Phase
from megaplan.errors import MegaplanError
from megaplan.hosts.megatron.layer_wise import Matrix, layout_of
from megaplan.importers.megatron.spec import import_megatron

LAYOUTS: list[tuple[list[tuple[int, int]], int, int, int | None, int, list[int]]] = [
    (
        [(96, 128), (64, 512)],
        4,
        7,
        200000,
        229376,
        [32768, 32768, 32768, 32768, 24576, 12288, 12288],
    ),
    (
        [(1024, 1024), (64, 1024), (64, 100), (1024, 512)],
        7,
        8,
        200000,
        17928192,
        [2097152, 2097152, 1572864, 1048576, 1048576, 1257984, 1198848, 1192448],
    ),
    (
        [(96, 64), (1024, 128), (512, 100), (96, 512)],
        1,
        7,
        None,
        917504,
        [131072, 51200, 49152, 6144, 0, 0, 0],
    ),
    (
        [(257, 128), (128, 100), (1024, 100), (512, 1024), (128, 512)],
        6,
        4,
        None,
        4660736,
        [1048576, 1048576, 1165184, 1165184],
    ),
    (
        [(96, 64), (64, 64), (64, 1024)],
        6,
        2,
        None,
        454656,
        [227328, 227328],
    ),
    (
        [(64, 128), (512, 512), (512, 1024), (128, 128), (96, 64)],
        4,
        2,
        None,
        3268608,
        [1634304, 1634304],
    ),
    (
        [(512, 1024), (96, 512), (512, 1024)],
        7,
        7,
        1000000,
        8028160,
        [1097728, 1097728, 1097728, 1097728, 1097728, 1097728, 1097728],
    ),
    (
        [(257, 512), (512, 64)],
        5,
        4,
        1000000,
        1052672,
        [263168, 197120, 197120, 164352],
    ),
    (
        [(257, 100), (128, 512), (1024, 64), (512, 64)],
        2,
        7,
        None,
        458752,
        [65536, 65536, 65536, 65536, 25700, 25700, 65536],
    ),
    (
        [(64, 64), (64, 100), (128, 128), (257, 128), (1024, 100)],
        2,
        7,
        200000,
        716800,
        [102400, 102400, 32896, 32896, 16384, 16384, 20992],
    ),
]
"""Shapes of a layer, layers, data ranks, bucket size; then elements of the buffer and of each rank's matrices.

Computed with `LayerWiseDistributedOptimizer._compute_per_buffer_param_layout` of Megatron-LM at d98e8a64 under torch 2.13.
"""
WORDS = (
    "--num-layers 6 --hidden-size 256 --ffn-hidden-size 1024 --num-attention-heads 4 --seq-length 256 --max-position-embeddings 256 "
    "--vocab-size 1024 --micro-batch-size 1 --bf16 --optimizer muon --use-distributed-optimizer"
)
PARAMS = Column.TENSOR_PARALLEL_PARAMS, Column.REPLICATED_PARAMS, Column.EXPERT_PARALLEL_PARAMS
EXPERTS = "--num-experts 8 --moe-ffn-hidden-size 128 --expert-model-parallel-size 4 --moe-grouped-gemm"


@pytest.mark.parametrize(("shapes", "layers", "ranks", "bucket", "elements", "shares"), LAYOUTS)
def test_a_layout_is_megatrons(
    shapes: list[tuple[int, int]], layers: int, ranks: int, bucket: int | None, elements: int, shares: list[int]
) -> None:
    matrices = [Matrix(rows * columns, rows * columns * min(rows, columns)) for rows, columns in shapes * layers]
    assert layout_of(matrices, ranks, bucket) == (elements, tuple(shares))


@pytest.mark.parametrize("more", ["", " --overlap-grad-reduce --overlap-param-gather", f" {EXPERTS} --disable-bias-linear"])
def test_padding_is_in_parameters_and_gradients_and_state_is_whole(more: str) -> None:
    """All ranks together step each parameter of their pipeline stage once, and store as much padding in 2 as in 4 bytes per element."""
    padded, dealt = (
        megaplan.estimate(import_megatron(WORDS + more + flag, "launch", ["host.fragmentation_percent=0"], 8).document)
        for flag in ("", " --no-use-layer-wise-param-layout")
    )
    state = Column.MATRIX_OPTIMIZER, Column.OTHER_OPTIMIZER
    totals = [
        sum(len(rank.ranks) * rank.cells[Phase.FORWARD_BACKWARD][column] for rank in found.ranks for column in state)
        for found in (padded, dealt)
    ]
    assert 0 <= totals[1] - totals[0] < 12 * 8 * 8  # Adam's tensors are divided evenly there, with at most one element per rank left over
    grown = [
        sum(padded.worst.cells[Phase.INIT][column] - dealt.worst.cells[Phase.INIT][column] for column in columns)
        for columns in (PARAMS, (Column.GRADIENTS,))
    ]
    assert grown[0] > 0
    assert grown[1] == 2 * grown[0]


@pytest.mark.parametrize("refused", ["--num-distributed-optimizer-instances 2", EXPERTS])
def test_the_layout_is_refused_where_megatron_has_none(refused: str) -> None:
    with pytest.raises(MegaplanError) as caught:
        import_megatron(f"{WORDS} {refused}", "launch", [], 8)
    assert "host.layer_wise_layout" in {item.location.key for item in caught.value.diagnostics}
