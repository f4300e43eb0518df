"""Work of a step of megarun outside its layers, by kinds of kernels: FSDP2's casts and copies, the gradient norm, the optimizers.

FSDP2 casts each parameter's shard to the dtype of forward, copies it into the buffer that is gathered, lays the gradients of a block out
for their reduction in its dtype, and copies the result; after the first microbatch it adds it to the sum. A rank that has its parameters
whole runs without FSDP2: it casts parameters and gradients, if their dtypes differ, and adds gradients of later microbatches. Clipping
reads every gradient for its norm. AdamW reads gradient, parameter and two moments and writes the last three. Muon moves a momentum and
writes its Nesterov update into the matrices of its iterations in one pass, and decays and updates the parameter in another.

Products of Newton-Schulz are counted in whole waves of tiles over the multiprocessors: a matrix of few tiles leaves most multiprocessors
idle.

Source: torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py; `megarun.optim`.
"""

from collections.abc import Iterator
from typing import NamedTuple

from megakernels.facts import MEMORY, SUM, KindWork
from megakernels.ops.fp8_linear.facts import DELAYED_ROLES, SCALE_BYTES
from megakernels.ops.newton_schulz.facts import num_inner_products, segments, tiles_of
from megakernels.ops.optimizer.facts import adamw_bytes, decayed_add_bytes, nesterov_bytes
from megaplan.inventory.tensors import MatrixRound, matrix_round
from megaplan.spec.models import Spec

PRODUCT_ROWS, PRODUCT_COLUMNS = 256, 128
"""Sides of the tiles of the GEMM library's products."""
CHUNK_ELEMENTS, CHUNKS_OF_LAUNCH = 65536, 320
"""Limits of one launch over many tensors: aten/src/ATen/native/cuda/MultiTensorApply.cuh."""
CLIP_OPERATIONS, ROUND_OPERATIONS, NORM_LAUNCHES = 4, 8, 4
"""Host launches for the gradients' norm, for a round of Muon without its products, and for the norms in such a round."""
DELAYED_PASSES, DELAYED_LAUNCHES = 30, 14
"""Numbers that the update of an operand's factor reads and writes in addition to its history, and the number of kernels that update all
factors of a rank, including the one that finds the maximum of the history.
"""
ADAMW_OPERATIONS, MUON_OPERATIONS = 2, 2
"""Host operations per tensor: for AdamW, FSDP2's unwrapping of a parameter with its state and of a gradient; for Muon, its two passes."""


class Matrices(NamedTuple):
    """Matrices of equal tensors that Muon updates.

    Attributes:
        num_tensors: Tensors, on all pipeline ranks together.
        stack: Matrices of one tensor, on all ranks that share it.
        rows: Rows of one whole matrix.
        columns: Columns of one whole matrix.
        in_bank: True for expert banks.
    """

    num_tensors: int
    stack: int
    rows: int
    columns: int
    in_bank: bool

    def degree(self, spec: Spec) -> int:
        """Ranks that share them."""
        return spec.shard_degrees[self.in_bank]

    def rounds(self, spec: Spec) -> tuple[MatrixRound, int, int]:
        """The rounds, the number of rounds on all pipeline ranks together, and the matrices of a rank in one of them."""
        dealt, pp = matrix_round(self.stack, self.rows * self.columns, self.degree(spec)), spec.pp_shares
        number = -(-self.num_tensors // pp)
        rounds = -(-number // dealt.num_tensors)
        return dealt, pp * rounds, dealt.matrices(-(-number // rounds))


class StoredParameters(NamedTuple):
    """Parameters that are stored and updated, on all pipeline ranks together.

    Attributes:
        elements: Elements that it gathers.
        trained: Elements with gradients.
        shard: Trained elements of the rank's own shard.
        shard_matrices: Elements of the shard that Muon updates.
        tensors: Tensors that it gathers.
        trained_tensors: Tensors with gradients.
        groups: Blocks that are gathered and reduced together.
        matrices: Matrices that Muon updates.
        packed: Elements and bytes of the weights that are packed for the gather: dense ones, and banks.
        packed_tensors: Tensors of both.
        delayed_weights: Weights whose products have numbers of delayed scaling.
    """

    elements: int
    trained: int
    shard: int
    shard_matrices: int
    tensors: int
    trained_tensors: int
    groups: int
    matrices: tuple[Matrices, ...]
    packed: tuple[tuple[int, int], tuple[int, int]] = ((0, 0), (0, 0))
    packed_tensors: int = 0
    delayed_weights: int = 0


def gather_parts(spec: Spec, held: StoredParameters) -> Iterator[KindWork]:
    """Kernels before one gather of all parameters."""
    if spec.has_whole_state:
        yield from _whole_casts(spec, held)
        return
    stored, used = spec.precision.master.bytes, spec.precision.params.bytes
    elements, size = map(sum, zip(*held.packed, strict=True))
    own = (held.elements - elements) // spec.mesh.dp_shard
    if spec.precision.master is not spec.precision.params:
        yield KindWork("cast", own * (stored + used), 0, held.tensors - held.packed_tensors)
    if elements:  # read, rounded to the used dtype, scaled, and rounded once more
        parts = zip(held.packed, spec.shard_degrees, strict=True)
        moved = sum(count // degree * (stored + 4 * used) + made // degree for (count, made), degree in parts)
        yield KindWork("cast", moved, 0, 3 * held.packed_tensors)
    yield KindWork("shard copy", 2 * ((held.elements - elements) * used + size), 0, held.tensors)


def _whole_casts(spec: Spec, held: StoredParameters) -> Iterator[KindWork]:
    """Copies of tensors stored in another dtype than they are used in, one launch per group."""
    used, stored, frozen = spec.precision.params, spec.precision.master, held.elements - held.trained
    kept = stored if spec.lora is None else spec.lora.stored(used)
    cast = (held.trained * (stored.bytes + used.bytes) if stored is not used else 0) + (
        frozen * (kept.bytes + used.bytes) if kept is not used else 0
    )
    if cast:
        yield KindWork("group cast", cast, 0, held.groups)


def reduce_parts(spec: Spec, held: StoredParameters) -> Iterator[KindWork]:
    """Kernels around one reduction of all gradients."""
    if spec.has_whole_state:
        if spec.precision.params is not spec.precision.grads:
            yield KindWork("group cast", held.trained * (spec.precision.params.bytes + spec.precision.grads.bytes), 0, held.groups)
        if spec.sharding.copies and spec.precision.reduce is not spec.precision.grads:  # into buckets, and back
            moved = 2 * held.trained * (spec.precision.grads.bytes + spec.precision.reduce.bytes)
            yield KindWork("group cast", moved, 0, held.trained_tensors + held.groups)
        return
    used, summed = spec.precision.params.bytes, spec.precision.reduce.bytes
    yield KindWork("chunk_cat", held.trained * (used + summed), 0, held.groups)
    yield KindWork("shard copy", held.trained // spec.mesh.dp_shard * 2 * summed, 0, held.groups)


def sum_parts(spec: Spec, held: StoredParameters) -> Iterator[KindWork]:
    """The addition of each reduction after the first to the sum.

    Without FSDP2 and with a cast, the kernels read the sum, tensor by tensor.
    """
    if spec.has_whole_state and spec.precision.params is not spec.precision.grads:
        yield KindWork(SUM, held.trained * spec.precision.grads.bytes, 0, held.trained_tensors - held.groups)
        return
    yield KindWork(SUM, held.trained // spec.mesh.dp_shard * 3 * spec.precision.grads.bytes, 0, held.trained_tensors)


def clip_parts(spec: Spec, held: StoredParameters) -> Iterator[KindWork]:
    """Once per step: the norm, and the sum of squares; gradients are scaled when they are read."""
    yield KindWork("clip", held.shard * spec.precision.grads.bytes, 0, _launches(held.shard))
    yield KindWork(MEMORY, 0, 0, (CLIP_OPERATIONS - 1) * spec.pp_shares)


def delayed_parts(spec: Spec, held: StoredParameters) -> Iterator[KindWork]:
    """Once per step: write a column of the histories of maxima, read all or that column, and compute factors."""
    recipe, operands = spec.precision.recipe, held.delayed_weights * DELAYED_ROLES
    if recipe is not None and operands:
        reads = recipe.amax_compute == "max"
        moved = operands * SCALE_BYTES * (reads * recipe.amax_history + DELAYED_PASSES)
        yield KindWork(MEMORY, moved, 0, (DELAYED_LAUNCHES - (not reads)) * spec.pp_shares)


def adamw_parts(spec: Spec, held: StoredParameters) -> Iterator[KindWork]:
    """Kernels of one update: gradient, parameter and two moments are read, the last three are written; Lion and SGD have one moment."""
    grads, moments, stored = spec.precision.grads.bytes, spec.precision.moments.bytes, spec.precision.master.bytes
    others = held.shard - (held.shard_matrices if spec.optimizer.uses_muon else 0)
    moved = adamw_bytes(grads, moments, stored) - (0 if spec.host.optimizer == "adam" else 2 * moments)
    yield KindWork("adamw", others * moved, 0, held.trained_tensors - _num_matrices(held))


def muon_parts(spec: Spec, held: StoredParameters, num_sms: int) -> Iterator[KindWork]:
    """Once per step, after AdamW: momenta and updates in one pass, the iterations, then decay and update in one pass.

    Each matrix is orthogonalised by one of the ranks that share it. An exchange packs sent tensors and unpacks received ones.
    """
    if not spec.optimizer.uses_muon:
        return
    grads, moments, stored = spec.precision.grads.bytes, spec.precision.moments.bytes, spec.precision.master.bytes
    size, own, number = spec.newton_schulz_dtype.bytes, held.shard_matrices, _num_matrices(held)
    moved = nesterov_bytes(grads, moments, size) + decayed_add_bytes(stored, size)
    yield KindWork("muon.scale", own * moved, 0, 2 * number)
    exchanged = exchanged_elements(spec, held)
    if any(exchanged):
        yield KindWork("copy", sum(exchanged) * 2 * size, 0, _num_rounds(spec, held))
    for each in held.matrices:
        yield from _orthogonalised(spec, each, num_sms)


def exchanged_elements(spec: Spec, held: StoredParameters) -> tuple[int, int]:
    """Elements that a rank sends to the ranks that orthogonalise them, for dense tensors and for banks; they return the same number."""
    found = [0, 0]
    for each in held.matrices:
        if each.rounds(spec)[0].degree > 1:
            found[each.in_bank] += each.num_tensors * each.stack * each.rows * each.columns // each.degree(spec)
    return found[0], found[1]


def _orthogonalised(spec: Spec, each: Matrices, num_sms: int) -> Iterator[KindWork]:
    """Newton-Schulz steps of one rank's matrices of equal tensors, in rounds."""
    size, steps = spec.newton_schulz_dtype.bytes, spec.optimizer.newton_schulz_steps
    short, long = sorted((each.rows, each.columns))
    _, rounds, count = each.rounds(spec)
    elements, lengths = rounds * count * each.rows * each.columns, segments(steps, short, long)
    yield KindWork("muon.norm", elements * size, 0, rounds)
    outer, inner = (
        _waves(count * tiles, num_sms) * num_sms * flops
        for tiles, flops in (tiles_of(short, cols, size, tall=tall) for cols, tall in ((long, each.rows > each.columns), (short, False)))
    )
    products = len(lengths) + num_inner_products(lengths)
    yield KindWork("muon.symmetric", 0, rounds * (len(lengths) * outer + num_inner_products(lengths) * inner), rounds * products)
    tiles = _waves(count * -(-short // PRODUCT_ROWS) * -(-long // PRODUCT_COLUMNS), num_sms) * num_sms
    flops = rounds * len(lengths) * tiles * 2 * PRODUCT_ROWS * PRODUCT_COLUMNS * short
    yield KindWork("muon.product", 2 * elements * size * len(lengths), flops, rounds * len(lengths))
    yield KindWork(MEMORY, 0, 0, rounds * NORM_LAUNCHES)


def adamw_operations(spec: Spec, held: StoredParameters) -> int:
    """Host operations on AdamW's tensors before its launch: none on plain tensors, which are not unwrapped."""
    if spec.has_whole_state:
        return 0
    own = held.trained_tensors - (_num_matrices(held) if spec.optimizer.uses_muon else 0)
    return ADAMW_OPERATIONS * own


def muon_operations(spec: Spec, held: StoredParameters) -> int:
    """Operations that the host launches for Muon's update."""
    if not spec.optimizer.uses_muon:
        return 0
    rounds = _num_rounds(spec, held)
    products = 0
    for each in held.matrices:
        lengths = segments(spec.optimizer.newton_schulz_steps, *sorted((each.rows, each.columns)))
        products += each.rounds(spec)[1] * (2 * len(lengths) + num_inner_products(lengths))
    return MUON_OPERATIONS * _num_matrices(held) + ROUND_OPERATIONS * rounds + products


def _num_matrices(held: StoredParameters) -> int:
    """Tensors that Muon updates."""
    return sum(each.num_tensors for each in held.matrices)


def _num_rounds(spec: Spec, held: StoredParameters) -> int:
    return sum(each.rounds(spec)[1] for each in held.matrices)


def _waves(tiles: int, num_sms: int) -> int:
    return -(-tiles // num_sms)


def _launches(elements: int) -> int:
    """Launches of one operation on a list of tensors."""
    return max(1, -(-elements // (CHUNK_ELEMENTS * CHUNKS_OF_LAUNCH)))


def newton_schulz_flops(rows: int, columns: int, num_steps: int) -> int:
    """Newton-Schulz on a matrix of n ≤ m: in each segment half of X Xᵀ and a product with X, 3 n² m, and halves of products of n × n, n³.

    Source: `megakernels.newton_schulz_`, whose symmetric products are of one triangle.
    """
    short, long = sorted((rows, columns))
    lengths = segments(num_steps, short, long)
    return 3 * len(lengths) * short**2 * long + num_inner_products(lengths) * short**3
