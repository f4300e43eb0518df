"""Published runs with and without low precision, and the difference by the estimate: docs/reference/low-precision.md.

python benchmarks/low_precision_pairs.py [--check]     with --check: nothing written, exit 1 if the page would change
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pages import write_page

import megaplan
from megaplan.low_precision import GENERATIONS, Recipe

PAGE = Path(__file__).resolve().parents[1] / "docs/reference/low-precision.md"
GIB, GB, MIB = 2**30, 10**9, 2**20
TE = "Transformer Engine, `performance_considerations.rst` at d0067d0d"
TORCHAO = "torchao 0.18, `torchao/float8/README.md`"
CPPMEGA = "DatasunriseOU/cppmega at d57d1c1, `docs/fp8_optimization_session_2026_04_13.md`"
RECOMPUTED = ("moe_act", "mlp", "mla_up_proj")
TRAINED_SECTION = """## What megarun trains

`fp8_current` (one scale per matrix) and `fp8_rowwise` (one scale per row and column of a product), for the linears and the expert banks
of the layers that `families` and `first_last_bf16` cover. Embeddings, routers, the sparse indexer and
prediction depths stay in 16 bits, and without `head` and `attention` so do the output head and the attention core.
If `precision.families` gives a layer another dtype than `params`, its linears multiply in eight bits if that dtype is bf16; in fp32 and
fp16 they are plain products of that dtype, and `estimate --explain` lists them.
Inputs and weights are e4m3. Gradients of outputs are e5m2 under fp8_current and e4m3 under fp8_rowwise, as in torchao, unless `format`
states another format; all three products of a linear multiply in 8 bits. Scales are powers of two ([decision
14](../decisions/0014-powers-of-two-as-scales.md)).

`fp8_delayed` is Transformer Engine's DelayedScaling, for the same linears and banks: before a matrix is rounded, it is multiplied by a
factor that follows from its largest magnitudes in earlier steps. The factor is the format's largest number divided by the largest magnitude
of `amax_history` steps (`amax_compute: max`) or of the last step (`most_recent`), and by 2 to the power `margin`. It is not a power of two.
Elements beyond the format's largest number are clamped to it. Inputs, weights and output gradients of each product have separate factors,
which are 1 in the first step; a bank has one factor for its matrices and one for its rows, as under fp8_current.

Factors are updated once per step, after the optimizer's update, so all microbatches of a step, including their recompute, use equal
factors. Transformer Engine updates factors after each autocast region and keeps casts of weights over microbatches; megarun repeats these
casts. Largest magnitudes are reduced in one collective over all ranks of a stage,
so a layout rounds as one process does. A rank keeps 12 · (`amax_history` + 3) bytes for each weight, in `activations`; histories and
factors are in checkpoints, and a run continues bitwise under the same plan, or with other cuts and data ranks. A history of another
length, or of another recipe, begins again (MP679). Evaluations and skipped steps do not change histories. Triton kernels
read a matrix once, since its scale is known ([decision 47](../decisions/0047-delayed-scaling.md)).

All products of an expert bank are in 8 bits: the forward products and the gradients of rows and matrices. The bank's gradients are e4m3
whatever the value of `format`, since torch's scaled grouped product accepts nothing else. That product returns bf16 on Hopper; with other
dtypes
and generations each expert has its own product. Under fp8_current the bank's matrices share one scale, and so do its rows. Under
fp8_rowwise each row of a matrix has a scale; if a product sums over rows, each column has a scale instead, separately for each expert.
Widths of experts
are multiples of 16 (MP508). Tokens are quantised once, and their copies are gathered for each expert. On one rank the tokens are kept in
16 bits, since the router keeps them anyway, and are quantised again in backward. No other operation keeps the rows from other ranks, so the
bank keeps their transposed 8-bit copy, which the weight gradients multiply; each expert's rows are padded to a multiple of 16, at least 16.
Under
selective recompute, which runs the bank again, the rows are kept.

On a GPU the products are torch's scaled matmul; on a CPU they are fp32 products of the same 8-bit values, so that parity, ledger and trace
run everywhere. Linears with the same input share its 8-bit copy, which is kept for the weight gradients with its scales, in place of the
input. If another operation keeps the input in 16 bits anyway (attention its output, the router its tokens), or if two calls read it (the
down projections of latent attention), the input itself is kept once and quantised again in backward. The same holds for a norm that layers
share (`model.parallel_layers`): each keeps its own copy, unless one of them keeps the norm in 16 bits. A weight is gathered in 16
bits, and its 8-bit copy exists while one product runs, unless `param_gather` gathers it packed. Under TP tokens are gathered in 16 bits in
forward, and as 8-bit copies in backward. Widths that are not multiples of 16 are padded inside the products.

The estimate counts all of these tensors, and a trace finds the same bytes: kept copies and scales are in `activations`, gathered copies in
`communication`, and copies inside a product in `workspace`, together with the scratch of making a copy. That scratch is the maxima of
tiles of 128 × 128 with Triton kernels (`host.kernels: triton`), and in plain torch the slice of at most 4 Mi elements that is being scaled.
Intermediates of plain torch inside a bank are not counted, as for a bank in 16 bits.

200 steps of the demo's model in bf16, with its batch of 4,096 tokens, against the same without a recipe: the mean loss of the last 20
steps differs by +0.66 % under fp8_rowwise and by +0.10 % under fp8_current, and with banks of experts in 16 bits by +0.19 % and +0.44 %;
a slow test requires at most 1 % for the first two. With batches of 512 tokens and banks in 16 bits it was +0.7 % and +1.5 %, which is no
more than the variation of the difference between windows of 20 steps.

`mxfp8`, `nvfp4` and `fp8_blockwise` are emulated, for the same linears and banks: operands have the formats' exact values, as Transformer
Engine defines them, and products are in fp32. MXFP8 has blocks of 32 elements along the summed dim and scales that are powers of two,
rounded up. NVFP4 has blocks of 16 with scales in e4m3 and a factor of the matrix; weights share a scale among 16 x 16 elements, operands of
weight gradients are transformed by a Hadamard matrix over 16 tokens, and output gradients are rounded stochastically. The random bits are a
hash of an element's place and the matrix' largest magnitude, so that a recomputed or resumed step rounds in the same way. Blocks of
fp8_blockwise have 128 elements (in a weight 128 x 128) and fp32 scales that are powers of two. A copy that a product keeps for its backward
has the size of the real format: its elements, and one scale per block of tokens. Rows that other ranks have sent to a bank are kept in 16
bits. Inside a product the operands are fp32; the estimate counts them, but such a step has no step time.

With four layers of the demo's model (AMED) and batches of 512 tokens, 200 steps end in a mean loss of the last 20 of 3.557 in bf16 (7.123
in the first 20), 3.541 (-0.45 %) under mxfp8, 3.568 (+0.33 %) under nvfp4 and 3.559 (+0.05 %) in fp16; a slow test requires at most 1 %,
and 2 % under nvfp4: `pytest tests/megarun/training/test_low_precision.py -k near_that_of_bf16`. MEGAPLAN_LOSS_RUNS=DIR keeps its runs.
Of later runs, against 3.539 in bf16: 3.558 (+0.54 %) under fp8_blockwise, 3.535 (-0.11 %) under mxfp8 and 3.565 (+0.72 %) under fp8_rowwise
with the head, and 3.552 (+0.37 %) under fp8_current with attention; 3.541 (+0.04 %) under fp8_delayed, against 3.540; the test
requires at most 1 %.

With `param_gather` a rank packs its shard of a weight of these linears, and FSDP2 gathers the rows of bytes: elements, and after them
the scales of their blocks, per element 1 byte under fp8_delayed, fp8_current, fp8_blockwise and fp8_rowwise (and 4 bytes per row), 1.03
under mxfp8 and 0.56 under nvfp4. Under fp8_delayed factors are known before a gather, and no maxima are exchanged for it. A shard is
rounded to `params` first, so the gathered weights are bit by bit those that a product would make of a weight gathered in 16 bits, or in
fp32 with `params: fp32`. There is no copy of the weight with 16 bits. A weight is packed if each shard consists of whole blocks: the rows
of a shard, and its columns, must be a multiple of 32 under mxfp8 and of 16 under nvfp4. The matrices of a bank of experts are packed as the
rows of
all its experts, of which each has whole blocks, too. Other weights are gathered as without the key, and so are layers of `first_last_bf16`,
norms, routers and all other parameters that the recipe does not cover. A larger width or a smaller `dp_shard` can give shards whole blocks.
`estimate --explain` lists the weights that are packed and those that are not, with the reason. Weights that no other rank shares are not
gathered, and nothing changes for them.

With `attention`, under fp8_current, the dot products of the attention core have eight-bit operands in the layers that the recipe covers.
Queries, keys, values, the output's gradient and the gradient of scores have one scale each, and the softmax weights have a constant factor
of 2^8; softmax is in fp32 ([decision 43](../decisions/0043-attention-and-head-in-a-recipes-bits.md)). The core keeps queries, keys and
values in eight bits and the log-sum-exp. It does not keep its output; the output projection keeps an 8-bit copy of it. Plain torch computes
it in fp32 on every
device, in blocks of queries, and such a step has no time. Sinks, relation bias, indexers, context parallelism and other recipes are
refused with it (MP905); prediction depths' attention stays in 16 bits.

With `head` the output head's three products are in the recipe's format, under every recipe that is trained, and so are those of prediction
depths, which share the head; in Transformer Engine the head is a linear like others. A tied head quantises the embedding's matrix. Its
input is kept in 16 bits
and quantised again in backward. If head and loss are one operation (`host.kernels: triton`), the rows are quantised once per pass, and a
slice of the weight and of the logits' gradient is quantised for each product. A slice has a multiple of 128 words; formats with one scale
per matrix use one scale per slice. With `vocab_parallel` each rank quantises its words.

Under mxfp8 the forward and the gradient of the input multiply different copies of a weight: with blocks along the columns, and along the
rows. As in Transformer Engine, the gather in forward brings the first copy and the gather in backward the second. One gather brings both,
2.06 bytes per element, if it serves both products: with `reshard_after_forward: false`, `reshard_size`, recompute of the layer's family, or
a pipeline. NVFP4's weights
share scales among 16 x 16 elements, so one copy serves both. The largest magnitudes of weights, on which scales of fp8_current and nvfp4
depend, are found once a step, by one all-reduce of a number per weight and stage.

Under fp8_blockwise the all-reduce has a number for each block of 128 x 128. So shards may divide blocks, and every weight is packed,
whatever the number of its rows. Each rank computes the scales from these numbers and gathers only elements.

Under fp8_rowwise the two products also multiply different copies. The copy for the forward is scaled by rows, and these scales follow the
elements of each row. The copy for the input's gradient is scaled by columns, but no shard has all rows of a column. The all-reduce
therefore has one number per column of a weight, 4 bytes each, which a rank keeps; a gather in backward brings elements with these scales.
One gather brings both copies, 2 bytes per element, in the same cases as above. A bank has such numbers for each expert's matrix under
fp8_rowwise, fp8_blockwise and nvfp4, and one under fp8_current, as its
grouped products have scales.

Refused: `attention` with other recipes than fp8_current (MP905); `--compile` (MP625). Under a schedule that splits the backward, W computes
the weight gradients of linears from the kept copies ([pipelines](../concepts/pipelines.md#a-split-backward)).
"""


@dataclass(frozen=True)
class Pair:
    """One pair; sizes in `unit` bytes.

    Attributes:
        name: Name of the run.
        source: Publisher of the run.
        unit: Bytes of a unit, and its name.
        before: Measured without.
        after: Measured with.
        change: Bytes that the estimate adds; negative where it saves.
        note: Remark on how the run was estimated.
    """

    name: str
    source: str
    unit: tuple[int, str]
    before: float
    after: float
    change: float
    note: str

    @property
    def error(self) -> float:
        """Percent of the total by which the predicted difference misses."""
        return 100 * (self.change / self.unit[0] - (self.after - self.before)) / self.before


def pairs() -> Iterator[Pair]:
    """All published pairs whose run is described well enough to estimate it."""
    recipe, side = Recipe("fp8_current", "blackwell"), 1024
    linear = recipe.both_bytes(side, side, weight=True) + recipe.columnwise_bytes(side, side) - 2 * side * side
    note = "a copy of the weight more, the saved input in 8 bits; on Hopper the weight's transpose would add 1 MiB"
    yield Pair("one linear of 1024 × 1024, Blackwell", TE, (MIB, "MiB"), 6.00, 6.02, linear, note)
    hopper, rows = Recipe("fp8_rowwise", "hopper"), 8192
    largest = hopper.rowwise_bytes(rows, 14336) + hopper.rowwise_bytes(4096, 14336, weight=True)
    note = "its linear saves input and weight in 16 bits, so only the copies of the largest product, made while it runs, are new"
    yield Pair("Llama-3-8B on 8 H100", TORCHAO, (GB, "GB"), 47.65, 47.77, largest, note)
    inferred = "attention, experts and prediction in 8 bits, mixers in 16: inferred from the 5 GiB that gathered parameters save"
    note = f"{inferred}; recompute as in the next rows, as far as delayed scaling allows it, since the source states none"
    delayed = nam56r(6, "fp8_delayed", recomputed=RECOMPUTED[1:])
    yield Pair("NAM56R on 8 H200, batch 6, delayed", CPPMEGA, (GIB, "GiB"), 112, 112, delayed, note)
    gathered = nam56r(6, "fp8_delayed", param_gather=True, recomputed=RECOMPUTED[1:])
    yield Pair("the same with parameters gathered in 8 bits", CPPMEGA, (GIB, "GiB"), 112, 107, gathered, note)
    for batch, before, after in ((8, 110, 104), (10, 128, 119)):
        change = nam56r(batch, "fp8_current", recomputed=RECOMPUTED)
        yield Pair(f"NAM56R on 8 H200, batch {batch}, current, recompute", CPPMEGA, (GIB, "GiB"), before, after, change, inferred)


def nam56r(batch: int, name: str, *, param_gather: bool = False, recomputed: tuple[str, ...] = ()) -> int:
    """Change that a recipe makes to the peak of NAM56R's attention, experts and prediction modules under Megatron-Core."""
    peaks = [
        megaplan.estimate(_nam56r(batch, recipe, recomputed)).worst.allocated_bytes
        for recipe in (None, {"name": name, "param_gather": param_gather})
    ]
    return peaks[1] - peaks[0]


def _nam56r(batch: int, recipe: dict[str, Any] | None, recomputed: tuple[str, ...]) -> dict[str, Any]:
    return {
        "format": "megaplan.spec/1",
        "name": "nam56r-attention-and-experts",
        "model": {
            "pattern": "A" * 13 + "E" * 22,
            "num_layers": 35,
            "hidden_size": 3584,
            "vocab_size": 65536,
            "attention": {
                **{"kind": "mla", "num_heads": 28, "q_lora_rank": 64, "kv_lora_rank": 64},
                **{"qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64},
            },
            "moe": {"num_experts": 16, "top_k": 4, "ffn_hidden_size": 896, "shared_ffn_hidden_size": 1024, "activation": "relu2"},
            "features": {"mtp": {"depth": 1, "ffn_hidden_size": 18944, "activation": "relu2"}},
        },
        "mesh": {"dp_shard": 8},
        "schedule": {"kind": "1f1b", "num_microbatches": 1},
        "batch": {"micro_batch_size": batch, "seq_length": 4096},
        "optimizer": {"matrix": "adamw"},
        "precision": {"recipe": recipe},
        "host": {
            **{"name": "megatron", "cross_entropy": "te", "attention_mask": False, "hidden_dropout": 0.0, "attention_dropout": 0.0},
            **{"moe_dispatcher": "alltoall", "moe_grouped_gemm": True, "recompute_modules": list(recomputed)},
        },
    }


def page() -> str:
    """The page."""
    lines = [
        "# Low precision: what grows and what shrinks",
        "",
        "`benchmarks/low_precision_pairs.py` writes this page. With `precision.recipe`, linears multiply in 8 or 4 bits, and activations",
        "between them stay in 16. Memory is not simply halved. Some tensors are added: each 16-bit weight gets copies that stay",
        "for the step, and",
        "under Megatron-Core's delayed scaling so do attention outputs and the inputs of routers and shared experts, which other",
        "operations keep in 16 bits. Others",
        "shrink: an input that only a linear keeps, and with `param_gather` the weights themselves.",
        "",
        "## Bytes of an element",
        "",
        "Bytes per element of a 4096 × 4096 matrix, with its scales: the row-wise copy, both copies, and the saved input alone.",
        "",
        "| Recipe | Generation | Row-wise | Both | Saved input |",
        "|---|---|---|---|---|",
    ]
    lines += [
        _bytes_line(name, generation) for name in GENERATIONS for generation in ("hopper", "blackwell") if generation in GENERATIONS[name]
    ]
    lines += [
        "",
        *TRAINED_SECTION.splitlines(),
        "",
        "## Published pairs",
        "",
        "Runs that were published with and without low precision, everything else equal. *Estimated* is the change by the estimate, *miss*",
        "its distance from the measured change in percent of the whole. Figures are as published, so most are whole GiB.",
        "",
        "| Run | Without | With | Estimated | Miss % | How |",
        "|---|---|---|---|---|---|",
    ]
    found = list(pairs())
    lines += [
        f"| {one.name} | {one.before:g} {one.unit[1]} | {one.after:g} {one.unit[1]} | {one.change / one.unit[0]:+.2f} {one.unit[1]} "
        f"| {one.error:+.2f} | {one.note} |"
        for one in found
    ]
    sources = "; ".join(dict.fromkeys(one.source for one in found))
    lines += [
        "",
        f"Sources: {sources}.",
        "",
        "Not estimated: marin-community/marin, issue 4311, on GH200, 65.95 GiB without and 71.37 GiB with; its model and batch are not",
        "stated with the figures, and its compiler decides which copies exist.",
        "",
        "Megatron-Core's own runs in fp8 are among the [replayed measurements](accuracy-megatron.md).",
        "",
    ]
    return "\n".join(lines)


def _bytes_line(name: str, generation: str) -> str:
    recipe, side = Recipe(name, generation), 4096  # type: ignore[arg-type]  # a key of GENERATIONS
    sizes = (recipe.rowwise_bytes(side, side), recipe.both_bytes(side, side), recipe.columnwise_bytes(side, side))
    return f"| {name} | {generation} | {' | '.join(f'{size / side**2:.4f}' for size in sizes)} |"


def main() -> int:
    """Write the page, or compare it."""
    return write_page(PAGE, page())


if __name__ == "__main__":
    sys.exit(main())
