"""The formula of every column: the text of `megaplan explain COLUMN`."""

from dataclasses import dataclass

from megaplan.columns import Basis, Column


@dataclass(frozen=True, slots=True)
class ColumnFormula:
    """Formula of a column.

    Attributes:
        holds: Contents of the column.
        formula: Formula with the spec's keys and the field's symbols.
        units: Unit of the result.
        source: Source of the rule.
        example: Example with numbers.
        basis: Exact if every term is counted from shapes.
    """

    holds: str
    formula: str
    units: str
    source: str
    example: str
    basis: Basis = Basis.EXACT


_SHARD = "Σ over tensors of ceil(d0 / n) · (elements / d0) · bytes(precision.master)"

FORMULAS: dict[str, ColumnFormula] = {
    Column.REPLICATED_PARAMS: ColumnFormula(
        "Resident shards of parameters that TP and EP do not shard: embeddings, head, norms, routers, latent down projections.",
        f"{_SHARD}, n = mesh.dp_shard; d0 is the tensor's first dim",
        "bytes",
        "torch/distributed/fsdp/_fully_shard/_fsdp_param.py, `_init_sharded_param`",
        "head [65536, 3584], dp_shard 4, fp32: 65536 / 4 · 3584 · 4 = 234,881,024 B",
    ),
    Column.TENSOR_PARALLEL_PARAMS: ColumnFormula(
        "Resident shards of parameters that TP divides, whatever tp is.",
        f"{_SHARD}, shapes after division by mesh.tp, n = mesh.dp_shard",
        "bytes",
        "arXiv:1909.08053, section 3",
        "up_proj [14336, 4096], tp 8, dp_shard 8, fp32: 1792 / 8 · 4096 · 4 = 3,670,016 B",
    ),
    Column.EXPERT_PARALLEL_PARAMS: ColumnFormula(
        "Resident shards of routed experts.",
        f"{_SHARD}, E / mesh.ep experts of width F / mesh.etp, n = dp_shard · cp · tp / (ep · etp); d0 counts the rows of all of them",
        "bytes",
        "docs/reference/kernels.md, `experts`",
        "up_proj [16, 896, 3584], ep 4, dp_shard 8, fp32: n = 2, 4 / 2 · 896 · 3584 · 4 = 25,690,112 B",
    ),
    Column.GRADIENTS: ColumnFormula(
        "Whole gradients while microbatches accumulate under a pipeline, gradient shards after their reduction, and the gradients of the"
        " block whose backward runs.",
        "pipeline: Σ elements · bytes(precision.grads) from a chunk's first backward to its last, then padded shards;"
        " without one: padded shards; with one data rank, or sharding.mode ddp, whole gradients always;"
        " plus elements · bytes(precision.params) of the running block",
        "bytes",
        "torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, `post_backward`; torch/distributed/pipelining/stage.py",
        "1.00 B parameters on a stage, pp 2, fp32: 4,000,000,000 B in backward, 1,000,000,000 B as shards of dp_shard 4",
    ),
    Column.MATRIX_OPTIMIZER: ColumnFormula(
        "State of the matrix group: Muon's momentum, one value per element; two and a step counter where optimizer.matrix is adamw. With"
        " host.optimizer_offload only the part that is not in host memory.",
        "Σ true local rows · (elements / d0) · bytes(precision.moments), twice that + 4 a tensor with adamw",
        "bytes",
        "K. Jordan et al., Muon (2024); megarun's optim/muon.py",
        "o_proj [3584, 1792], dp_shard 4, fp32: 896 · 1792 · 4 = 6,422,528 B",
    ),
    Column.OTHER_OPTIMIZER: ColumnFormula(
        "State of the other group: AdamW's two moments per element and one fp32 step counter per tensor; as matrix_optimizer.",
        "Σ (2 · true local rows · (elements / d0) · bytes(precision.moments) + 4)",
        "bytes",
        "arXiv:1711.05101; torch.optim.AdamW(fused=True)",
        "embedding [65536, 3584], dp_shard 4, fp32: 2 · 16384 · 3584 · 4 + 4 = 469,762,052 B",
    ),
    Column.ACTIVATIONS: ColumnFormula(
        "Tensors that blocks save for backward, times the microbatches in flight; the running block's working set; logits and loss;"
        " MTP; token ids and rotary tables. With host.activation_offload, only one of the layers with these letters counts: the one "
        "before the running layer.",
        "largest over states of a rank: Σ over chunks (microbatches in flight · Σ ledger) + the block that runs; counts are the schedule's"
        " vectors, never a peak count times a mean",
        "bytes",
        "megaplan/families: the operations of a block, which megaplan/hosts/megarun replays",
        "D with swiglu, B 1, T 4096, h 4096, F 14336, bf16: normed 32 MiB + rstd 16 KiB + gate, up, act 3 · 112 MiB = 368.02 MiB",
    ),
    Column.FEATURE_ACTIVATIONS: ColumnFormula(
        "Tensors that n-gram, structure and platform embeddings and relation bias save for backward: ids, looked-up rows, projections.",
        "n-gram: B · T · tables · (8 + dim · bytes(activations)); a category: B · T · (8 + (bottleneck + h) · bytes(activations));"
        " relation bias: B · T · 4 on every slot that attends",
        "bytes",
        "megaplan/hosts/megarun/embedding.py",
        "16 tables of dim 16, B 4, T 4096, bf16: 16384 · 16 · (8 + 32) = 10,485,760 B",
    ),
    Column.ROUTING: ColumnFormula(
        "Chosen experts, row orders and counts, and the rows that are dispatched, received, returned and combined.",
        "kept a token and E block: top_k · (4 + 4 + h · bytes(activations)) + 4 · E / tokens; with ep · etp > 1 rows received are"
        " N · top_k · etp · routing_skew, or capacity · E / ep · ep · etp",
        "bytes",
        "docs/reference/kernels.md, `route` to `combine`; arXiv:2101.03961, equation 3",
        "4096 tokens, top-2, 128 experts, capacity factor 1.2, h 4096, 4 local experts, bf16: capacity 77, 2,523,136 B from one source,"
        " 80,740,352 B from the 32 there are",
        Basis.MODELLED,
    ),
    Column.COMMUNICATION: ColumnFormula(
        "Pipeline receive buffers, parameters gathered to run, reduce-scatter inputs, inputs gathered over TP or CP.",
        "a + g boundaries of every chunk between two others, boundary = B · T / (cp · tp) · h · bytes(activations); a: its microbatches"
        " in flight, with one more, or pp of interleaved zero bubble, where torch receives early; g: 1 under 1f1b and gpipe, else 2 · pp;"
        " both at most the microbatches of a step, which are a under gpipe, and both under looped_bfs;"
        " + Σ n · ceil(d0 / n) · (elements / d0) · bytes(precision.params) of what is gathered; with one"
        " data rank only of what is stored in another dtype",
        "bytes",
        "torch/distributed/pipelining/stage.py; torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py",
        "1f1b, rank 1 of 4, 16 microbatches of [4, 4096, 3584] in bf16: (3 + 1) · 117,440,512 = 469,762,048 B",
    ),
    Column.WORKSPACE: ColumnFormula(
        "Scratch inside torch's allocator: GEMM libraries, Newton-Schulz, head and loss in one operation.",
        "GEMM workspaces of the device's data file; while head and loss run with host.kernels triton + a slice of logits, at most 2²⁷"
        " elements, and in backward + 6 · rows · h where precision.params has 2 bytes; in the optimizer's phase + the largest over matrices"
        " of (2 · n + 2 · k · r²) · bytes(newton_schulz_dtype), with host.kernels reference + 4 · k · r², k matrices of shorter side r and"
        " n elements that a rank orthogonalises together; or of twice what it sends of them; with host.optimizer_offload + the most"
        " state of two consecutive tensors of AdamW's or rounds of Muon's",
        "bytes",
        "aten/src/ATen/cuda/CublasHandlePool.cpp; megarun's optim/muon.py",
        "up_proj [18944, 3584], dp_shard 4, bf16: (2 · 67,895,296 + 2 · 3584²) · 2 = 322,961,408 B",
        Basis.MODELLED,
    ),
    Column.OVERHEAD: ColumnFormula(
        "Reserved minus allocated. A stream's pool cannot use memory freed by another stream, and reserved memory never falls: a phase has"
        " at least the reserved bytes of earlier phases.",
        "expandable segments: pools of FSDP2's streams at their own peaks, less what they hold at the main one: all-gathers (output + cast"
        " of the shard), and reduced outputs that are added to shards; + 22 MiB and 20 MiB a stream of pages that are not full; + 1.5 % of"
        " activations (fitted, 0.3 to 3.6); + requests of the last reduction above 40 % of what is free in pieces (fitted). Else: + a"
        " segment for each reduction that is larger than every activation; 7 % of activations (fitted, 5.5 to 9.5); + Σ over lasting"
        " tensors of -bytes mod 512, mod 2 MiB from 10 MiB on",
        "bytes",
        "c10/cuda/CUDACachingAllocator.cpp; megaplan/budget/rank.py",
        "16 layers of Llama on one H200, default allocator, 95.4 GiB allocated: 118.9 GiB reserved as measured, 119.4 by the formula",
        Basis.MODELLED,
    ),
    "reserve": ColumnFormula(
        "Device memory outside torch's allocator: context and driver, and NCCL where there is more than one rank.",
        "Σ of the items of the device's data file; without nccl on one rank",
        "bytes",
        "megaplan/devices.json",
        "h200: 1,395,458,048 B measured on one rank, with NCCL's 1.5 GiB 3,006,070,784 B",
        Basis.MODELLED,
    ),
    "kv_cache": ColumnFormula(
        "Serving only: keys and values of the A layers, never of the depth.",
        "Σ over A layers of batch_size · tokens · width · bytes(kv_dtype); width 2 · num_kv_heads · head_dim, or kv_lora_rank +"
        " qk_rope_head_dim (+ the indexer's head_dim); tokens min(context, window), whole blocks if paged, those of the shared prefix once;"
        " a rank of a tensor group has max(1, num_kv_heads / tp) of the heads, and latents whole",
        "bytes",
        "arXiv:2405.04434, section 2.1.2",
        "one GQA layer, 8 kv heads of 128, batch 32, context 32768, bf16: 32 · 32768 · 2048 · 2 = 4,294,967,296 B",
    ),
    "recurrent_state": ColumnFormula(
        "Serving only: states of M and R layers, whatever the context.",
        "Σ over M layers of batch_size · (H · P · S · 4 + conv inputs), over R layers of batch_size · (H · K · V · 4 + conv inputs)",
        "bytes",
        "megaplan/budget/serving.py",
        "Mamba-2, 112 heads of 64, state 128, 8 groups, kernel 4, bf16: 3,670,016 + 9216 · 3 · 2 = 3,725,312 B a sequence and layer",
    ),
}
