"""Causal attention to keys that another layer chose. Saved: q, k, v, choice, starts, out, lse."""

from torch import Tensor

from megakernels._common import operation, require, require_starts, types_of
from megakernels.ops.attention.sinks import require_sinks
from megakernels.ops.chosen_attention import runs
from megakernels.ops.chosen_attention.inputs import Chosen
from megakernels.ops.indexed_attention.facts import num_words

__all__ = ["chosen_attention"]


def chosen_attention(
    q: Tensor, k: Tensor, v: Tensor, choice: Tensor,
    scale: float, window: int | None = None,
    starts: Tensor | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Softmax attention of every query to the keys that an `indexed_attention_choice` of the same positions chose.

    Args:
        q: [B, T, H, E].
        k: [B, T, H, E].
        v: [B, T, H, V].
        choice: int32 [B, T, ⌈T / 128⌉ · 4], bit s % 32 of word s // 32 for key s; every query has a key that it sees. No gradient.
        scale: Factor on the attention scores.
        window: The window of the choice; no key before it is read.
        starts: int32 [B, T] or None: of the choice too. No gradient.
        sinks: [H] or None, as for `attention`.

    Returns:
        [B, T, H, V], contiguous, in q's dtype.

    Saves:
        out: the output.
        lse: fp32 [B, H, T].

    Scratch:
        As `attention`, and a copy of a choice that is not dense.

    Triton:
        The kernels of `attention` with the choice as a mask: every tile that a query sees is computed. Cases that `attention` leaves to
        plain torch stay there.

    Raises:
        ValueError: Shapes do not fit, or window < 1.

    Source: arXiv:2603.12201.
    """
    require_chosen("chosen_attention", q, k, v, choice)
    require(q.shape == k.shape, "chosen_attention", "q and k must be [B,T,H,E]", q=q.shape, k=k.shape)
    require(window is None or window >= 1, "chosen_attention", "window must be at least 1", window=window)
    require_starts("chosen_attention", starts, q.shape[:2])
    require_sinks("chosen_attention", sinks, q)
    out: Tensor = _chosen_attention(q, k, v, choice, starts, scale, window, sinks)[0]
    return out


def require_chosen(name: str, q: Tensor, k: Tensor, v: Tensor, choice: Tensor) -> None:
    """Check that heads fit each other, and a choice the queries and keys."""
    fits = q.dim() == 4 and q.shape[2:] == k.shape[2:] and q.shape[0] == k.shape[0] and v.shape[:3] == k.shape[:3]
    require(fits, name, "q and k must be [B,T,H,E], v [B,T,H,V]", q=q.shape, k=k.shape, v=v.shape)
    words = (*q.shape[:2], num_words(k.shape[1]))
    require(tuple(choice.shape) == words, name, "choice must have a bit per query and key", choice=choice.shape, wanted=words)


_chosen_attention, _chosen_attention_backward = operation(
    "chosen_attention",
    types_of(Chosen),
    Chosen,
    outputs=("out", "lse"),
    saved=("out", "lse"),
    gradients=runs.GRADIENTS,
    forward=runs.forward,
    backward=runs.backward,
    fake=lambda given: runs.made_like(given.attended),
    forward_scratch=runs.forward_scratch,
    backward_scratch=runs.backward_scratch,
    forward_cost=runs.cost_of_forward,
    backward_cost=runs.cost_of_backward,
)
