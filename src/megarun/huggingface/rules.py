"""Rules from a table of names: the pairs of our tensors and theirs, with their shapes; needs no torch."""

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

from megaplan.families.moe import EXPERTS
from megaplan.inventory.makers import replicated
from megaplan.inventory.tensors import Block, Group, Inventory, Outside, Owner, ParamTensor, make_block
from megaplan.spec.models import GroupedQueryAttention, LatentAttention, Model, Spec
from megarun.huggingface.names import ROWS, Modules, Names

EXPERT = "{expert}"
EXPERT_BIAS = "expert_bias"
"""The buffer of an E block that is stored with its parameters."""
_CONVOLUTIONS = ("conv1d.weight", ".conv.weight", "conv_qk.weight", "conv_v.weight")
_BANK_BIAS = "_proj_bias"
_CORRECTION = "router.correction"
"""Correction of the router, whose stack in Hugging Face has a leading dim of expert groups, of size one."""
_HALVES = ("qk_proj", "conv_qk", "latent_proj")
"""Our modules whose rows are two parts, which are separate modules of theirs."""


class Ours(NamedTuple):
    """A tensor of the inventory.

    Attributes:
        name: Full name of the tensor.
        shape: Unsharded.
        order: The index of each row in theirs, within groups of this number of rows; empty for the same order.
        parts: Number of equal parts of its rows; each group of theirs has one part of every tensor in order.
    """

    name: str
    shape: tuple[int, ...]
    order: tuple[int, ...] = ()
    parts: int = 1


class Rule(NamedTuple):
    """Some of our tensors and some of theirs, which hold the same values.

    Attributes:
        ours: One, or several whose rows are joined.
        theirs: One tensor of Hugging Face, or several in order: one per expert, or equal parts of the rows.
        shape: Shape of each of their tensors.
        transposed: True if theirs is [in, out].
        groups: Groups of rows in theirs, each with an equal share of rows of every tensor of ours.
        swapped: True if the two halves of its columns have the other order in theirs.
    """

    ours: tuple[Ours, ...]
    theirs: tuple[str, ...]
    shape: tuple[int, ...]
    transposed: bool = False
    groups: int = 1
    swapped: bool = False

    @property
    def joined(self) -> tuple[int, ...]:
        """The shape of ours joined, rows first; of a bank after the experts."""
        first, rows = self.ours[0].shape, self.row_dim
        return (*first[:rows], sum(each.shape[rows] for each in self.ours), *first[rows + 1 :])

    @property
    def stacked(self) -> bool:
        """True if our tensor is a stack of theirs."""
        return len(self.theirs) > 1

    @property
    def row_dim(self) -> int:
        """The dim of rows: 1 of a bank and of its biases."""
        first = self.ours[0]
        return 1 if (len(first.shape) == 3 and not first.name.endswith(_CONVOLUTIONS)) or first.name.endswith(_BANK_BIAS) else 0


def weight_rules(names: Names, spec: Spec, inventory: Inventory, config: Mapping[str, Any]) -> list[Rule]:
    """The rules of every tensor of a model.

    Args:
        names: Names of the model type.
        spec: Spec of the plan.
        inventory: Tensors of the spec.
        config: The fields of `config.json`.

    Raises:
        KeyError: The table has no name for a tensor.
    """
    orders = _orders(spec, pairs=names.pairs and config.get("rope_interleave") is not False)
    if names.index_pairs:
        orders |= _index_orders(spec)
    found: list[Rule] = []
    moe = spec.model.moe
    buffers = (replicated(EXPERT_BIAS, (moe.num_choices,), Group.OTHER),) if moe is not None and moe.expert_bias else ()
    for name, stored in inventory.blocks():
        block = stored._replace(tensors=(*stored.tensors, *buffers)) if stored.family == EXPERTS.letter else stored
        if name.startswith("layers."):
            layer = int(name.removeprefix("layers.")) // names.letters
            prefix = names.layer.format(layer=layer, expert=EXPERT)
            found += _of_block(names, spec.model, name, block, names.blocks[block.family], prefix, orders)
        elif stored.family == Outside.MTP:
            found += _of_depth(names, inventory, spec.model, name, stored, buffers, orders)
        else:
            own: Modules = {str(ours).removeprefix(name).removeprefix("."): theirs for ours, theirs in names.outside.items()}
            found += _of_block(names, spec.model, name, block, own, "", {})
    return found


def copied_rules(names: Names, inventory: Inventory) -> list[Rule]:
    """Further tensors of theirs that are copies of ours: tensors that a prediction depth shares with the model."""
    stored, found = dict(inventory.tensors()), list[Rule]()
    if names.depths is None:
        return found
    for name, block in inventory.outside:
        for theirs, ours in names.depths.copies.items() if block.family == Outside.MTP else ():
            tied = ours if ours in stored else "embedding.weight"
            shape = stored[tied].shape
            found.append(Rule((Ours(tied, shape),), (f"{_depth_prefix(names, inventory, name)}{theirs}",), shape))
    return found


def _depth_prefix(names: Names, inventory: Inventory, name: str) -> str:
    if names.depths is None:
        raise KeyError(name)
    layer = len(inventory.layers) // names.letters + int(name.rpartition(".")[2])
    return names.depths.prefix.format(layer=layer)


def _of_depth(
    names: Names, inventory: Inventory, model: Model, name: str, depth: Block, buffers: tuple[ParamTensor, ...], orders: Mapping[str, Any]
) -> Iterator[Rule]:
    """A depth's blocks, named as a decoder layer's, and its own projection and norms."""
    prefix = _depth_prefix(names, inventory, name)
    assert names.depths is not None
    own = list(depth.tensors)
    for module, letter in depth.variant:
        inside = tuple([each._replace(name=each.name.removeprefix(f"{module}.")) for each in own if each.name.startswith(f"{module}.")])
        own = [each for each in own if not each.name.startswith(f"{module}.")]
        block = make_block(letter, (*inside, *(buffers if letter == EXPERTS.letter else ())))
        modules = names.blocks[letter]
        yield from _of_block(names, model, f"{name}.{module}", block, modules, f"{prefix}{names.depths.block}", orders)
    for rule in _of_block(names, model, name, make_block(depth.family, tuple(own)), names.depths.modules, prefix, {}):
        yield rule._replace(swapped=rule.ours[0].name == f"{name}.proj.weight")


def _of_block(
    names: Names, model: Model, block_name: str, block: Block, modules: Modules, prefix: str, orders: Mapping[str, tuple[int, ...]]
) -> Iterator[Rule]:
    tensors = {tensor.name: tensor for tensor in block.tensors}
    fused = {member: key for key in modules if isinstance(key, tuple) for member in key}
    done: set[str] = set()
    for name, first in tensors.items():
        if name in done:
            continue
        module, leaf = _split(name, modules, fused)
        key = fused.get(module, module)
        joined = tuple(f"{each}{leaf}".removeprefix(".") for each in (key if isinstance(key, tuple) else (key,)))
        done.update(joined)
        theirs = modules[key]
        several = theirs if isinstance(theirs, tuple) else (theirs,)
        found = _rule(
            block_name,
            tuple(tensors[each] for each in joined),
            tuple(f"{prefix}{one}{leaf}" for one in several),
            orders,
            transposed=theirs in names.transposed and len(first.shape) > 1,
            whole_shape=names.shapes.get(several[0]),
        )
        yield found if several[0] not in names.groups else found._replace(groups=_groups(names.groups[several[0]], model, found))


def _groups(key: str, model: Model, rule: Rule) -> int:
    """The number of groups of rows in theirs."""
    if key == ROWS:
        return rule.ours[0].shape[rule.row_dim]
    section, _, name = key.partition(".")
    found: int = getattr(getattr(model, section), name)
    return found


def _split(name: str, modules: Modules, fused: Mapping[str, tuple[str, ...]]) -> tuple[str, str]:
    """The module in the table, and the rest of the name: a table may also name a tensor."""
    if name in modules or name in fused:
        return name, ""
    module, _, leaf = name.rpartition(".")
    if module not in modules and module not in fused:
        raise KeyError(name)
    return module, f".{leaf}"


def _rule(
    block_name: str,
    tensors: tuple[ParamTensor, ...],
    theirs: tuple[str, ...],
    orders: Mapping[str, tuple[int, ...]],
    *,
    transposed: bool,
    whole_shape: tuple[int, ...] | None = None,
) -> Rule:
    modules = [each.name.rpartition(".")[0] for each in tensors]
    ours = tuple(
        Ours(f"{block_name}.{each.name}", each.shape, orders.get(module, ()), 2 if module in _HALVES else 1)
        for each, module in zip(tensors, modules, strict=True)
    )
    numbered = EXPERT in theirs[0]
    names = tuple(theirs[0].replace(EXPERT, str(expert)) for expert in range(tensors[0].shape[0])) if numbered else theirs
    rule = Rule(ours, names, (), transposed)
    first, *rest = rule.joined
    shape = tuple(rest) if numbered else (first // len(names), *rest)
    if transposed:
        shape = (*shape[:-2], shape[-1], shape[-2])
    if ours[0].name.endswith(_CONVOLUTIONS):
        shape = (shape[0], 1, shape[1])
    if ours[0].name.endswith(_CORRECTION):
        shape = (1, *shape)
    if whole_shape:
        shape = tuple(prod(shape) if size < 0 else size for size in whole_shape)
    rule = rule._replace(shape=shape)
    wrong = tensors[0].owner is Owner.EXPERT_PARALLEL and rule.row_dim != 1
    if wrong or prod(shape) * len(names) != sum(tensor.elements for tensor in tensors):
        raise ValueError(f"{ours[0].name} {ours[0].shape} is not {len(names)} times {shape}")
    return rule


def _orders(spec: Spec, *, pairs: bool) -> dict[str, tuple[int, ...]]:
    """The order of rows under rotary embedding: theirs begins with a head's rotated dims, ours ends with them."""
    attention = spec.model.attention
    if isinstance(attention, GroupedQueryAttention):
        width = attention.head_dim
        turned = attention.rotary_dim or width
        order = (*range(turned, width), *_halves(turned, pairs=pairs))
        return {} if order == tuple(range(width)) else dict.fromkeys(("q_proj", "k_proj", "q_norm", "k_norm"), order)
    if not isinstance(attention, LatentAttention) or not pairs:
        return {}
    halves = _halves(attention.qk_rope_head_dim, pairs=pairs)

    def behind(straight: int) -> tuple[int, ...]:
        return (*range(straight), *(straight + each for each in halves))

    head = behind(attention.qk_nope_head_dim)
    return {"q_proj": head, "q_up": head, "kv_down": behind(attention.kv_lora_rank)}


def _index_orders(spec: Spec) -> dict[str, tuple[int, ...]]:
    """The order of rows of an indexer whose first dims are turned in pairs."""
    attention = spec.model.attention
    if not isinstance(attention, LatentAttention) or attention.indexer is None:
        return {}
    turned, width = attention.qk_rope_head_dim, attention.indexer.head_dim
    order = (*_halves(turned, pairs=True), *range(turned, width))
    return {f"indexer.{name}": order for name in ("q_up", "k_proj", "k_norm")}


def _halves(width: int, *, pairs: bool) -> tuple[int, ...]:
    """Dims of neighbouring pairs as two halves, or in their order."""
    return (*range(0, width, 2), *range(1, width, 2)) if pairs else tuple(range(width))
