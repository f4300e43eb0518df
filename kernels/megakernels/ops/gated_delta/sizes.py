"""Bytes and cost of the delta rule's kernels for given tensors: the facts of their sizes, and copies of operands; needs no triton."""

import torch
from torch import Tensor

from megakernels._common.cost import Cost
from megakernels._common.scratch import copies_bytes
from megakernels.facts import KernelBytes
from megakernels.ops.gated_delta.facts import DeltaSizes
from megakernels.ops.gated_delta.inputs import GatedDeltaInputs


def sizes_of(given: GatedDeltaInputs) -> DeltaSizes:
    """The sizes of these arguments."""
    batch, positions, groups, keys = given.q.shape
    heads, values = given.v.shape[2:]
    settings = given.chunk_size, given.save_every, given.q.element_size()
    return DeltaSizes(batch, positions, heads, groups, keys, values, given.decay.dim() == 4, *settings)


def accepts(given: GatedDeltaInputs) -> bool:
    """True if the kernels support these sizes and dtypes; products need one dtype."""
    is_float = given.q.dtype in (torch.bfloat16, torch.float16, torch.float32)
    return is_float and given.q.dtype == given.k.dtype == given.v.dtype and sizes_of(given).accepted


def forward_bytes(state: Tensor | None, given: GatedDeltaInputs) -> KernelBytes:
    """Bytes of `kernel.forward` with the same operands."""
    own = sizes_of(given).forward_bytes()
    return own._replace(scratch=own.scratch + _copied_bytes(given) + copies_bytes(() if state is None else (state,)))


def backward_bytes(grad_last: Tensor | None, grad_y: Tensor, given: GatedDeltaInputs, states: Tensor) -> KernelBytes:
    """Bytes of `kernel.backward` with the same operands."""
    dtype, parameters = given.q.dtype, given.A_log.nbytes + given.dt_bias.nbytes
    found = sizes_of(given).backward_bytes(parameters, copies_bytes(() if grad_last is None else (grad_last,)))
    own = grad_y.numel() * dtype.itemsize if grad_y.dtype != dtype else copies_bytes(rows=(grad_y,))
    results = sum(each.nbytes for each in given[:5]) + parameters
    return found._replace(results=results, scratch=found.scratch + own + _copied_bytes(given) + copies_bytes((states,)))


def _copied_bytes(given: GatedDeltaInputs) -> int:
    """Bytes of the copies of operands."""
    dense = [each for each in (given.A_log, given.dt_bias, given.starts) if each is not None]
    return copies_bytes(dense, rows=(given.q, given.k, given.v, *((given.decay,) if given.decay.dim() == 4 else ())))


def forward_cost(_state: Tensor | None, given: GatedDeltaInputs) -> Cost:
    """Cost of `kernel.forward`."""
    flops, _, inverses = sizes_of(given).flops()
    return _cost(given, flops, inverses)


def backward_cost(_grad_last: Tensor | None, _grad_y: Tensor, given: GatedDeltaInputs, _states: Tensor) -> Cost:
    """Cost of `kernel.backward`."""
    _, flops, inverses = sizes_of(given).flops()
    return _cost(given, flops, inverses)


def _cost(given: GatedDeltaInputs, own: int, inverses: int) -> Cost:
    found = {given.q.dtype: own}
    found[torch.float32] = found.get(torch.float32, 0) + inverses
    return Cost(found)
