"""Formulas of the step-time model as text, for `megaplan explain`; a test compares each example with the function."""

from megaplan.blocks.formula import Formula

_FITTED = "; constants fitted to published steps (docs/reference/accuracy-time.md)"

FORMULAS: dict[str, Formula] = {
    "step_gemm": Formula(
        "a dense matrix product of M rows, N columns and depth K: smooth maximum of compute and memory time",
        "t = ((2MNK / (R · q^e · K/(K + k0)))^1.7 + (B / W)^1.7)^(1/1.7); R reached FLOPs/s, q whole tiles, B bytes, W reached bytes/s",
        "seconds",
        "the form of MooreThreads/SimuMax's operation tables" + _FITTED,
        "((2e12 / (7e14 · 0.9^0.5 · 4096/(4096 + 70)))^1.7 + (1e8 / 2.5e12)^1.7)^(1/1.7) = 0.0030643",
    ),
    "step_quality": Formula(
        "useful share of the work after padding to tiles of 256 × 128 and to full waves of the multiprocessors",
        "q = w / ⌈w⌉ · M / (256 ⌈M/256⌉) · N / (128 ⌈N/128⌉); w = ⌈M/256⌉ · ⌈N/128⌉ / multiprocessors",
        "share",
        "counting tiles",
        "(16 · 32 / 132) / 4 · 4096/4096 · 4096/4096 = 0.9697",
    ),
    "step_grouped": Formula(
        "products of all local experts, with m rows each",
        "t = ((F / (R · s · m/(m + m0) · K/(K + k0)))^1.7 + ((Bw/w + Br) / W)^1.7)^(1/1.7); s at most 1, Bw weights, Br rows",
        "seconds",
        "the form of MooreThreads/SimuMax's group_matmul table" + _FITTED,
        "((1e12 / (1e15 · 0.98 · 512/(512 + 60) · 7168/(7168 + 70)))^1.7 + ((4e8/0.6 + 1e8) / 6e12)^1.7)^(1/1.7) = 0.0011672",
    ),
    "step_attention": Formula(
        "the attention core over visible pairs, at a rate that is lower with few query blocks",
        "t = F / (R · w · b/(b + c · multiprocessors)); F = 2 · heads · (d_k + d_v) · pairs, backward has five products instead of two; "
        "b = batch · heads · S/128",
        "seconds",
        "the form of MooreThreads/SimuMax's sdp tables" + _FITTED,
        "2 · 32 · 256 · 8192^2 / 2 / (6e14 · 1.0 · 2048/(2048 + 2 · 132)) = 0.0010343",
    ),
    "step_scores": Formula(
        "unfused attention: all scores are written to and read from memory between the two products, softmax and dropout",
        "n = batch · heads · S²; forward products of 2n · d FLOPs and 2n bytes each as step_gemm, and t = (4 + d) n / W of softmax and "
        "dropout, d = 5 or 0; backward four products and (6 + d) n / W",
        "seconds",
        "CoreAttention of megatron/model/transformer.py in NVIDIA/Megatron-LM; arXiv:2205.05198, section 4",
        "(4 + 5) · 4 · 8 · 2048^2 / 1.45e12 = 0.00083306",
    ),
    "step_drops": Formula(
        "dropout inside a fused attention kernel: one random number for each visible score",
        "t = n / (r · multiprocessors); n = batch · heads · pairs, r random numbers a second of one multiprocessor, 9.8e9 forward and "
        "4.1e9 backward in the first FlashAttention, twice as many later, where a number has 8 bits and not 16",
        "seconds",
        "arXiv:2205.14135, tables 15, 16, 18 and 19: times with dropout less those without, on an A100; the kernels of both generations",
        "12 · 8192^2 / 2 / (9.8e9 · 108) = 0.00038044",
    ),
    "step_copies_of_heads": Formula(
        "modules made of torch's own operations: copies of heads around attention, rotations, biases and the loss, by the bytes that "
        "each moves",
        "t = B / W; B of a token 4 (q + k + v + o) forward and backward around FlashAttention, or 4 o and 4 (q + k + v); rotated r of a "
        "width w: 20 r and 30 r, and 4 w and 14 w if r < w; of a logit 38 and 14",
        "seconds",
        "ParallelAttention of megatron/model/transformer.py in NVIDIA/Megatron-LM and EleutherAI/gpt-neox, and their losses",
        "8192 · 4 · 4 · 1536 / 1.48e12 = 0.00013603",
    ),
    "step_memory": Formula(
        "norms, activations, rotary, casts, permutation and logits, by their bytes",
        "t = f · B / W; f ratio of the bytes that the framework's kernels move to operands and results",
        "seconds",
        "counting operands" + _FITTED,
        "1.3 · 4096 · 4096 · 10 / 2.5e12 = 0.000087241",
    ),
    "step_scan": Formula(
        "Mamba-2's chunked scan",
        "t = F / R + B / W; F = T · (2QGN + 2Q · d_i + 4 · d_i · N), Q = 128; backward twice, and C Bᵀ once more",
        "seconds",
        "arXiv:2405.21060, section 6" + _FITTED,
        "8192 · (2 · 128 · 8 · 128 + 2 · 128 · 8192 + 4 · 8192 · 128) / 5e13 + 2e9 / 6e12 = 0.0014070",
    ),
    "step_transfer": Formula(
        "collectives that a block waits for: tensor groups, expert exchange, context rings, pipeline hops",
        "t = x · (B / W + n · l); x share that no computation hides, B bytes that a rank sends, n collectives of l seconds",
        "seconds",
        "NCCL's tuning model" + _FITTED,
        "0.4 · (2 · 3 · 8e6 / 3.6e11 + 6 · 8e-6) = 0.000072533",
    ),
    "step_copies": Formula(
        "copies of a token that a dispatcher sends if it sends one to each distinct rank of n, under uniform routing",
        "c = n · (1 − (1 − 1/n)^k); k = top_k, and c = k for an all-to-all",
        "copies",
        "counting under uniform routing",
        "8 · (1 - (1 - 1/8)^8) = 5.2511",
    ),
    "step_short_ring": Formula(
        "ratio of the time of a byte in a ring of n ranks of a domain to that in a long ring",
        "r = (n + 0.85) / n",
        "factor",
        "NCCL's all-gather on two, four and eight H200 (ai-dynamo/aiconfigurator): 59, 72 and 77 % of the link",
        "(2 + 0.85) / 2 = 1.425",
    ),
    "step_launch": Formula(
        "a pass whose kernels run while the host launches further ones",
        "t = (D^6 + H^6)^(1/6); D device time with gaps, H launches · host seconds per kernel",
        "seconds",
        "smooth maximum" + _FITTED,
        "(0.010^6 + 0.009^6)^(1/6) = 0.010734",
    ),
    "step_pipeline": Formula(
        "a step of m microbatches on stages of v chunks",
        "t = m · max t_s + (Σ t_s − max t_s) / v",
        "seconds",
        "arXiv:2104.04473, section 2.2, for unequal stages",
        "16 · 0.030 + (0.028 + 0.030 + 0.026 - 0.030) / 2 = 0.507",
    ),
    "step_ring": Formula(
        "an all-gather or a reduce-scatter over n data ranks",
        "t = (n − 1)/n · S / W + (n − 1) · l",
        "seconds",
        "NCCL's ring algorithm" + _FITTED,
        "63/64 · 2e9 / 2e11 + 63 · 3e-5 = 0.011734",
    ),
    "step_data": Formula(
        "the time for which a step waits for the reduction of gradients and the all-gather of parameters",
        "t = x (R + G) + max(0, (1 − x) R − B) + max(0, (1 − x) G − F); B and F one microbatch's backward and forward",
        "seconds",
        "the last microbatch hides the reduction, the first the gather" + _FITTED,
        "0.4 · (0.05 + 0.04) + (0.6 · 0.05 - 0.02) + 0 = 0.046",
    ),
    "step_growth": Formula(
        "many nodes: collectives wait for the slower devices",
        "t · (1 + g · log2(nodes))",
        "seconds",
        "published weak scaling" + _FITTED,
        "10 · (1 + 0.0025 · 5) = 10.125",
    ),
    "step_measured": Formula(
        "one kind of megarun's kernels with a measured share of its counted floor",
        "t = max(F / P, B / W) / s + n · l; F products at peak P, B bytes at the memory's rate W, s the share, n launches of l",
        "seconds",
        "profiled steps; the constants are in src/megaplan/measured",
        "989e15 / 989e12 / 0.5 + 1000 · 1e-6 = 2000.001",
    ),
    "step_host": Formula(
        "the time for which a phase of megarun's step waits for the host's launches",
        "t = max(0, n · h − d); n launches of the phase, h the host's time for one, d the device's time for all; of CUDA graphs ≤ 3 · h",
        "seconds",
        "steps beyond the device's busy time; the constants are in src/megaplan/measured",
        "1000 · 1e-4 - 0.06 = 0.04",
    ),
}
