"""Work of a step of megarun beside its layers, by kinds of kernels: FSDP2's casts and copies, the gradient norm, the optimizers.

FSDP2 casts each parameter's shard to the dtype of forward, copies it into the buffer that is gathered, lays the gradients of a block out
for their reduction in its dtype, and copies the result; after the first microbatch it adds it to the sum. A rank that has its parameters
whole runs without FSDP2: it casts parameters and gradients, if their dtypes differ, and adds those of later microbatches. Clipping reads every gradient
for its norm and scales it. AdamW reads gradient, parameter and two moments and writes the last three. Muon updates momentum and the
Nesterov update by four elementwise operations, casts it, divides it by its norm, iterates, and applies it by three more.

Products of Newton-Schulz are counted in whole waves of tiles over the multiprocessors: a matrix of few tiles leaves most of them idle.

Source: torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py; torch's fused AdamW; `megarun.optim.muon`, `megarun.optim.clip`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from megakernels.facts import MEMORY, SUM, KindWork
from megakernels.ops.newton_schulz.facts import num_tiles, tile_side
from megaplan.spec.models import Spec

PRODUCT_ROWS, PRODUCT_COLUMNS = 256, 128
"""Sides of the tiles of the GEMM library's products."""
CHUNK_ELEMENTS, CHUNKS_OF_LAUNCH = 65536, 320
"""Limits of one launch over many tensors: aten/src/ATen/native/cuda/MultiTensorApply.cuh."""
CLIP_OPERATIONS, ADAMW_OPERATIONS, MUON_OPERATIONS, STEP_OPERATIONS = 2, 2, 11, 3
"""Operations of the host for a tensor: its square and their sum; the unwrapping of parameter with state and of gradient; of Muon those that
it launches once, and in each step of Newton-Schulz."""


class Matrices(NamedTuple):
    """Matrices that Muon updates together: one tensor's.

    Attributes:
        num_tensors: Tensors alike.
        stack: Matrices of one tensor that a rank orthogonalises.
        rows: Rows of one whole matrix.
        columns: Columns of one whole matrix.
    """

    num_tensors: int
    stack: int
    rows: int
    columns: int

    @property
    def elements(self) -> int:
        """Elements of all these tensors."""
        return self.num_tensors * self.stack * self.rows * self.columns


class StoredParameters(NamedTuple):
    """Parameters that are stored and updated, on all pipeline ranks together.

    Attributes:
        elements: That it gathers.
        trained: Elements with gradients.
        shard: Trained elements of the rank's own shard.
        shard_matrices: Elements of the shard that Muon updates.
        tensors: That it gathers.
        trained_tensors: Tensors with gradients.
        groups: Blocks that are gathered and reduced together.
        matrices: That Muon updates.
    """

    elements: int
    trained: int
    shard: int
    shard_matrices: int
    tensors: int
    trained_tensors: int
    groups: int
    matrices: tuple[Matrices, ...]


def gather_parts(spec: Spec, held: StoredParameters) -> Iterator[KindWork]:
    """Once, before the gather of all parameters."""
    if spec.has_whole_state:
        yield from _whole_casts(spec, held)
        return
    stored, used = spec.precision.master.bytes, spec.precision.params.bytes
    own = held.elements // spec.mesh.dp_shard
    if spec.precision.master is not spec.precision.params:
        yield KindWork("cast", own * (stored + used), 0, held.tensors)
    yield KindWork("shard copy", held.elements * 2 * used, 0, held.tensors)


def _whole_casts(spec: Spec, held: StoredParameters) -> Iterator[KindWork]:
    """Copies of what is stored in another dtype than it is used in, a group in one launch."""
    used, stored, frozen = spec.precision.params, spec.precision.master, held.elements - held.trained
    kept = stored if spec.lora is None else spec.lora.stored(used)
    cast = (held.trained * (stored.bytes + used.bytes) if stored is not used else 0) + (
        frozen * (kept.bytes + used.bytes) if kept is not used else 0
    )
    if cast:
        yield KindWork("cast", cast, 0, held.groups)


def reduce_parts(spec: Spec, held: StoredParameters) -> Iterator[KindWork]:
    """Once, around the reduction of all gradients."""
    if spec.has_whole_state:
        if spec.precision.params is not spec.precision.grads:
            yield KindWork("cast", held.trained * (spec.precision.params.bytes + spec.precision.grads.bytes), 0, held.groups)
        return
    used, summed = spec.precision.params.bytes, spec.precision.reduce.bytes
    yield KindWork("chunk_cat", held.trained * (used + summed), 0, held.groups)
    yield KindWork("shard copy", held.trained // spec.mesh.dp_shard * 2 * summed, 0, held.groups)


def sum_parts(spec: Spec, held: StoredParameters) -> Iterator[KindWork]:
    """The addition of each reduction after the first to the sum; of a cast without FSDP2 it is the sum that is read, tensor by tensor."""
    if spec.has_whole_state and spec.precision.params is not spec.precision.grads:
        yield KindWork(SUM, held.trained * spec.precision.grads.bytes, 0, held.trained_tensors - held.groups)
        return
    yield KindWork(SUM, held.trained // spec.mesh.dp_shard * 3 * spec.precision.grads.bytes, 0, held.trained_tensors)


def clip_parts(spec: Spec, held: StoredParameters) -> Iterator[KindWork]:
    """Once: norm and scale, and for each tensor its square and their sum."""
    yield KindWork("clip", held.shard * 3 * spec.precision.grads.bytes, 0, 2 * _launches(held.shard))
    yield KindWork(MEMORY, 0, 0, CLIP_OPERATIONS * held.trained_tensors)


def adamw_parts(spec: Spec, held: StoredParameters) -> Iterator[KindWork]:
    """Once: gradient, parameter and two moments read, the last three written."""
    grads, moments, stored = spec.precision.grads.bytes, spec.precision.moments.bytes, spec.precision.master.bytes
    others = held.shard - (held.shard_matrices if spec.optimizer.uses_muon else 0)
    yield KindWork("adamw", others * (grads + 4 * moments + 2 * stored), 0, _launches(others))


def muon_parts(spec: Spec, held: StoredParameters, num_sms: int) -> Iterator[KindWork]:
    """Once, after AdamW."""
    if not spec.optimizer.uses_muon:
        return
    grads, moments, stored = spec.precision.grads.bytes, spec.precision.moments.bytes, spec.precision.master.bytes
    size, steps, own = spec.newton_schulz_dtype.bytes, spec.optimizer.newton_schulz_steps, held.shard_matrices
    number = _num_matrices(held)
    yield KindWork("muon.scale", own * (4 * moments + 2 * stored), 0, 3 * number)
    yield KindWork(SUM, own * 2 * (2 * moments + grads) + own * 3 * stored, 0, 3 * number)
    yield KindWork("cast", own * (moments + size), 0, number)
    yield KindWork("muon.uncast", own * (size + stored), 0, number)
    for each in held.matrices:
        yield from _orthogonalised(each, size, steps, num_sms)


def _orthogonalised(each: Matrices, size: int, steps: int, num_sms: int) -> Iterator[KindWork]:
    """Newton-Schulz steps of one tensor's matrices, as often as there are tensors alike; tall ones are read transposed."""
    short, long = sorted((each.rows, each.columns))
    number, count, elements = each.num_tensors, each.stack, each.elements
    tall = each.rows > each.columns
    yield KindWork("muon.norm", elements * size, 0, 2 * number)
    yield KindWork("muon.divide", elements * 2 * size, 0, number)
    triangle = _waves(count * num_tiles(short, size), num_sms) * num_sms * 2 * tile_side(short, size) ** 2
    yield KindWork("muon.symmetric", 0, number * steps * triangle * (long + short), 2 * number * steps)
    tiles = _waves(count * -(-short // PRODUCT_ROWS) * -(-long // PRODUCT_COLUMNS), num_sms) * num_sms
    moved = 3 * elements * size * steps
    yield KindWork("muon.product", moved, number * steps * tiles * 2 * PRODUCT_ROWS * PRODUCT_COLUMNS * short, number * steps)
    copied = elements * 2 * size
    yield KindWork("copy", copied * (steps - tall), 0, number * (steps - tall))
    if tall:
        yield KindWork("strided copy", copied * (1 + (count > 1)), 0, number * (1 + (count > 1)))


def adamw_operations(spec: Spec, held: StoredParameters) -> int:
    """Host operations on AdamW's tensors before its launch."""
    own = held.trained_tensors - (_num_matrices(held) if spec.optimizer.uses_muon else 0)
    return ADAMW_OPERATIONS * own


def muon_operations(spec: Spec, held: StoredParameters) -> int:
    """Operations that the host launches for Muon's update."""
    if not spec.optimizer.uses_muon:
        return 0
    return _num_matrices(held) * (MUON_OPERATIONS + STEP_OPERATIONS * spec.optimizer.newton_schulz_steps)


def _num_matrices(held: StoredParameters) -> int:
    """Tensors that Muon updates."""
    return sum(each.num_tensors for each in held.matrices)


def _waves(tiles: int, num_sms: int) -> int:
    return -(-tiles // num_sms)


def _launches(elements: int) -> int:
    """Launches of one operation on a list of tensors."""
    return max(1, -(-elements // (CHUNK_ELEMENTS * CHUNKS_OF_LAUNCH)))
