"""`block_ledger`: tensors that a block of the inventory saves for backward on one rank, per microbatch."""

from dataclasses import replace
from functools import cache
from math import prod
from typing import Any

from megaplan.blocks.ops import PLAIN_UP, TAKE, BlockProgram, Dims, Op, UpProjection, given
from megaplan.blocks.payload import Payload
from megaplan.blocks.storages import Shapes, storages
from megaplan.columns import Column
from megaplan.dtypes import DType
from megaplan.families.attention.composition import sizes_of_layer
from megaplan.families.registry import FAMILIES, families_of
from megaplan.families.residual import NORMED, SharedNorm, cast_program, cast_shapes, path_in, program_of, shapes_of, shared_by
from megaplan.hosts.megarun.adapters import adapted_from, adapted_program, frozen_part
from megaplan.hosts.megarun.embedding import boundary_bytes, embedding_part, final_norm_part, relation_bias_part, side_part
from megaplan.hosts.megarun.halves import splittable_part
from megaplan.hosts.megarun.head import depth_shapes, head_part, low_head, mtp_part
from megaplan.hosts.megarun.low_attention import attends, attention_in_eight_bits
from megaplan.hosts.megarun.parts import BlockBytes, BlockReplay, ledger, replay_of, weigh
from megaplan.hosts.megarun.scaled import NOTHING_KEPT, Call, in_eight_bits, scaled_calls, scaled_program
from megaplan.hosts.megarun.scaled_experts import keeps_copy
from megaplan.hosts.megarun.sizes import gradient_dtype
from megaplan.hosts.megarun.towers import merged_part, tower_part, tower_sizes
from megaplan.hosts.values import BlockLedger, BlockVariant
from megaplan.inventory.tensors import Block, Group, Inventory, Outside, layer_names
from megaplan.inventory.towers import STATED
from megaplan.low_precision import SCALINGS, RecipeName
from megaplan.schedules.registry import SPLIT_BACKWARD
from megaplan.spec.local import local_dims, packed_gather
from megaplan.spec.models import SIDES, LatentAttention, Spec
from megaplan.spec.pattern import parse_pattern


def block_ledger(spec: Spec, block_name: str, block: Block, start: int = 0) -> BlockLedger:
    """Kept and temporary tensors of one block per microbatch, on a rank that holds it.

    Args:
        spec: A checked spec.
        block_name: Name in the inventory: `layers.7`, `embedding`, `head`, `mtp.0` …; `head` also names a tied head.
        block: The inventory's block of that name (for a tied head, `embedding`'s).
        start: First layer of its stage.

    Returns:
        The ledger, by storage. `embedding`'s and the features' output is the residual stream, `final_norm`'s the head's input, `head`'s
        the loss.

    Raises:
        ValueError: The block's family has no section in the spec (an unchecked spec).
    """
    dims, in_place = local_dims(spec), accumulates_in_place(spec, block)
    gradients = parameter_gradients(spec, dims, block_name, block)
    return ledger(block_bytes(spec, dims, block_name, block, start=start), gradients, in_place=in_place)


def block_bytes(spec: Spec, dims: Dims, block_name: str, block: Block, *, start: int = 0) -> BlockBytes:
    """The sums of a block's ledger; `dims` are the spec's, computed once for all its blocks. Its stage begins with layer `start`."""
    dtype, mesh = gradient_dtype(spec, block), spec.mesh
    dims = dims._replace(dtype=dtype) if block_name.startswith("layers.") else dims
    size, part = dtype.bytes, _part(spec, dims, block_name, block, dtype, start)
    if spec.lora is not None and not block_name.startswith("layers.") and block.family not in STATED:
        part = frozen_part(part, embeds=block_name in ENDS)
    if spec.schedule.kind in SPLIT_BACKWARD and block_name.startswith("layers."):
        part = splittable_part(part, dims)
    if mesh.tp == mesh.ep == mesh.etp == 1 and block.family is not Outside.MTP and block_name != "head":
        gradients = {name: elements * size for name, elements in block.trained}
    else:
        gradients = {name: prod(shape) * size for name, shape in parameter_shapes(spec, dims, block_name, block).items()}
    return weigh(part, gradients, in_place=dtype is spec.precision.grads)


def layer_kept_bytes(spec: Spec, name: str, block: Block) -> int:
    """Bytes that a layer keeps of one microbatch, its input included."""
    dims = local_dims(spec)
    found = block_bytes(spec, dims, name, block)
    return found.saved_bytes + boundary_bytes(dims) * found.keeps_input


def attends_in_eight_bits(spec: Spec, layer: int, letter: str) -> bool:
    """True if the attention of layer `layer` (global index, with this letter) multiplies eight-bit operands."""
    recipe = spec.precision.recipe
    return recipe is not None and recipe.attention and spec.multiplies_in_eight_bits(layer, letter)


ENDS = ("embedding", *SIDES)
"""Blocks before the layers; under `lora` no gradient reaches them."""


def block_variants(spec: Spec, inventory: Inventory) -> dict[str, BlockVariant]:
    """The variant of each block by name; `head` is included for a tied head too."""
    return {name: variant for variant, names in named_variants(spec, inventory).items() for name in names}


def named_variants(spec: Spec, inventory: Inventory) -> dict[BlockVariant, list[str]]:
    """The names of the blocks of each variant: each is evaluated once. Callers must not change the result, which the inventory caches."""
    key = (
        spec.precision.recipe,
        spec.batch.images,
        spec.recompute.towers,
        *[spec.recompute.of(family.letter) for family, _ in families_of(spec.model)],
    )
    found: dict[BlockVariant, list[str]] | None = inventory.variants.get(key)
    if found is None:
        found = inventory.variants[key] = {}
        for name, variant in _block_variants(spec, inventory).items():
            found.setdefault(variant, []).append(name)
    return found


def _block_variants(spec: Spec, inventory: Inventory) -> dict[str, BlockVariant]:
    last, model = len(inventory.layers) - 1, spec.model
    given = {family.letter: (family.operations, section, spec.recompute.of(family.letter)) for family, section in families_of(model)}
    read, made = {value.readers[0] for value in model.payload}, dict[str, BlockVariant]()
    for index, (name, block) in enumerate(zip(layer_names(len(inventory.layers)), inventory.layers, strict=True)):
        operations, section, policy = given[block.family]
        own = str(policy) if index != last else "none"
        readers = model.norm_readers(index)
        if len(readers) > 1:
            own = f"{own}, at {readers.index(index)} of {[_reader(spec, inventory, each) for each in readers]}"
        if spec.precision.is_low(block.family, index, len(inventory.layers)):
            own = f"{own} in low precision"
        if index in read and (taken := taken_values(spec, index, 0)):
            own = f"{own}, takes {taken}"
        made[name] = id(block), operations(section, index), own
    for name, block in inventory.outside:
        if block.family is Outside.TOWERS:  # no operation of the stack reads a tower's tensors
            continue
        own = name if block.family is Outside.MTP else "head" if name == "head" else "none"
        if block.family in (*STATED, Outside.EMBEDDING):
            own = f"{spec.recompute.towers}, {spec.batch.images} images, {spec.mesh.towers}"
        made[name] = id(block), None, own
    if inventory.tied:
        made["head"] = id(inventory.block("embedding")), None, "head"
    return made


def _reader(spec: Spec, inventory: Inventory, layer: int) -> tuple[int, str, bool]:
    """The facts that decide how a layer uses a norm that it shares."""
    block = inventory.layers[layer]
    return id(block), spec.policy(layer, block.family), spec.multiplies_in_eight_bits(layer, block.family)


def accumulates_in_place(spec: Spec, block: Block) -> bool:
    """True if gradients are added into a buffer of the dtype in which autograd makes them, without a cast at the block's end."""
    return gradient_dtype(spec, block) is spec.precision.grads


def parameter_gradients(spec: Spec, dims: Dims, name: str, block: Block) -> Shapes:
    """Unsharded gradients of a block's parameters as autograd makes them, by parameter name."""
    return storages(gradient_dtype(spec, block), Column.GRADIENTS, parameter_shapes(spec, dims, name, block))


def parameter_shapes(spec: Spec, dims: Dims, name: str, block: Block) -> dict[str, tuple[int, ...]]:
    """Shapes of the gradients that a block makes, by parameter name.

    A tied head makes a gradient of the embedding's weight. The first MTP depth also passes on those of the token embedding and the head,
    which autograd holds until their last use.
    """
    mesh, tied = spec.mesh, name == "head" and block.family is Outside.EMBEDDING
    trained = [tensor for tensor in block.tensors if tensor.group is not Group.FROZEN and (not tied or tensor.name == "weight")]
    if mesh.tp == mesh.ep == mesh.etp == 1:
        shapes = {tensor.name: tensor.shape for tensor in trained}
    else:
        shapes = {tensor.name: tensor.local_shape(mesh.tp, mesh.ep, mesh.etp) for tensor in trained}
    if block.family is Outside.MTP:
        vocab = spec.model.vocab_size // (mesh.tp if mesh.vocab_parallel else 1)
        shapes |= depth_shapes(spec.model, name, (vocab, dims.hidden))
    return shapes


def _part(spec: Spec, dims: Dims, name: str, block: Block, parameters: DType, start: int) -> BlockReplay:
    if name.startswith("layers."):
        return _layer_part(spec, dims, int(name.removeprefix("layers.")), block, parameters, start)
    model, features, vocab_parallel, images = spec.model, spec.model.features, spec.mesh.vocab_parallel, tower_sizes(spec)
    if images is not None and block.family in STATED:
        return tower_part(spec, images, dims, name, parameters)
    joined = model.joins_loss(kernels=spec.host.uses_triton)
    if name == "head":
        return head_part(
            dims,
            model.vocab_size,
            vocab_parallel=vocab_parallel,
            pipelined=spec.mesh.is_pipelined,
            joined=joined,
            bias=model.head_bias,
            capped=model.logits_cap is not None,
            low=low_head(spec),
        )
    match block.family:
        case Outside.EMBEDDING:
            scaled = model.embedding_multiplier != 1
            normed, placed = model.norm if model.embedding_norm else None, model.learned_positions is not None
            part = embedding_part(dims, vocab_parallel=vocab_parallel, positions=placed, scaled=scaled, normed=normed)
            part = part if images is None else merged_part(spec, images, dims, part)
        case Outside.FINAL_NORM:
            part = final_norm_part(dims, model)
        case Outside.NGRAM | Outside.STRUCTURE | Outside.PLATFORM | Outside.LAYER_EMBEDDINGS:
            part = side_part(dims, features, block.family)
        case Outside.RELATION_BIAS:
            part = relation_bias_part(dims)
        case _:
            depth = int(name.removeprefix("mtp."))
            part = mtp_part(dims, model, depth, parameters, vocab_parallel=vocab_parallel, joined=joined, low=low_head(spec))
    return part


def layer_calls(spec: Spec, inventory: Inventory, index: int) -> tuple[Call, ...]:
    """The calls of a layer's linears that multiply in eight bits; empty if the layer stays in 16 bits."""
    block = inventory.layers[index]
    if _recipe_of(spec, index, block.family) is None:
        return ()
    dims = local_dims(spec)
    program, _ = _family_program(spec, dims, index, block.family, block.variant, gradient_dtype(spec, block))
    return scaled_calls(program, spec.policy(index, block.family), _kept_by_others(spec, dims, index))


def bank_keeps_copy(spec: Spec, inventory: Inventory, index: int) -> bool | None:
    """True if a layer's bank, in eight bits, saves a copy instead of its input; None without a bank, or if it keeps 16 bits."""
    block = inventory.layers[index]
    if _recipe_of(spec, index, block.family) is None:
        return None
    program, _ = _family_program(spec, local_dims(spec), index, block.family, block.variant, gradient_dtype(spec, block))
    return keeps_copy(program, spec.policy(index, block.family), emulated=spec.emulates_products)


def _family_program(spec: Spec, dims: Dims, index: int, letter: str, variant: Any, parameters: DType) -> tuple[BlockProgram, Shapes]:
    family = FAMILIES[letter]
    section = family.section_of(spec.model)
    if spec.multiplies_in_eight_bits(index, letter):
        dims = dims._replace(gathers=True)
    dims = dims._replace(up=_up_projection(spec, index, letter))
    program, shapes = family.program(dims, section, variant, family.operations(section, index), parameters)
    if attends_in_eight_bits(spec, index, letter) and attends(program):
        return attention_in_eight_bits(program, shapes, sizes_of_layer(dims, section, variant))
    return program, shapes


def _up_projection(spec: Spec, index: int, letter: str) -> UpProjection:
    """The product with which the attention of layer `index`, with this letter, expands gathered latents; None if it gathers none."""
    attention, lora = spec.model.attention, spec.lora
    if letter != "A" or not spec.mesh.gathers_latents or not isinstance(attention, LatentAttention):
        return PLAIN_UP
    if lora is not None:
        return UpProjection(rank=lora.rank * lora.adapts(letter, "kv_up"), unpacks=lora.base is not None)
    recipe, packs = _recipe_of(spec, index, letter), packed_gather(spec)
    if recipe is None:
        return PLAIN_UP
    rows = attention.num_heads // spec.mesh.tp * (attention.qk_nope_head_dim + attention.v_head_dim)
    packed = packs is not None and packs.fits((rows, attention.kv_lora_rank))
    return UpProjection(SCALINGS[recipe], spec.host.uses_triton, packed)


def _layer_part(spec: Spec, dims: Dims, index: int, block: Block, parameters: DType, start: int) -> BlockReplay:
    program, tensors = _family_program(spec, dims, index, block.family, block.variant, parameters)
    if taken := taken_values(spec, index, start):
        program = _taking(program, taken)
    recipe = _recipe_of(spec, index, block.family)
    policy = spec.policy(index, block.family)
    if recipe is not None:
        parameters_by_name = parameter_shapes(spec, dims, f"layers.{index}", block)
        packs = packed_gather(spec)
        packed = frozenset(
            name for name, shape in parameters_by_name.items() if packs and packs.shard_bytes(block.family, name, shape) is not None
        )
        fused = spec.host.uses_triton
        others = _kept_by_others(spec, dims, index)
        program, tensors = in_eight_bits(program, tensors, recipe, parameters_by_name, policy, fused=fused, packed=packed, others=others)
    path = path_in(spec.model.residual_path, block)
    fields = vars(FAMILIES[block.family].section_of(spec.model))  # pydantic's own lookup of a missing field costs more than the rest
    path = path._replace(passes_on=_passed_on(spec, dims, index), scaled=fields.get("output_multiplier", 1) != 1)
    if path.shares_input:
        path = path._replace(holds_shared=not _norm_is_kept(spec, dims, index), shared_dtype=_cast_norm(spec, index))
    program, tensors = program_of(path, program), shapes_of(path, tensors, dims)
    if spec.lora is not None:
        program, tensors = adapted_program(program, tensors, block, spec.lora, dims)
    if spec.precision.activations is not dims.dtype:
        program, tensors = cast_program(program), cast_shapes(path, tensors, dims._replace(dtype=spec.precision.activations))
    return BlockReplay(replay_of(program, policy), tensors)


def taken_values(spec: Spec, index: int, start: int) -> tuple[str, ...]:
    """Values by name that a layer saves for an earlier layer of its stage; the stage begins with layer `start`.

    The layer is their first reader, whose backward is the last, and the layer that made them does not save them.
    """
    return tuple([value.name for value in spec.model.payload if value.readers[0] == index and value.source >= start and drops(spec, value)])


def drops(spec: Spec, value: Payload) -> bool:
    """True if the layer that passes a value on does not save it for its own backward."""
    return value.kept == "no" or (value.kept == "result" and spec.policy(value.source, value.letter) == "full")


@cache
def _taking(program: BlockProgram, names: tuple[str, ...]) -> BlockProgram:
    return replace(program, ops=(Op(TAKE, (), tuple(map(given, names))), *program.ops))


def _passed_on(spec: Spec, dims: Dims, index: int) -> SharedNorm | None:
    """Use of a layer's norm by later layers; None if no other layer reads it. The layers in between have summed its gradient."""
    found = [_use_of_norm(spec, dims, layer, _kept_by_others(spec, dims, layer)) for layer in spec.model.sharing(index)]
    if not found:
        return None
    gradient = found[0].gradient if len(found) == 1 else "whole"
    return SharedNorm(gradient, any(each.keeps for each in found), any(each.waits for each in found))


def _norm_is_kept(spec: Spec, dims: Dims, index: int, but: int | None = None) -> bool:
    """True if a layer other than `but` keeps the shared norm in 16 bits, so that no layer keeps its own 8-bit copy instead."""
    first, *others = spec.model.norm_readers(index)
    keeping = [layer for layer in others if layer != but]
    keeping += [] if first == but or spec.policy(first, _letter(spec, first)) == "full" else [first]  # which makes it again
    return any(_use_of_norm(spec, dims, layer).keeps for layer in keeping)


def _kept_by_others(spec: Spec, dims: Dims, index: int) -> frozenset[str]:
    """Storages of a layer that other layers keep: the norm that it shares."""
    if not spec.model.parallel_layers or _cast_norm(spec, index) is not None or not _norm_is_kept(spec, dims, index, index):
        return NOTHING_KEPT
    return frozenset({NORMED})


def _cast_norm(spec: Spec, layer: int) -> DType | None:
    """Dtype of the norm that a layer shares, if the layer casts it into its own."""
    made, own = (spec.precision.of(_letter(spec, each)).of_products for each in (spec.model.norm_readers(layer)[0], layer))
    return None if made is own else made


def _use_of_norm(spec: Spec, dims: Dims, layer: int, others: frozenset[str] = NOTHING_KEPT) -> SharedNorm:
    """Use of a shared norm by a layer; `others` are storages that other layers keep."""
    letter = _letter(spec, layer)
    if _cast_norm(spec, layer) is not None:
        return SharedNorm("whole", spec.policy(layer, letter) == "full")
    family = FAMILIES[letter]
    section, place = family.section_of(spec.model), parse_pattern(spec.model.pattern, spec.model.num_layers).layers[:layer].count(letter)
    dtype = spec.precision.of(letter).of_products
    program, _ = _family_program(spec, dims._replace(dtype=dtype), layer, letter, family.variant(section, layer, place), dtype)
    recipe, policy = _recipe_of(spec, layer, letter), spec.policy(layer, letter)
    if recipe is not None:
        program = scaled_program(program, policy, recipe, others).program
    if spec.lora is not None:
        program = adapted_from(program, letter, spec.lora)
    return shared_by(program, policy)


def _letter(spec: Spec, layer: int) -> str:
    return parse_pattern(spec.model.pattern, spec.model.num_layers).layers[layer]


def _recipe_of(spec: Spec, layer: int, letter: str) -> RecipeName | None:
    """The recipe of a layer; None if it keeps 16 bits."""
    given = spec.precision.recipe
    return None if given is None or not spec.precision.is_low(letter, layer, spec.model.num_layers) else given.name
