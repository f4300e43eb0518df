"""Newton-Schulz iterations of Megatron-Core's Muon, which orthogonalise the matrices of a rank's layers once per step.

A tensor rank iterates its own part of a sharded matrix (`--muon-tp-mode blockwise`, Megatron's default). Gate and up projections are one
matrix, as Megatron stores them. Products are in TF32, at half of the bf16 rate: PyTorch runs fp32 products in this way under
`--muon-fp32-matmul-prec medium`. With a distributed optimizer data ranks divide the matrices among themselves, else each iterates all.

Source: NVIDIA/Megatron-LM, `megatron/core/optimizer/muon.py`; NVIDIA-NeMo/Emerging-Optimizers, `muon_utils.py`.
"""

from collections import Counter
from functools import cache

from megaplan.cost.step.workload import TimedStep
from megaplan.inventory.tensors import Group, Inventory, Owner, ParamTensor, has_groups

MUON_BYTES = 46.0
"""Bytes of an element outside the iterations: momentum and Nesterov update, norm and division, master and parameter, in fp32."""
STEP_BYTES = 12.0
"""Bytes of an element in one iteration: the matrix is read twice and written once."""
TF32_SHARE = 0.5
"""Rate of TF32 products over that of bf16 ones, on every generation from Ampere on."""
GATE, UP = "gate_proj", "up_proj"


def iteration_flops(rows: float, columns: float) -> float:
    """One iteration on n ≤ m: X Xᵀ, its square, and the product with X: 4 n² m + 2 n³.

    Source: K. Jordan et al., "Muon" (2024), the quintic iteration; no kernel uses the symmetry.
    """
    short, long = sorted((rows, columns))
    return 4 * short**2 * long + 2 * short**3


def muon_work(work: TimedStep) -> tuple[float, float, float]:
    """Work of a rank on a mean stage: FLOPs of one iteration, matrices, and their elements; zeros under another optimizer.

    The matrices are shared out evenly, without the remainder that a rank may have.
    """
    if not work.spec.optimizer.uses_muon:
        return 0.0, 0.0, 0.0
    mesh, divided = work.mesh, work.software.zero or work.software.sharded is not None
    ranks = float(mesh.dp * mesh.cp) if divided else 1.0
    expert_ranks = max(1.0, mesh.dp * mesh.cp * mesh.tp / (mesh.ep * mesh.etp)) if divided else 1.0
    flops = count = elements = 0.0
    for (rows, columns, in_bank), number in _matrices(work.inventory, mesh.tp, mesh.ep, mesh.etp).items():
        own = number / mesh.pp / (expert_ranks if in_bank else ranks)
        flops, count, elements = flops + own * iteration_flops(rows, columns), count + own, elements + own * rows * columns
    return flops, count, elements


@cache
def _matrices(inventory: Inventory, tp: int, ep: int, etp: int) -> Counter[tuple[float, float, bool]]:
    """Number of matrices of a tensor and expert rank by rows, columns and whether they are experts'.

    Every matrix of a bank counts separately.
    """
    found: Counter[tuple[float, float, bool]] = Counter()
    for name, block in inventory.blocks():
        if not has_groups(name):
            continue
        tensors = [tensor for tensor in block.tensors if tensor.group is Group.MATRIX]
        gated = {tensor.name.replace(GATE, UP) for tensor in tensors if GATE in tensor.name}
        ups = {tensor.name for tensor in tensors if UP in tensor.name}
        for tensor in tensors:
            if GATE in tensor.name and tensor.name.replace(GATE, UP) in ups:
                continue  # counted with the up projection
            rows, columns, number = _part(tensor, tp, ep, etp)
            joined = 2 if tensor.name in gated else 1
            found[joined * rows, columns, tensor.owner is Owner.EXPERT_PARALLEL] += number
    return found


def _part(tensor: ParamTensor, tp: int, ep: int, etp: int) -> tuple[float, float, int]:
    """Rows and columns of a rank's part of one matrix, and the number of its matrices."""
    in_bank = tensor.owner is Owner.EXPERT_PARALLEL
    sides = [float(side) for side in (tensor.shape[1:] if in_bank else tensor.shape)]
    if tensor.tp_dim is not None:
        sides[tensor.tp_dim - in_bank] /= etp if in_bank else tp if tensor.owner is Owner.TENSOR_PARALLEL else 1
    columns = sides.pop()
    rows = 1.0
    for side in sides:
        rows *= side
    return rows, columns, max(1, tensor.num_matrices // ep) if in_bank else 1
