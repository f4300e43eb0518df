"""Latent attention under `mesh.context_exchange: latents`: its groups of heads, and the bytes that a rank holds while it runs one group."""

from functools import cache
from typing import NamedTuple

from megakernels.facts import SUMS_BYTES, KernelScratch
from megakernels.ops.attention.facts import AttentionSizes
from megakernels.ops.fp8_linear.facts import SQUARE_ROWS, BlockLinears, ScaledLinears, low_linears, rounded_up
from megaplan.blocks.ops import UpProjection


@cache
def head_groups(num_heads: int, cp: int) -> int:
    """Number of groups into which a rank's heads are divided; keys and values of one group are computed together.

    It is the smallest divisor of the heads that is at least cp.
    One group's keys and values of the whole sequence then take at most as many bytes as those of all heads for the rank's own tokens.
    """
    return next((groups for groups in range(min(num_heads, cp), num_heads + 1) if num_heads % groups == 0), 1)


def of_group(core: AttentionSizes, cp: int) -> AttentionSizes:
    """Sizes of the core of one group of heads."""
    heads = core.heads // head_groups(core.heads, cp)
    return core._replace(heads=heads, groups=heads)


class GroupBytes(NamedTuple):
    """Bytes that a rank holds at the peaks of a group of heads, and the scratch of kernels at those points."""

    forward: int
    backward: int
    inside: KernelScratch


def group_bytes(
    core: AttentionSizes, latent: int, rotated: int, inside: KernelScratch, up: UpProjection, *, cp: int, groups: int
) -> GroupBytes:
    """Bytes that a rank holds at the peak of a group of heads, in addition to gathered latents and the operation's results.

    Forward first expands the latents, then attends. Backward expands, makes the gradients of keys and values, and multiplies them by the
    up-projection or, in eight bits, sums them over the context group. Not counted here: sums of the latents' gradients, an adapter's narrow
    rows, and the tensors of all heads that eight bits need.

    Args:
        core: Sizes of the core of the group.
        latent: Width of the latent.
        rotated: Width of the rotary key.
        inside: Scratch of the core's kernels.
        up: The up-projection.
        cp: Ranks of the context group.
        groups: Number of groups; if there are several, the group's part of the output is copied.
    """
    size, rows, queries = core.itemsize, core.batch * core.keys, core.batch * core.queries
    height = core.heads * (core.width - rotated + core.value_width)
    expanded, keys = rows * height * size, rows * core.heads * (core.width + core.value_width) * size
    out, lse = queries * core.heads * core.value_width * size, queries * core.heads * SUMS_BYTES
    kept = (out + (lse if core.batch > 1 else 0)) * (groups > 1)
    matrix = height * latent * size * up.unpacks
    making = _expanding_bytes((rows, latent, height, size), up, groups) if up.scaling else 0
    forward, runs = max((expanded + max(keys, matrix), 0), (expanded, making), (keys + out + lse, inside.forward), key=sum)
    gradients = kept + 2 * keys + queries * core.heads * core.width * size
    narrow, wide = rows * up.rank * size, rows * latent * size + matrix
    multiplied = expanded // cp if up.scaling else max(narrow, wide)
    others = max(kept + expanded + max(keys, matrix), expanded + rows * rotated * size + multiplied)
    backward, runs_back = max((others, 0), (kept + expanded, making), (gradients, inside.backward), key=sum)
    return GroupBytes(forward, backward, KernelScratch(runs, runs_back))


def _expanding_bytes(sizes: tuple[int, int, int, int], up: UpProjection, groups: int) -> int:
    """Bytes inside the product of one group of heads, with the rows of all blocks that contain rows of the group."""
    rows, latent, height, itemsize = sizes
    made = of_blocks(height, groups, SQUARE_ROWS.get(up.scaling, 1))
    product = expanding_product(rows, latent, made, itemsize, up)
    if isinstance(product, BlockLinears):
        return product.product_bytes(made, height, packed=up.gathered_packed)
    return product.forward_bytes(given=False)


def of_blocks(height: int, groups: int, square: int) -> int:
    """Most rows in the blocks of `square` rows that contain one of the groups of `height` rows."""
    ends = ((start // square * square, rounded_up(start + height, square)) for start in range(0, groups * height, height))
    return max(min(last, groups * height) - first for first, last in ends)


def expanding_product(rows: int, latent: int, height: int, itemsize: int, up: UpProjection) -> ScaledLinears | BlockLinears:
    """The up-projection in eight bits with this number of rows of its weight."""
    return low_linears((rows, latent, (height,), itemsize), up.scaling, fused=up.fused, packed=(up.gathered_packed,))
