"""Parameters of optional features: side embeddings, relation bias, multi-token prediction."""

from typing import NamedTuple

from megaplan.families.layer_embeddings import LayerEmbeddings, side_tensors
from megaplan.families.residual import norm_tensors
from megaplan.inventory.makers import replicated
from megaplan.inventory.tensors import Block, Group, Init, Outside, Owner, ParamTensor, make_block
from megaplan.spec.models import (
    CategoryEmbedding,
    Features,
    Model,
    Ngram,
    RelationBias,
)
from megaplan.spec.pattern import depth_blocks


class SideEmbedding(NamedTuple):
    """Owner and source of a side-channel embedding (R-18).

    Attributes:
        home: Stage that holds its parameters and adds it to the residual stream; `Inventory.ahead` names the blocks that the last stage
            holds too.
        maker: Source of the ids that it looks up.
        checkpoint: Contents in a checkpoint.
    """

    home: str
    maker: str
    checkpoint: str


_PARAMETERS = "its parameters, once; ids are made again for every batch"
SIDE_EMBEDDINGS: dict[Outside, SideEmbedding] = {
    Outside.NGRAM: SideEmbedding("first", "the home stage, by hashing the batch's token ids and the preceding ones", _PARAMETERS),
    Outside.STRUCTURE: SideEmbedding("first", "the token file, one class a token; the batch carries it to the home stage", _PARAMETERS),
    Outside.LAYER_EMBEDDINGS: SideEmbedding("first", "the home stage, from the batch's token ids", _PARAMETERS),
    Outside.PLATFORM: SideEmbedding(
        "first", "the token file, one per document; the batch carries each token's to the home stage", _PARAMETERS
    ),
}


def ngram_block(ngram: Ngram, hidden_size: int) -> Block:
    """Hashed n-gram tables in one `[rows, dim]` storage, a row of each table concatenated and projected to hidden."""
    tables = replicated("tables.weight", (ngram.num_rows, ngram.dim), Group.OTHER)
    return make_block(Outside.NGRAM, (tables, replicated("proj.weight", (hidden_size, ngram.num_tables * ngram.dim), Group.OTHER)))


def category_block(family: str, category: CategoryEmbedding, hidden_size: int) -> Block:
    """Category ids through a bottleneck (structure, platform), with two scalar gates."""
    return make_block(
        family,
        (
            replicated("categories.weight", (category.num_categories, category.bottleneck), Group.OTHER),
            replicated("proj.weight", (hidden_size, category.bottleneck), Group.OTHER),
            replicated("gates", (2,), Group.OTHER, Init.ONES),
        ),
    )


def side_block(features: Features, name: str, hidden_size: int) -> Block:
    """A configured side embedding, by its name."""
    section: Ngram | CategoryEmbedding | LayerEmbeddings = getattr(features, name)
    if isinstance(section, LayerEmbeddings):
        return make_block(Outside.LAYER_EMBEDDINGS, side_tensors(section, hidden_size))
    return ngram_block(section, hidden_size) if isinstance(section, Ngram) else category_block(name, section, hidden_size)


def relation_bias_block(relation_bias: RelationBias, num_heads: int) -> Block:
    """One `[relations, heads]` table for all A layers; its columns belong to heads and shard with them. Zero at the start: no bias."""
    shape = (relation_bias.num_relations, num_heads)
    return make_block(Outside.RELATION_BIAS, (ParamTensor("weight", shape, Owner.TENSOR_PARALLEL, Group.OTHER, Init.ZEROS, 1),))


def mtp_block(model: Model) -> Block:
    """One MTP depth (DeepSeek-V3, arXiv:2412.19437, section 2.2): its blocks, a projection, three norms.

    The projection takes [hidden; embedding] to hidden and is replicated, because it precedes the block's own tensor-parallel region. The
    token embedding and the head that a depth uses belong to `embedding` and `head`.
    """
    hidden = model.hidden_size

    def norms(name: str) -> tuple[ParamTensor, ...]:
        return norm_tensors(model.norm, hidden, f"{name}.")

    blocks: list[ParamTensor] = []
    for block in depth_blocks(model):
        _, *others = block.family.tensors(block.section, hidden, block.variant)
        blocks += [*norms(f"{block.name}.norm"), *(each._replace(name=f"{block.name}.{each.name}") for each in others)]
    return make_block(
        Outside.MTP,
        (
            *blocks,
            replicated("proj.weight", (hidden, 2 * hidden), Group.MATRIX),
            *(each for name in ("hidden_norm", "embedding_norm", "output_norm") for each in norms(name)),
        ),
        tuple([(block.name, block.family.letter) for block in depth_blocks(model)]),
    )
