"""The attention core: FLOPs of visible pairs at a rate that is lower with few query blocks.

Or unfused attention, which writes the scores of all pairs to memory.
"""

from typing import Any

from megakernels.ops.attention.facts import AttentionSizes
from megaplan.blocks.work import OpWork
from megaplan.cost.step.gemm import quality
from megaplan.cost.step.ledger import BACKWARD, FORWARD, AttentionCore, Drawn, Ledger, Product
from megaplan.cost.step.workload import TimedStep

BLOCK_ROWS = 128
DOCUMENT_WASTE = BLOCK_ROWS
"""Additional keys per document that are computed because kernels compute whole blocks on the diagonal."""
WINDOW_WASTE = 1.5
"""Ratio of the pairs that whole blocks compute to the pairs inside a window."""
SCORE_BYTES = 2.0
"""Bytes of a score that a product reads or writes."""
WIDTHS = {1: (16, 32, 64, 128), 2: (32, 64, 96, 128, 160, 192, 224, 256)}
"""Head widths of FlashAttention's kernels, by generation; a head between two of them is padded to the wider one."""
NARROW, WIDE_BACKWARD = 0.88, 0.83
"""Shares of the rate with head widths outside 100 to 200, and of backward with keys wider than 160."""

DRAWN = 9.8e9, 4.1e9
"""Random numbers that a multiprocessor draws in a second in forward and backward of FlashAttention: the time that dropout adds on an A100
with sequences of 4,096 to 65,536 (arXiv:2205.14135, tables 15, 16, 18 and 19; 9.6 to 10.1 and 3.9 to 4.3)."""
DRAWN_LATER = 2.0
"""Ratio to those rates since FlashAttention-2, and in cuDNN: 8 of a Philox call's 128 bits per random number instead of 16.

NVIDIA/TransformerEngine issues 3312 and 3313 measured 0.020 to 0.045 ms more with dropout on H200, GB200 and B300; this gives 0.036 to
0.044.
"""


def attention_seconds(flops: Any, blocks: Any, width: Any, num_sms: Any, rate: Any, spread: Any) -> Any:
    """Seconds of an attention kernel: F / (R · w · b / (b + c · SMs)).

    Args:
        flops: F.
        blocks: b, query blocks of 128 rows times heads.
        width: w, share of the rate at these head widths.
        num_sms: Number of multiprocessors.
        rate: R, reached FLOPs per second with many blocks.
        spread: c, blocks per multiprocessor that are lost because causal blocks have unequal work.

    Source: the form fitted to MooreThreads/SimuMax's sdp_fwd and sdp_bwd tables, A100 and B200.
    """
    return flops / (rate * width * blocks / (blocks + spread * num_sms))


def drawn_seconds(numbers: Any, num_sms: Any, rate: Any) -> Any:
    """Seconds of the random numbers of dropout in a fused kernel, n / (r · SMs), which products do not hide.

    Args:
        numbers: n, one for each visible score.
        num_sms: Number of multiprocessors.
        rate: r, random numbers per second of one multiprocessor.

    Source: arXiv:2205.14135, tables 15, 16, 18 and 19.
    """
    return numbers / (num_sms * rate)


def core(ledger: Ledger, work: TimedStep, op: OpWork, sizes: AttentionSizes, again: float) -> None:
    """Add forward and backward of the core for the heads and queries of a rank; backward runs forward `again` times.

    A query sees the positions of its own packed document only, or those of its window if the window is shorter. Unfused attention
    multiplies all pairs.
    """
    if work.software.unfused_attention:
        _unfused(ledger, work, sizes, again)
        return
    document, positions = work.batch.document, sizes.batch * sizes.queries
    waste = WINDOW_WASTE if sizes.window is not None else 1.0
    if document:
        waste = min(waste, (document + DOCUMENT_WASTE) * positions / 2 / sizes.visible())
    waste *= padded(work, sizes.width) / sizes.width
    blocks = positions * sizes.heads / BLOCK_ROWS
    width = 1.0 if 100 <= padded(work, sizes.width) <= 200 else NARROW
    forward = AttentionCore(FORWARD, 0, op.work.forward * positions * waste, blocks, width, work.machine.num_sms, 1.0)
    ledger.attention.append(forward)
    if again:
        ledger.attention.append(forward._replace(run=BACKWARD, times=again))
    width *= WIDE_BACKWARD if sizes.width > 160 else 1.0
    flops = op.work.input_grad * positions * waste
    ledger.attention.append(AttentionCore(BACKWARD, 1, flops, blocks, width, work.machine.num_sms, 1.0))
    if work.software.attention_dropout:
        numbers = forward.flops / (2 * (sizes.width + sizes.value_width)) / (padded(work, sizes.width) / sizes.width)
        first = work.software.modules is not None and (work.software.flash or 1) == 1
        ahead, back = (rate * (1.0 if first else DRAWN_LATER) for rate in DRAWN)
        ledger.drawn += [Drawn(FORWARD, numbers, ahead), Drawn(BACKWARD, numbers, back), Drawn(BACKWARD, again * numbers, ahead)]


def padded(work: TimedStep, width: int) -> int:
    """Width of a head in FlashAttention's products if the running generation is known; else the head's width."""
    if work.software.modules is None:
        return width
    return next((each for each in WIDTHS[work.software.flash or 1] if each >= width), width)


def score_bytes(run: int, *, dropped: bool) -> float:
    """Bytes per score that softmax and dropout of a pass move; the mask has one byte."""
    return (6.0 if run == BACKWARD else 4.0) + (5.0 if dropped else 0.0)


def _unfused(ledger: Ledger, work: TimedStep, sizes: AttentionSizes, again: float) -> None:
    """Add the products of full score matrices, and softmax and dropout between them, by the bytes that each moves.

    Source: `CoreAttention` of megatron/model/transformer.py in NVIDIA/Megatron-LM; arXiv:2205.05198, section 4.
    """
    rows, keys, value = sizes.batch * sizes.heads * sizes.queries, sizes.keys, sizes.value_width
    scores, dropped = float(rows) * keys, work.software.attention_dropout

    def product(run: int, columns: int, depth: int, width: int, times: float = 1.0) -> None:
        shape = quality(rows, columns, work.machine.num_sms)
        ledger.products.append(Product(run, "bf16", 2 * scores * width, SCORE_BYTES * scores, shape, depth, times))

    for run, times in ((FORWARD, 1.0), (BACKWARD, again)):
        if times:
            product(run, keys, sizes.width, sizes.width, times)
            product(run, value, keys, value, times)
            ledger.move(run, times * score_bytes(FORWARD, dropped=dropped) * scores, "scores")
    product(BACKWARD, keys, value, value)
    product(BACKWARD, value, sizes.queries, value)
    product(BACKWARD, sizes.width, keys, sizes.width)
    product(BACKWARD, sizes.width, sizes.queries, sizes.width)
    ledger.move(BACKWARD, score_bytes(BACKWARD, dropped=dropped) * scores, "scores")
