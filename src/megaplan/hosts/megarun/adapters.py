"""A block's program under `lora`: its own parameters have no gradients; A and B of adapted linears have.

A frozen linear saves no activation, because only its weight gradient would need its input; torch's product saves its weight, so a
recomputed region that ends with a frozen linear is recomputed when that linear's backward begins. An adapted linear saves its input and the
product with A, […, rank]. Its backward makes the gradient of that product, A's and B's gradients, and the input's, into which both products
are added. Under TP a column-parallel linear gathers its input again in backward only if an adapter reads it. A product with a frozen scale
saves nothing. Every other operation saves the same tensors, and makes no parameter gradient.

Source: `megarun.parallel.groups.adapters`.
"""

from functools import cache, lru_cache, partial
from math import prod

from megaplan.blocks.ops import BANK, OUTPUT, BlockProgram, Dims, Flow, Op
from megaplan.blocks.storages import INSIDE_BACKWARD, Shapes, storages
from megaplan.columns import Column
from megaplan.hosts.megarun.packed import packed_weights, unpacked_op, unpacked_shapes
from megaplan.hosts.megarun.parts import BlockReplay
from megaplan.hosts.megarun.program import CALLER, Replay, replay
from megaplan.inventory.adapters import A_SUFFIX, B_SUFFIX, adapted_linears, linear_of
from megaplan.inventory.tensors import Block
from megaplan.spec.lora import Lora

NARROW, NARROW_GRADIENT = ".narrow", ".narrow_gradient"
WEIGHT = ".weight"


def adapted_program(program: BlockProgram, shapes: Shapes, block: Block, lora: Lora, dims: Dims) -> tuple[BlockProgram, Shapes]:
    """A layer's program and storages with adapters.

    Args:
        program: The family's program.
        shapes: Storages of the program.
        block: The layer's tensors.
        lora: Section of the spec.
        dims: Local sizes.
    """
    linears = frozenset(f"{name}{WEIGHT}" for name in adapted_linears(lora, block))
    packed = packed_weights(program) if lora.base is not None else frozenset[str]()
    weights = {each.name: each.local_shape(dims.tp, dims.ep, dims.etp) for each in block.tensors if each.name in packed}
    found: dict[str, tuple[int, ...]] = {}
    found_storages = dict(shapes)
    for op in program.ops:
        narrow: dict[str, int] = {}
        for param, made in op.late:
            if param in linears:
                wide = shapes[made][2]
                shape = (*wide[: min(2, len(wide) - 1)], lora.rank)  # rows of experts' latents have one dim, tokens have two
                found |= {made + NARROW: shape, made + NARROW_GRADIENT: shape}
                narrow[param] = prod(shape)
        found_storages |= unpacked_shapes(op, shapes, weights, narrow, dims.dtype)
    found_storages |= storages(dims.dtype, Column.ACTIVATIONS, found)
    unused = _unused_bytes(program, block, dims) if INSIDE_BACKWARD in shapes else 0
    if unused:
        size, *rest = shapes[INSIDE_BACKWARD]
        found_storages[INSIDE_BACKWARD] = (size + unused, *rest)  # type: ignore[assignment]  # a storage with another size
    return _with_adapters(program, linears, packed), found_storages


def adapted_from(program: BlockProgram, letter: str, lora: Lora) -> BlockProgram:
    """A layer's program with adapters, as `adapted_program` makes it, from its letter."""
    linears = ((param, linear_of(param)) for op in program.ops for param, _ in op.late)
    packed = packed_weights(program) if lora.base is not None else frozenset[str]()
    return _with_adapters(program, frozenset(param for param, name in linears if name is not None and lora.adapts(letter, name)), packed)


def _unused_bytes(program: BlockProgram, block: Block, dims: Dims) -> int:
    """Bytes of gradients of a scan's parameters, a few numbers per head, which its kernel computes with the other gradients and drops.

    Under CP all gradients of a piece are kernel scratch until they are copied into the rank's gradients.
    """
    if dims.cp > 1:
        return 0
    sizes = {tensor.name: tensor.local_elements(dims.tp, dims.ep, dims.etp) for tensor in block.tensors}
    params = [name for op in program.ops if INSIDE_BACKWARD in op.fetches and op.name != BANK for name in op.params]
    return sum([sizes[name] for name in params]) * dims.dtype.bytes


def frozen_part(part: BlockReplay, *, embeds: bool) -> BlockReplay:
    """A part outside the layers without parameter gradients; embeddings have none at all, and save nothing."""
    return BlockReplay(_frozen(part.replay, embeds=embeds), part.tensors)


@cache
def _frozen(run: Replay, *, embeds: bool) -> Replay:
    ops, program = tuple(adapted_op(op, frozenset()) for op in run.program.graph.ops), run.program
    if embeds:
        ops = tuple(op if op.flow is Flow.ADD and OUTPUT in op.makes else _without_gradient(op) for op in ops)
    found = partial(replay, ops, program.graph.held, starts=CALLER in program.arriving, pinned=program.pinned)
    frozen = found()
    return found(counts_input=True) if run.keeps_input and not frozen.keeps_input else frozen


def _without_gradient(op: Op) -> Op:
    return op._replace(keeps=(), grads=(), fetches=(), flow=Flow.COMPUTE if op.flow is Flow.ADD else op.flow)


@lru_cache(maxsize=256)
def _with_adapters(program: BlockProgram, linears: frozenset[str], packed: frozenset[str]) -> BlockProgram:
    ops = tuple(unpacked_op(adapted_op(op, linears), op, packed) for op in program.ops)
    # the product that ends a recomputed region is not recomputed; with an adapter it is recomputed up to its low-rank rows, which it saves
    made_again = {name for op in program.ops if op.name in program.reruns for name in op.makes}
    ends = {op.name for op in ops if op.name not in program.after and _is_adapted(op) and op.keeps[0] in made_again}
    return BlockProgram(ops, program.held, program.reruns | ends, program.caches, program.after)


def adapted_op(op: Op, linears: frozenset[str]) -> Op:
    """An operation with frozen parameters; `linears` are the weights with adapters."""
    if not op.late:
        op = op._replace(params=tuple(name for name in op.params if name.endswith((A_SUFFIX, B_SUFFIX))), sums=())
        return op._replace(keeps=(), fetches=()) if op.for_params else op
    own = [(param, made) for param, made in op.late if param in linears]
    if not own:
        return op._replace(params=(), keeps=(), late=(), late_fetches=())
    names = [param.removesuffix(WEIGHT) for param, _ in own]
    return op._replace(
        makes=(*op.makes, *(made + NARROW for _, made in own)),
        keeps=(*op.keeps, *(made + NARROW for _, made in own)),
        params=tuple(f"{name}.{suffix}" for name in names for suffix in (A_SUFFIX, B_SUFFIX)),
        grads=op.reads if op.grads is None else op.grads,
        fetches=(*op.fetches, *op.late_fetches, *(made + NARROW_GRADIENT for _, made in own)),
        late=(),
        late_fetches=(),
        hands_views=False,
        keeps_first=False,
    )


def _is_adapted(op: Op) -> bool:
    return any(name.endswith(NARROW) for name in op.makes)
