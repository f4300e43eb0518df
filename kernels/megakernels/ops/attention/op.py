"""Attention with shared key heads, causal with an optional window, or to all positions. Saved: q, k, v, starts, out, lse."""

from torch import Tensor

from megakernels._common import operation, require, require_starts, types_of
from megakernels.ops.attention.choice import (
    backward,
    backward_scratch,
    cost_of_backward,
    cost_of_forward,
    forward,
    forward_scratch,
)
from megakernels.ops.attention.inputs import GRADIENTS, Attention
from megakernels.ops.attention.reference import made_like
from megakernels.ops.attention.relations import require_relations
from megakernels.ops.attention.sinks import require_sinks

__all__ = ["attention"]


def attention(
    q: Tensor, k: Tensor, v: Tensor,
    scale: float, window: int | None = None,
    starts: Tensor | None = None, sinks: Tensor | None = None, classes: Tensor | None = None, relations: Tensor | None = None,
    cap: float | None = None, causal: bool = True,
) -> Tensor:  # fmt: skip
    """Softmax attention, causal unless `causal` is false; query head i reads key head i // (Hq / Hkv).

    Args:
        q: [B, T, Hq, D].
        k: [B, T, Hkv, D], Hkv divides Hq.
        v: [B, T, Hkv, Dv].
        scale: factor on the scores.
        window: position i sees j with i − window < j ≤ i; None sees all j ≤ i.
        starts: int32 [B, T] or None: index of the first position of each position's document, for rows that hold several documents;
            None is one document a row. Position i attends to no earlier ones. No gradient.
        sinks: [Hq] or None: a score of each head in the denominator of its softmax.
        classes: int32 [B, T] or None: the class of each position as a key, below R. No gradient.
        relations: [R, Hq] or None, with classes: the term that each head adds to its scaled scores for keys of each class.
        cap: scaled scores s become cap · tanh(s / cap), before relations are added; None leaves them.
        causal: False for attention of every position to all positions of its row, which takes neither a window nor starts.

    Returns:
        [B, T, Hq, Dv], contiguous, in q's dtype.

    Saves:
        out: the output.
        lse: fp32 [B, Hq, T], of the sinks too.

    Scratch:
        Backward δ = Σ ∂L/∂out ⊙ out, fp32 [B, Hq, T], and with relations one such array of the keys; with sinks one forward and two
        backward. Stored scores (below) have up to 1.25 GiB. Both passes copy operands whose last dim is not dense.

    Triton:
        One kernel forward, two backward: gradient of q and δ, gradients of k and v; for heads wider than 128 (fp32: 32) k and v have a
        launch each. For bf16 and fp16 heads wider than 128, and capped scores, backward stores weights and score gradients of a part of
        the batch, and multiplies them; not for rows of up to 384 positions, relations, or a sequence whose scores of one key head are
        more than 1.25 GiB. On CUDA the forward is a library's where one accepts the inputs: cuDNN on Hopper and Blackwell for bf16 and
        fp16 heads up to 128, on Hopper up to 256 if all have one width, else torch's flash kernel. The Triton forward runs packed rows,
        fp32, capped scores, relations, and the windows and unequal widths that no library accepts. The backward is always Triton's and is
        bitwise reproducible; with relations one more launch makes the gradient of the term added to each key's scores, and a kernel sums it
        for each class. Heads wider than 256 (fp32: 64; with a cap and relations at once 192), and q, k and v of different dtypes, stay with
        plain torch, and so does attention to all positions. Sinks scale a forward's results, in plain torch. With `use_libraries`
        flash-attn-4 runs both passes on Hopper where its table has the call (`flash4/facts.py`): heads up to 256 of one width, or values of
        64 or 128 under wider keys, windows, caps, sinks and shared key heads; its backward is bitwise reproducible and holds dq, and shared
        dk and dv, in fp32.

    Raises:
        ValueError: shapes do not fit, window < 1, cap ≤ 0, or attention to all positions has a window or starts.

    Source: arXiv:2307.08691; arXiv:2305.13245 for shared key heads; arXiv:2508.10925, section 2.1, for sinks;
        arXiv:2408.00118, section 2, for the cap.
    """
    fits = q.dim() == k.dim() == v.dim() == 4 and k.shape[:3] == v.shape[:3] and q.shape[:2] == k.shape[:2] and q.shape[3] == k.shape[3]
    require(fits, "attention", "q must be [B,T,Hq,D], k [B,T,Hkv,D], v [B,T,Hkv,Dv]", q=q.shape, k=k.shape, v=v.shape)
    require(q.shape[2] % k.shape[2] == 0, "attention", "Hkv must divide Hq", Hq=q.shape[2], Hkv=k.shape[2])
    require(window is None or window >= 1, "attention", "window must be at least 1", window=window)
    require(cap is None or cap > 0, "attention", "cap must be above 0", cap=cap)
    ordered = window is not None or starts is not None
    require(causal or not ordered, "attention", "attention to all positions has neither a window nor starts", window=window)
    require_starts("attention", starts, q.shape[:2])
    require_sinks("attention", sinks, q)
    require_relations("attention", classes, relations, q, k)
    out: Tensor = _attention(q, k, v, starts, scale, window, sinks, classes, relations, cap, causal)[0]
    return out


_attention, _attention_backward = operation(
    "attention",
    types_of(Attention),
    Attention,
    outputs=("out", "lse"),
    saved=("out", "lse"),
    gradients=GRADIENTS,
    forward=forward,
    backward=backward,
    fake=made_like,
    forward_scratch=forward_scratch,
    backward_scratch=backward_scratch,
    forward_cost=cost_of_forward,
    backward_cost=cost_of_backward,
)
