"""Latent attention under `mesh.context_exchange: latents`: its groups of heads, and what a rank holds while it runs one of them."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from megakernels.facts import SUMS_BYTES, KernelScratch
from megakernels.ops.attention.facts import AttentionSizes


@cache
def head_groups(num_heads: int, cp: int) -> int:
    """Number of groups of a rank's heads whose keys and values are made at once: the smallest divisor of the heads that is not below cp.

    The keys and values of one group, of the whole sequence, then take no more bytes than those of all heads for the rank's own tokens.
    """
    return next((groups for groups in range(min(num_heads, cp), num_heads + 1) if num_heads % groups == 0), 1)


def of_group(core: AttentionSizes, cp: int) -> AttentionSizes:
    """Sizes of the core of one group of heads."""
    heads = core.heads // head_groups(core.heads, cp)
    return core._replace(heads=heads, groups=heads)


class GroupBytes(NamedTuple):
    """Bytes that a rank holds at the peaks of a group of heads, and the scratch of the core's kernels at those points."""

    forward: int
    backward: int
    inside: KernelScratch


def group_bytes(core: AttentionSizes, latent: int, rotated: int, inside: KernelScratch, *, copies: bool) -> GroupBytes:
    """Bytes that a rank holds at the peak of a group of heads, in addition to gathered latents and what the operation returns.

    Forward first expands the latents, then attends. Backward expands, makes the gradients of keys and values, or multiplies those by the
    up-projection; sums of the gradients of latents are not counted here.

    Args:
        core: Sizes of the core of the group.
        latent: Width of the latent.
        rotated: Width of the rotary key.
        inside: Scratch of the core's kernels.
        copies: True if the group's part of the output is copied: it has not all heads.
    """
    size, rows, queries = core.itemsize, core.batch * core.keys, core.batch * core.queries
    expanded = rows * core.heads * (core.width - rotated + core.value_width) * size
    keys = rows * core.heads * (core.width + core.value_width) * size
    out, lse = queries * core.heads * core.value_width * size, queries * core.heads * SUMS_BYTES
    kept = (out + (lse if core.batch > 1 else 0)) * copies
    forward, runs = max((expanded + keys, 0), (keys + out + lse, inside.forward), key=sum)
    gradients = kept + 2 * keys + queries * core.heads * core.width * size
    others = max(kept + expanded + keys, expanded + rows * (rotated + latent) * size)
    backward, runs_back = max((others, 0), (gradients, inside.backward), key=sum)
    return GroupBytes(forward, backward, KernelScratch(runs, runs_back))
