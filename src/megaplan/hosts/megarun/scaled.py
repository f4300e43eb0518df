"""A block's program whose linears multiply in eight bits, as megarun runs them (`megarun.parallel.groups.scaled`).

Linears of one call share the copies of their input. A call saves its input's copy for the weight gradients, with scales, before the
products: a recomputed region that ends in a call does not repeat its products. If another operation saves the input in 16 bits anyway, or
another call reads it too, the input itself is saved and quantised again in backward. Under TP a column-parallel call saves the copy of the
rank's own tokens, scaled like all tokens, and gathers it in backward: one byte per element instead of two.
"""

from collections.abc import Mapping
from functools import lru_cache
from math import prod
from typing import NamedTuple

from megakernels.ops.fp8_linear.facts import ONE_SCALE, BlockLinears, ScaledLinears, low_linears
from megaplan.blocks.ops import BlockProgram, Op, partial_gradient
from megaplan.blocks.storages import Shapes, Stored
from megaplan.columns import Basis, Column
from megaplan.dtypes import DType
from megaplan.hosts.megarun.graph import roots_of
from megaplan.hosts.megarun.scaled_experts import bank_in_eight_bits
from megaplan.low_precision import SCALINGS, RecipeName

LOW, SCALES, WHOLE, GATHERED = ".low", ".low_scales", ".low_whole", ".low_gathered"
IN_KEEPING, IN_FORWARD, IN_INPUT, IN_WEIGHTS = ".in_keeping", ".in_forward", ".in_input_gradient", ".in_weight_gradients"

NOTHING_KEPT = frozenset[str]()


class Call(NamedTuple):
    """Linears that megarun multiplies in one call.

    Attributes:
        name: Name of the first linear.
        source: The storage or view that they read.
        gathered: The gathered input, if tokens are gathered first, else None.
        weights: Weights of the linears.
        keeps_low: True if the input's copy is saved instead of the input.
    """

    name: str
    source: str
    gathered: str | None
    weights: tuple[str, ...]
    keeps_low: bool


class Scaled(NamedTuple):
    """A program in eight bits, and its calls in order."""

    program: BlockProgram
    calls: tuple[Call, ...]


def scaled_calls(program: BlockProgram, policy: str, others: frozenset[str] = NOTHING_KEPT) -> tuple[Call, ...]:
    """The calls of a block's linears.

    Args:
        program: The family's program of the block.
        policy: Recompute policy of the block; a selective checkpoint keeps the outputs of operations that it does not run again.
        others: Storages that other blocks keep.
    """
    roots, groups = roots_of(program.ops), _groups(program.ops)
    linears = {op.name for ops in groups for op in ops}
    kept = others | {roots[name] for op in program.ops if op.name not in linears for name in op.keeps}
    if policy == "selective":
        kept |= program.caches
    readers = [roots[ops[0].reads[0]] for ops in groups]
    found = []
    for ops in groups:
        first, source = ops[0], ops[0].reads[0]
        gathered = first.makes[0] if first.makes[0] not in [made for _, made in first.late] else None
        keeps_low = roots[source] not in kept and (source != roots[source] or readers.count(source) == 1)
        found.append(Call(first.name, source, gathered, tuple(param for op in ops for param, _ in op.late), keeps_low))
    return tuple(found)


def in_eight_bits(
    program: BlockProgram,
    shapes: Shapes,
    name: RecipeName,
    parameters: Mapping[str, tuple[int, ...]],
    policy: str,
    *,
    fused: bool,
    packed: frozenset[str] = frozenset(),
    others: frozenset[str] = NOTHING_KEPT,
) -> tuple[BlockProgram, Shapes]:
    """The program and its storages under a recipe.

    Args:
        program: Program of a block.
        shapes: Storages of the program.
        name: The recipe.
        parameters: Shapes of the block's parameters on the rank, by name.
        policy: Recompute policy of the block.
        fused: True if Triton kernels make the copies.
        packed: Weights that are gathered packed.
        others: Storages that other blocks keep.
    """
    changed, calls = scaled_program(program, policy, name, others)
    changed, found = bank_in_eight_bits(changed, dict(shapes), parameters, policy, SCALINGS[name], fused=fused, packed=packed)
    for call in calls:
        multiplied = shapes[call.gathered or call.source]
        width, elements = parameters[call.weights[0]][1], prod(multiplied[2])
        outs = tuple(parameters[weight][0] for weight in call.weights)
        rows, size = elements // width, multiplied[0] // elements
        given = tuple(weight in packed for weight in call.weights)
        product = low_linears((rows, width, outs, size), SCALINGS[name], fused=fused, packed=given)
        found |= _storages(call, product, prod(shapes[call.source][2]) // width)
    return changed, found


def head_products(op: Op, gathered: str | None) -> Op:
    """The head's product in eight bits: its input is saved unquantised, and its output's gradient is the loss's."""
    call = Call(op.name, op.reads[0], gathered, tuple(param for param, _ in op.late), keeps_low=False)
    return _ops(call, [op], by_row=True)[0]


def head_scratch(op: str, sizes: tuple[int, int, int, int], name: RecipeName, *, fused: bool) -> Shapes:
    """Storages inside the head's product; `sizes` are rows, width, columns of the vocabulary, and bytes per element."""
    rows, width, vocab, size = sizes
    return _storages(Call(op, "", None, (), keeps_low=False), low_linears((rows, width, (vocab,), size), SCALINGS[name], fused=fused), rows)


def _storages(call: Call, product: ScaledLinears | BlockLinears, own_rows: int) -> Shapes:
    """Storages of a call other than its outputs; `own_rows` are the rank's own tokens."""
    given = call.keeps_low and not product.makes_operand
    found = {
        IN_FORWARD: _inside(product.forward_bytes(given=given)),
        IN_INPUT: _inside(product.input_gradient_bytes),
        IN_WEIGHTS: _inside(product.weight_gradient_bytes(given=call.keeps_low)),
    }
    if call.keeps_low:
        found[LOW] = _copy(product.kept_shape(own_rows), Column.ACTIVATIONS)
        size, count = product.scale_bytes, product.num_scales
        found[SCALES] = size * count, Column.ACTIVATIONS, (count,), DType.FP8 if size == 1 else DType.FP32, Basis.EXACT
        found[IN_KEEPING] = _inside(product.keeping_bytes())
        if call.gathered is not None:
            found[WHOLE] = _copy(product.kept_shape(product.rows), Column.ACTIVATIONS)
            found[GATHERED] = _copy(product.kept_shape(product.rows), Column.COMMUNICATION)
    return {call.name + ending: stored for ending, stored in found.items()}


def _copy(shape: tuple[int, int], column: Column) -> Stored:
    return prod(shape), column, shape, DType.FP8, Basis.EXACT


def _inside(size: int) -> Stored:
    return size, Column.WORKSPACE, (size,), DType.FP8, Basis.EXACT


def _groups(ops: tuple[Op, ...]) -> list[list[Op]]:
    """The linears of each call; those of the indexer, whose input gets no gradient, are excluded."""
    found: list[list[Op]] = []
    for op in ops:
        if not op.late or op.grads is not None:
            continue
        if op.call and found and found[-1][0].call == op.call:
            found[-1].append(op)
        else:
            found.append([op])
    return found


def scaled_program(program: BlockProgram, policy: str, name: RecipeName, others: frozenset[str] = NOTHING_KEPT) -> Scaled:
    """A program whose linears multiply in eight bits, see `in_eight_bits`."""
    return _scaled(program, policy, SCALINGS[name] not in ONE_SCALE, others)


@lru_cache(maxsize=64)
def _scaled(program: BlockProgram, policy: str, by_row: bool, others: frozenset[str]) -> Scaled:
    calls, roots = scaled_calls(program, policy, others), roots_of(program.ops)
    makers = {name: op.name for op in program.ops for name in op.makes}
    by_name = {group[0].name: (call, group) for call, group in zip(calls, _groups(program.ops), strict=True)}
    later = {op.name for _, group in by_name.values() for op in group[1:]}
    ops: list[Op] = []
    reruns = set(program.reruns)
    for op in program.ops:
        if op.name in later:
            continue
        if op.name not in by_name:
            ops.append(op)
            continue
        call, group = by_name[op.name]
        *before, products = _ops(call, group, by_row)
        ops += [*before, products]
        made_again = makers.get(roots[call.source]) in reruns and op.name not in program.after
        if op.name in reruns or made_again:
            reruns |= {each.name for each in before}
    return Scaled(BlockProgram(tuple(ops), program.held, frozenset(reruns), program.caches, program.after), calls)


def _ops(call: Call, group: list[Op], by_row: bool) -> list[Op]:
    """Operations that make the saved copy, and the products."""
    outputs = tuple(made for op in group for _, made in op.late)
    names = {ending: call.name + ending for ending in (LOW, SCALES, WHOLE, GATHERED, IN_KEEPING, IN_FORWARD, IN_INPUT, IN_WEIGHTS)}
    source, low, scales = call.source, names[LOW], names[SCALES]
    products = Op(
        call.name,
        (source,),
        (*outputs, names[IN_FORWARD]),
        keeps=(source,),
        params=tuple(param for op in group for param in op.params),
        grads=(source,),
        late=tuple(made for op in group for made in op.late),
        late_inside=(names[IN_WEIGHTS],),
        holds=group[0].holds,
        keeps_first=True,
        before=(((names[IN_INPUT],), True),),
    )
    if call.gathered is not None:
        fetched = names[GATHERED] if call.keeps_low else call.gathered, partial_gradient(call.gathered)
        products = products._replace(fetches=fetched[1:], late_fetches=fetched[:1], before=(((*fetched, names[IN_INPUT]), False),))
    if not call.keeps_low:
        return [products if call.gathered is None else products._replace(makes=(call.gathered, *products.makes))]
    keeping = Op(f"{call.name} keep", (source,), (low, scales, names[IN_KEEPING]), keeps=(low, scales), grads=())
    products = products._replace(keeps=(low, scales))
    if call.gathered is None:
        return [keeping, products if by_row else products._replace(reads=(source, low, scales))]
    multiplied = (call.gathered,) if by_row else (names[WHOLE], scales)
    return [
        Op(f"{call.name} gather", (source,), (call.gathered,), grads=()),
        Op(f"{call.name} quantize", (call.gathered,), (names[WHOLE], scales, names[IN_KEEPING]), grads=()),
        keeping._replace(reads=(names[WHOLE], scales), makes=(low,)),
        products._replace(reads=(source, *multiplied)),
    ]
