"""Builds a stage's blocks from the sections of a spec."""

from collections.abc import Collection

from megaplan.families.registry import FAMILIES
from megaplan.spec import models as spec
from megaplan.spec.models import SIDES
from megaplan.spec.pattern import depth_blocks, parse_pattern
from megarun.model.attention import GroupedQueryAttention, LatentAttention
from megarun.model.lightning import LightningBlock
from megarun.model.linear_attention import LinearAttentionBlock
from megarun.model.mamba import Mamba2Block
from megarun.model.mamba1 import Mamba1Block
from megarun.model.mamba3 import Mamba3Block
from megarun.model.matrix_lstm import MatrixLstmBlock
from megarun.model.mlp import DenseBlock
from megarun.model.moe import ExpertBlock
from megarun.model.mtp import PredictionDepth
from megarun.model.norm import Block
from megarun.model.recurrent import MatrixRecurrenceBlock
from megarun.model.relation import RelationBias
from megarun.model.router_losses import LossFactors
from megarun.model.short_convolution import ShortConvolutionBlock
from megarun.model.side import CategoryEmbedding, NgramEmbedding
from megarun.parallel.groups.context import ContextParallel
from megarun.parallel.groups.expert import ExpertParallel
from megarun.parallel.groups.tensor import TensorParallel


def build_sides(
    model: spec.Model, blocks: Collection[str]
) -> tuple[NgramEmbedding | None, CategoryEmbedding | None, CategoryEmbedding | None]:
    """The n-gram, structure and platform embeddings that are among a stage's blocks."""
    ngram, structure, platform = (getattr(model.features, name) if name in blocks else None for name in SIDES[:3])
    return (
        NgramEmbedding(ngram, model.hidden_size) if ngram is not None else None,
        CategoryEmbedding(structure, model.hidden_size) if structure is not None else None,
        CategoryEmbedding(platform, model.hidden_size) if platform is not None else None,
    )


def build_relation_bias(model: spec.Model, tp: TensorParallel) -> RelationBias | None:
    """The table of a stage that attends: a TP rank's heads."""
    relations, attention = model.features.relation_bias, model.attention
    return RelationBias(relations.num_relations, tp.share(attention.num_heads)) if relations is not None and attention is not None else None


def build_block(
    whole: spec.Spec,
    letter: str,
    layer: int,
    tp: TensorParallel,
    ep: ExpertParallel,
    cp: ContextParallel,
    factors: LossFactors | None,
    index: float,
) -> Block:
    """The module of layer `layer` (global index), with the given letter: a TP and EP rank's part; with the factors of its losses."""
    model = whole.model
    section = FAMILIES[letter].section_of(model)
    module = build_section(whole, letter, section, layer, tp, ep, cp, factors, index)
    module.place_norms(model.path_of(layer), model.hidden_size, model.norm_eps)
    module.share_norm(reads=layer in model.parallel_layers, passes_on=layer + 1 in model.parallel_layers)
    module.multiplier = getattr(section, "output_multiplier", 1.0)
    module.compute_in(letter, whole.precision)
    payload = [value for value in model.payload if value.kept != "input"]
    module.sends_values = any(value.source == layer for value in payload)
    if any(layer in value.readers and value.has_gradient for value in payload):
        module.read_values()
    return module


def build_section(
    whole: spec.Spec,
    letter: str,
    section: object,
    layer: int,
    tp: TensorParallel,
    ep: ExpertParallel,
    cp: ContextParallel,
    factors: LossFactors | None,
    index: float,
) -> Block:
    """Build a block as `build_block` does, from a section that the model need not have, with an RMSNorm before the block."""
    hidden, eps = whole.model.hidden_size, whole.model.norm_eps
    module: Block | None = None
    match section:
        case spec.GroupedQueryAttention() as config:
            module = GroupedQueryAttention(config, hidden, eps, layer, tp, cp)
        case spec.LatentAttention() as config:
            module = LatentAttention(config, hidden, eps, layer, tp, cp, index)
        case spec.Mamba1() as config:
            module = Mamba1Block(config, hidden, eps, tp, cp)
        case spec.Mamba2() as config:
            module = Mamba2Block(config, hidden, eps, tp, cp)
        case spec.Mamba3() as config:
            module = Mamba3Block(config, hidden, eps, tp, cp)
        case spec.MixtureOfExperts() as config:
            before = parse_pattern(whole.model.pattern, whole.model.num_layers).layers[:layer]
            ep = ep.in_layer(config.variant_of(before.count(letter)))
            module = ExpertBlock(config, hidden, eps, tp, ep, factors, cp, gathers=whole.host.uses_triton)
        case spec.MatrixRecurrence() as config:
            module = MatrixRecurrenceBlock(config, hidden, eps, tp, cp)
        case spec.GatedDeltaNet() | spec.KimiDeltaAttention() | spec.LightningAttention() | spec.MatrixLstm() as config:
            module = build_linear_attention(whole, config, layer, tp, cp)
        case spec.ShortConvolution() as config:
            module = ShortConvolutionBlock(config, hidden, eps, tp, cp)
        case spec.Mlp() as config:
            module = DenseBlock(hidden, config, eps, tp)
    if module is None:
        raise ValueError(f"layer {layer}: no module for {letter} blocks; megarun.job.support should have refused the spec")
    return module


def build_linear_attention(
    whole: spec.Spec,
    config: spec.GatedDeltaNet | spec.KimiDeltaAttention | spec.LightningAttention | spec.MatrixLstm,
    layer: int,
    tp: TensorParallel,
    cp: ContextParallel,
) -> Block:
    """The module of a G layer by its kind."""
    hidden, eps = whole.model.hidden_size, whole.model.norm_eps
    match config:
        case spec.LightningAttention():
            letters = parse_pattern(whole.model.pattern, whole.model.num_layers).layers
            return LightningBlock(config, hidden, eps, letters, layer, tp, cp)
        case spec.MatrixLstm():
            return MatrixLstmBlock(config, hidden, eps, tp)
        case _:
            return LinearAttentionBlock(config, hidden, eps, tp, cp)


def build_depth(
    whole: spec.Spec, depth: int, tp: TensorParallel, ep: ExpertParallel, cp: ContextParallel, factors: LossFactors | None
) -> PredictionDepth:
    """A depth of multi-token prediction; its blocks are numbered after the model's layers, and have no indexer."""
    model = whole.model
    made = depth_blocks(model)
    blocks = {
        block.name: build_section(whole, block.family.letter, block.section, model.num_layers + depth, tp, ep, cp, factors, 0.0)
        for block in made
    }
    normed = model.features.mtp is not None and model.features.mtp.normed_input
    return PredictionDepth(blocks, model.hidden_size, model.norm_eps, passes_normed=normed)
