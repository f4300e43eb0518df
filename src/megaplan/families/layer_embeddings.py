"""Embeddings of layers: rows of a table by token, and a projection of the embedded token, read by a narrow gate in single layers.

Outside the layers a row of all layers side by side and a normed projection of the stream make one narrow vector for each of the layers.
A layer multiplies it by the activation of a narrow product of its result, projects that back, norms it, and adds it to the stream.

Source: the Gemma 3n and Gemma 4 implementations of transformers.
"""

from typing import Annotated

from pydantic import Field

from megakernels.ops.activation.facts import activation
from megakernels.ops.library import gather
from megakernels.ops.rms_norm.facts import NORM, norm
from megaplan.blocks.costs import linear_work
from megaplan.blocks.ops import INPUT, OUTPUT, Dims, Op, linear, reshape
from megaplan.blocks.ops import add as add_op
from megaplan.blocks.ops import norm as norm_op
from megaplan.blocks.storages import Shapes, storages
from megaplan.blocks.work import OpWork, Workload, Works
from megaplan.columns import Column
from megaplan.inventory.makers import norm as scale
from megaplan.inventory.makers import replicated
from megaplan.inventory.tensors import Group, ParamTensor
from megaplan.scalars import NaturalInt, PositiveInt, Section

PREFIX, ADDED, GIVEN = "layer_embedding", "added", "given_embedding"


class LayerEmbeddings(Section):
    """Embeddings of single layers.

    Attributes:
        num_rows: Rows of the table, one per token.
        dim: Width of one layer's embedding.
        layers: Layers that read one: 0-based global indices, rising.
    """

    num_rows: PositiveInt
    dim: PositiveInt
    layers: Annotated[tuple[NaturalInt, ...], Field(min_length=1)]

    @property
    def width(self) -> int:
        """Width of the embeddings of all layers, side by side."""
        return self.dim * len(self.layers)


def side_tensors(section: LayerEmbeddings, hidden_size: int) -> tuple[ParamTensor, ...]:
    """Parameters outside the layers."""
    return (
        replicated("table.weight", (section.num_rows, section.width), Group.OTHER),
        replicated("proj.weight", (section.width, hidden_size), Group.MATRIX),
        scale("norm.weight", section.dim),
    )


def side_ops() -> tuple[Op, ...]:
    """Operations outside the layers; the stream passes unchanged."""
    return (
        Op("rows", (), ("rows",), params=("table.weight",), grads=()),
        linear("proj", INPUT, "projected", "proj.weight"),
        norm_op("norm", "projected", "normed", "rstd", "norm.weight"),
        Op("join", ("rows", "normed"), ("joined",), keeps=("joined",)),
        reshape("pass", INPUT, OUTPUT),
    )


def side_shapes(dims: Dims, section: LayerEmbeddings) -> Shapes:
    """Storages of these operations."""
    own = dims.residual[:2]
    wide = dict.fromkeys(("rows", "projected", "normed", "joined"), (*own, section.width))
    found = storages(dims.dtype, Column.FEATURE_ACTIVATIONS, wide)
    return found | storages(dims.stat_dtype, Column.FEATURE_ACTIVATIONS, {"rstd": (*own, len(section.layers))})


def side_works(load: Workload, section: LayerEmbeddings, hidden_size: int, grad_bytes: int) -> Works:
    """Work of these operations, on the rank's own tokens."""
    return (
        OpWork("layer embedding rows", "head", gather(section.width, load.itemsize, grad_bytes), own_tokens=True),
        linear_work(load, "layer embedding proj", "head", hidden_size, section.width, own_tokens=True),
        OpWork("layer embedding norm", "head", norm(section.dim, load.itemsize) * len(section.layers), NORM, own_tokens=True),
    )


def layer_tensors(dim: int, hidden_size: int) -> tuple[ParamTensor, ...]:
    """Parameters of a layer that reads one."""
    return (
        replicated(f"{PREFIX}.gate.weight", (dim, hidden_size), Group.MATRIX),
        replicated(f"{PREFIX}.proj.weight", (hidden_size, dim), Group.MATRIX),
        scale(f"{PREFIX}.norm.weight", hidden_size),
    )


def layer_ops() -> tuple[Op, ...]:
    """Operations after a layer's addition, whose result is `ADDED`."""
    return (
        Op("take embedding", (), (GIVEN,)),
        linear(f"{PREFIX}.gate", ADDED, "embedding_gate", f"{PREFIX}.gate.weight"),
        Op(f"{PREFIX} activation", ("embedding_gate",), ("embedding_active",), keeps=("embedding_gate",)),
        Op(f"{PREFIX} product", ("embedding_active", GIVEN), ("embedding_product",), keeps=("embedding_active", GIVEN)),
        linear(f"{PREFIX}.proj", "embedding_product", "embedding_wide", f"{PREFIX}.proj.weight"),
        norm_op(f"{PREFIX}.norm", "embedding_wide", "embedding_normed", "embedding_rstd", f"{PREFIX}.norm.weight"),
        add_op(f"{PREFIX} residual", (ADDED, "embedding_normed"), OUTPUT),
    )


def layer_shapes(dims: Dims, dim: int) -> Shapes:
    """Storages of these operations; the embedding itself belongs to the operations outside the layers."""
    own = dims.residual[:2]
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys((ADDED, "embedding_wide", "embedding_normed"), dims.residual)
    shapes |= dict.fromkeys(("embedding_gate", "embedding_active", "embedding_product"), (*own, dim)) | {GIVEN: (0,)}
    found = storages(dims.dtype, Column.ACTIVATIONS, shapes)
    return found | storages(dims.stat_dtype, Column.ACTIVATIONS, {"embedding_rstd": own})


def layer_works(load: Workload, dim: int, hidden_size: int) -> Works:
    """Work of these operations, on the rank's own tokens."""
    return (
        linear_work(load, f"{PREFIX}.gate", "head", hidden_size, dim, own_tokens=True),
        OpWork(f"{PREFIX} product", "head", activation(dim, load.itemsize, gated=True), own_tokens=True),
        linear_work(load, f"{PREFIX}.proj", "head", dim, hidden_size, own_tokens=True),
        OpWork(f"{PREFIX}.norm", "head", norm(hidden_size, load.itemsize), NORM, own_tokens=True),
    )
