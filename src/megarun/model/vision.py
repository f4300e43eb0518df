"""The encoder of images and the projection of its features, which the first stage runs before the embedding.

Images are the rows of the encoder's batch. A frozen part with no trained part before it runs without a graph.
"""

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from megakernels import attention, gelu
from megaplan.families.residual import ResidualPath
from megaplan.hosts.megarun.towers import trained_parts
from megaplan.inventory.towers import FIRST_NORM, LAST_NORM, PATCHES, PROJECTOR, encoder_blocks
from megaplan.spec import models as spec
from megarun.model.attention import GroupedQueryAttention
from megarun.model.mlp import DenseBlock
from megarun.model.norm import Block, linear, stream_norm
from megarun.model.relation import Relations
from megarun.model.rotary import Rotary, rotary_table
from megarun.parallel.groups.tensor import ALONE, TensorParallel

UNROTATED = Rotary(*torch.empty(2, 0))
"""No table: no layer rotates its heads."""
ROTARY_BASE = 10_000.0
"""Base of the angles of patches' rows and columns."""


def patch_places(encoder: spec.Encoder, patches_per_token: int) -> list[tuple[int, int]]:
    """Row and column of each patch of an image in the order of the encoder: windows, in them tokens, in them patches, each row by row.

    Source: arXiv:2409.12191, section 2.1, and the code published with it.
    """
    grid = encoder.grid
    if grid is None:
        raise ValueError("rotary embedding of patches without a grid, which megarun.job.support should have refused (MP790)")
    tiles = encoder.tiles(patches_per_token)

    def order(place: tuple[int, int]) -> list[int]:
        return [at // size for tile in (*tiles, (1, 1)) for at, size in zip(place, tile, strict=True)]

    return sorted(product(range(grid[0]), range(grid[1])), key=order)


class PatchEmbedding(nn.Module):
    """A linear of each patch's values and, if the encoder has one, a learned embedding of its position."""

    def __init__(self, encoder: spec.Encoder, index: int) -> None:
        super().__init__()
        self.proj, self.index = linear(encoder.patch_values, encoder.hidden_size, encoder.patch_bias), index
        rows = encoder.positions
        self.positions = None if rows is None else nn.Parameter(torch.empty(rows, encoder.hidden_size))

    def forward(self, patches: Tensor) -> Tensor:
        """Values of the rank's patches [images, p, V] -> their features [images, p, W]."""
        features: Tensor = self.proj(patches)
        first, count = self.index * patches.shape[1], patches.shape[1]
        return features if self.positions is None else features + self.positions[first : first + count]


class EncoderAttention(GroupedQueryAttention):
    """Softmax attention of every patch to all patches of its image, or of its window."""

    def __init__(self, config: spec.GroupedQueryAttention, width: int, eps: float, window: int | None, tp: TensorParallel) -> None:
        super().__init__(config, width, eps, 0, tp)
        self.num_patches = window

    def core(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        starts: Tensor | None = None,  # noqa: ARG002  rows are images
        relations: Relations | None = None,  # noqa: ARG002
        gate: Tensor | None = None,  # noqa: ARG002
    ) -> Tensor:
        """Heads [images, P, Hq, D], [images, P, Hkv, D] twice -> [images, p, W]: attention and its output projection."""
        attend = partial(_attention_within, q, k, v, self.scale, self.num_patches or q.shape[1])
        return self.o_proj.reduce(self.o_proj(attend().flatten(2)))


def _attention_within(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
    """Attention to all patches of a window, which are next to each other."""
    queries, keys, values = (each.view(-1, window, *each.shape[2:]) for each in (q, k, v))
    return attention(queries, keys, values, scale, causal=False).view(*q.shape[:3], -1)


def encoder_layer(encoder: spec.Encoder, index: int, eps: float, tp: TensorParallel) -> nn.ModuleDict:
    """Attention, then an MLP."""
    blocks, width = encoder_blocks(encoder), encoder.hidden_size
    made: dict[str, Block] = {
        "attention": EncoderAttention(blocks["attention"].section, width, eps, encoder.window(index), tp),
        "mlp": DenseBlock(width, blocks["mlp"].section, eps, tp),
    }
    for block in made.values():
        block.place_norms(ResidualPath(encoder.norm), width, eps)
    return nn.ModuleDict(made)


class VisionEncoder(nn.Module):
    """A stack over the patches of an image; ranks that split it have p = P / tp consecutive patches each between its blocks.

    Source: arXiv:2010.11929.
    """

    rope_cos: Tensor
    rope_sin: Tensor

    def __init__(self, encoder: spec.Encoder, eps: float, patches_per_token: int, tp: TensorParallel = ALONE, *, trained: bool) -> None:
        super().__init__()
        norm = partial(stream_norm, encoder.norm, encoder.hidden_size, eps)
        self.trained = trained
        self.patches = PatchEmbedding(encoder, tp.index)
        self.first_norm = norm() if encoder.first_norm else None
        self.layers = nn.ModuleDict({str(index): encoder_layer(encoder, index, eps, tp) for index in range(encoder.num_layers)})
        self.last_norm = norm() if encoder.last_norm else None
        self.requires_grad_(trained)
        self.encoder, self.patches_per_token = encoder, patches_per_token

    def add_rotary(self, device: torch.device) -> None:
        """Create the rotary table of the patches' places on `device` if the encoder has one: fp32 buffers, not in checkpoints."""
        if self.encoder.rotary:
            places = patch_places(self.encoder, self.patches_per_token)
            table = rotary_table(torch.tensor(places), self.encoder.head_dim // 2, ROTARY_BASE, device)
            self.register_buffer("rope_cos", table.cos, persistent=False)
            self.register_buffer("rope_sin", table.sin, persistent=False)

    @property
    def rotary(self) -> Rotary:
        """The table; an empty one if no layer rotates its heads."""
        return Rotary(self.rope_cos, self.rope_sin) if self.encoder.rotary else UNROTATED

    def forward(self, patches: Tensor) -> Tensor:
        """Values of the rank's patches [images, p, V] -> features [images, p, W]."""
        with _graph(self.trained):
            x = self.patches(patches)
            if self.first_norm is not None:
                x = self.first_norm(x)
            for layer in self.layers.values():
                for block in layer.children():  # deleted in this frame, as in a stage: another name would keep the stream allocated
                    x = block(x, self.rotary)
            if self.last_norm is not None:
                x = self.last_norm(x)
            out: Tensor = x
        return out

    def blocks(self) -> Iterator[tuple[str, nn.Module]]:
        """The encoder's blocks in execution order, by their names in the inventory."""
        yield PATCHES, self.patches
        if self.first_norm is not None:
            yield FIRST_NORM, self.first_norm
        for index, layer in self.layers.items():
            for name, block in layer.named_children():
                yield f"vision.layers.{index}.{name}", block
        if self.last_norm is not None:
            yield LAST_NORM, self.last_norm


class Projector(nn.Module):
    """Linears from features into the stream of text, with gelu between them."""

    def __init__(self, projection: spec.Projection, eps: float, tp: TensorParallel = ALONE, *, trained: bool, in_graph: bool) -> None:
        super().__init__()
        self.tp = tp
        widths, self.projection, self.in_graph = projection.widths, projection, in_graph
        width = widths[0] // (1 if projection.norms_joined else projection.joined_patches)
        self.norm = None if projection.norm is None else stream_norm(projection.norm, width, eps)
        self.linears = nn.ModuleList(linear(*pair, projection.bias) for pair in pairwise(widths))
        self.requires_grad_(trained)

    def forward(self, features: Tensor) -> Tensor:
        """Features of the rank's patches [images, p, W] -> rows of the stream of text of all [images · P / patches a token, h]."""
        with _graph(self.in_graph):
            return self.tp.gather(torch.unflatten(self.project(features), 0, (len(features), -1))).flatten(0, 1)

    def project(self, x: Tensor) -> Tensor:
        """See `forward`."""
        pooled, joined, late = self.projection.pooled_patches, self.projection.joined_patches, self.projection.norms_joined
        if pooled > 1:
            x = torch.unflatten(x, 1, (-1, pooled)).mean(2)
        if late:
            x = x.reshape(-1, joined * x.shape[-1])
        if self.norm is not None:
            x = self.norm(x)
        if not late:
            x = x.reshape(-1, joined * x.shape[-1])
        for index, each in enumerate(self.linears):
            x = each(x if index == 0 else gelu(x))
        return x


def _graph(wanted: bool) -> AbstractContextManager[Any]:
    """The autograd context of a part: without a graph unless one is needed."""
    return nullcontext() if wanted else torch.no_grad()


def build_images(config: spec.Spec, blocks: Collection[str], tp: TensorParallel) -> tuple[VisionEncoder | None, Projector | None]:
    """The encoder and the projection of a stage that has these blocks."""
    stated = None if config.model.towers is None else config.model.towers.stated
    if stated is None or PROJECTOR not in blocks:
        return None, None
    trained, eps = trained_parts(config), config.model.norm_eps
    shared = replace(tp, may_wait=False) if config.mesh.tower_tp > 1 else ALONE  # outside the layers weight gradients are never deferred
    projector = Projector(stated[1], eps, shared, trained=trained.projector, in_graph=any(trained))
    return VisionEncoder(stated[0], eps, stated[1].patches_per_token, shared, trained=trained.vision), projector


class _Merge(torch.autograd.Function):
    """The stream with rows in some places: a new storage; backward makes the gradient of both."""

    @staticmethod
    def forward(ctx: Any, stream: Tensor, rows: Tensor, places: Tensor, spare: bool) -> Tensor:
        """[B, t, h], [n, h], int64 [n] -> [B, t, h]."""
        ctx.save_for_backward(places)
        ctx.spare = spare
        out = _copied(stream, spare).index_copy_(0, places, rows)
        return (out[:-1].clone() if spare else out).view_as(stream)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        """The stream's gradient, zero at these positions, and the rows' gradient."""
        (places,) = ctx.saved_tensors
        of_stream = _copied(gradient, ctx.spare)
        of_rows = of_stream.index_select(0, places) if ctx.needs_input_grad[1] else None
        of_stream.index_fill_(0, places, 0)
        return (of_stream[:-1] if ctx.spare else of_stream).view_as(gradient), of_rows, None, None


def _copied(stream: Tensor, spare: bool) -> Tensor:
    """A copy of a stream [B, t, h] as [B · t, h]; with `spare` it has one more position, of zeros."""
    return pad(stream.flatten(0, 1), (0, 0, 0, 1)) if spare else stream.flatten(0, 1).clone()


def merged(stream: Tensor, rows: Tensor, places: Tensor, *, spare: bool = False) -> Tensor:
    """The stream [B, t, h] with rows [n, h] in `places`, int64 [n].

    A place counts all B · t positions; with `spare`, the place B · t is outside the stream.
    """
    found: Tensor = _Merge.apply(stream, rows, places, spare)  # type: ignore[no-untyped-call]
    return found
