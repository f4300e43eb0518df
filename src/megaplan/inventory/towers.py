"""Parameters of a multimodal model's encoder, of its projection into the stream of text, and of parts that are counted.

A layer of the encoder is two blocks, of the attention and the dense family. They are replicated on every rank, unless `mesh.towers` splits
them.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

from megaplan.families.attention import ATTENTION
from megaplan.families.attention.section import GroupedQueryAttention
from megaplan.families.attention.variants import AttentionPlace, AttentionVariant
from megaplan.families.dense import DENSE
from megaplan.families.dense.section import Mlp
from megaplan.families.family import Family
from megaplan.families.residual import ResidualPath, norm_tensors, tensors_of
from megaplan.inventory.makers import replicated
from megaplan.inventory.tensors import Block, Group, Init, Outside, Owner, ParamTensor, make_block
from megaplan.spec.towers import Encoder, Projection, Towers

PATCHES, FIRST_NORM, LAST_NORM = "vision.patches", "vision.first_norm", "vision.last_norm"
"""Blocks of the encoder outside its layers, whose names are `vision.layers.{i}.attention` and `vision.layers.{i}.mlp`."""
PROJECTOR = Outside.PROJECTOR.value
STATED = frozenset({Outside.VISION, Outside.PROJECTOR})
"""Parts whose blocks run."""
BIDIRECTIONAL = AttentionVariant(causal=False)


class EncoderBlock(NamedTuple):
    """A kind of block of an encoder's layers: its family, and the arguments of the family's functions."""

    family: Family
    section: Any
    variant: AttentionVariant | None
    operations: AttentionPlace | None


@lru_cache(maxsize=32)
def encoder_blocks(encoder: Encoder) -> dict[str, EncoderBlock]:
    """The two blocks of a layer, by name."""
    attention = GroupedQueryAttention(
        kind="gqa",
        num_heads=encoder.num_heads,
        num_kv_heads=encoder.num_kv_heads or encoder.num_heads,
        head_dim=encoder.head_dim,
        qk_norm=encoder.qk_norm,
        bias=encoder.bias,
        output_bias=encoder.output_bias,
        nope_layers=() if encoder.rotary else (0,),
    )
    mlp = Mlp(ffn_hidden_size=encoder.ffn_hidden_size, activation=encoder.activation, bias=encoder.mlp_bias)
    return {
        "attention": EncoderBlock(ATTENTION, attention, BIDIRECTIONAL, AttentionPlace(encoder.rotary)),
        "mlp": EncoderBlock(DENSE, mlp, None, None),
    }


def by_part(names: Iterable[str]) -> list[str]:
    """Names of blocks for a text; all blocks of an encoder are `vision`."""
    return list(dict.fromkeys("vision" if name.startswith("vision.") else name for name in names))


def block_of(encoder: Encoder, name: str) -> EncoderBlock | None:
    """The kind of the block of a layer with this name in the inventory; None for another block."""
    return encoder_blocks(encoder).get(name.rpartition(".")[2])


def stated_blocks(towers: Towers, *, split: bool = False) -> tuple[tuple[str, Block], ...]:
    """Blocks of a stated encoder and of its projection in execution order, with their names; none without. TP shards them if `split`."""
    stated = towers.stated
    if stated is None:
        return ()
    encoder, projection = stated
    trained = {part: towers.trains(part) for part in ("vision", PROJECTOR)}
    kinds = _kinds(encoder, trained=trained["vision"], split=split)
    return (
        (PATCHES, kinds["patches"]),
        *([(FIRST_NORM, kinds["norm"])] if encoder.first_norm else []),
        *((f"vision.layers.{index}.{name}", kinds[name]) for index in range(encoder.num_layers) for name in encoder_blocks(encoder)),
        *([(LAST_NORM, kinds["norm"])] if encoder.last_norm else []),
        (PROJECTOR, _block(Outside.PROJECTOR, projection_tensors(projection), trained=trained[PROJECTOR])),
    )


def _kinds(encoder: Encoder, *, trained: bool = False, split: bool = False) -> dict[str, Block]:
    """The kinds of blocks of an encoder: patches, norm, and the kinds of a layer."""
    path, width = ResidualPath(encoder.norm), encoder.hidden_size
    found: dict[str, Iterable[ParamTensor]] = {"patches": _patches(encoder), "norm": norm_tensors(encoder.norm, width, prefix="")}
    for name, each in encoder_blocks(encoder).items():
        found[name] = tensors_of(path, each.family.tensors(each.section, width, each.variant), width)
    return {name: _block(Outside.VISION, tensors, trained=trained, split=split) for name, tensors in found.items()}


def encoder_size(encoder: Encoder) -> int:
    """Parameters of an encoder."""
    sizes = {name: block.elements for name, block in _kinds(encoder).items()}
    layers = encoder.num_layers * sum(sizes[name] for name in encoder_blocks(encoder))
    return sizes["patches"] + sizes["norm"] * (encoder.first_norm + encoder.last_norm) + layers


def _block(part: Outside, tensors: Iterable[ParamTensor], *, trained: bool, split: bool = False) -> Block:
    found = (tensor if split else tensor._replace(owner=Owner.REPLICATED, tp_dim=None, tp_parts=()) for tensor in tensors)
    return make_block(part, tuple(tensor if trained else tensor._replace(group=Group.FROZEN) for tensor in found))


def _patches(encoder: Encoder) -> list[ParamTensor]:
    tensors = [replicated("proj.weight", (encoder.hidden_size, encoder.patch_values), Group.MATRIX)]
    if encoder.patch_bias:
        tensors.append(replicated("proj.bias", (encoder.hidden_size,), Group.OTHER, Init.ZEROS))
    if encoder.positions is not None:
        tensors.append(replicated("positions", (encoder.positions, encoder.hidden_size), Group.OTHER))
    return tensors


def projection_tensors(projection: Projection) -> list[ParamTensor]:
    """The norm and the linears of a projection."""
    tensors: list[ParamTensor] = []
    if projection.norm is not None:
        tensors += norm_tensors(projection.norm, projection.widths[0] // (1 if projection.norms_joined else projection.joined_patches))
    for index, (inner, outer) in enumerate(zip(projection.widths, projection.widths[1:], strict=False)):
        tensors.append(replicated(f"linears.{index}.weight", (outer, inner), Group.MATRIX))
        if projection.bias:
            tensors.append(replicated(f"linears.{index}.bias", (outer,), Group.OTHER, Init.ZEROS))
    return tensors


def counted_block(towers: Towers) -> Block:
    """Parameters that are counted and not priced, a tensor a part: they are sharded, and no operation reads them."""
    groups = {name: Group.OTHER if towers.trains(name) else Group.FROZEN for name in towers.counted}
    return make_block(Outside.TOWERS, tuple(replicated(f"{name}.weight", (size,), groups[name]) for name, size in towers.counted.items()))


def tower_parameters(towers: Towers) -> dict[str, int]:
    """Parameters of each part, counted and stated."""
    found = {name: towers.counted.get(name, 0) for name in towers.given}
    for _, block in stated_blocks(towers):
        found[str(block.family)] += block.elements
    return found
