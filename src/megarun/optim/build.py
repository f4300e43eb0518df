"""The optimizers of one rank's stages, by the inventory's groups, and their learning rates."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megaplan.inventory.tensors import Group, Inventory, Owner, ParamTensor
from megaplan.spec.models import Spec
from megarun.dtypes import TORCH_DTYPES
from megarun.optim.adamw import AdamW
from megarun.optim.muon import Muon
from megarun.optim.numbers import on_host
from megarun.optim.rates import learning_rate
from megarun.parallel.apply.gradients import in_parameter_dtype
from megarun.parallel.groups.tensor import ALONE, TensorParallel


def _refuse_late_parameters(stages: Sequence[nn.Module], tensors: Container[str]) -> None:
    """FSDP2 registers a module's parameters when it wraps it: one added later, such as an adapter's, is in no group and is never reduced.

    Raises:
        RuntimeError: A stage has a parameter that is not in the plan.
    """
    late = [name for stage in stages for name, _ in stage.named_parameters() if name not in tensors]
    if late:
        raise RuntimeError(
            f"{', '.join(late)}: not a parameter of the plan; added after its module was sharded, it is in no FSDP2 group, and without a"
            " gradient hook every data rank would update it with a different gradient"
        )


class Optimizers:
    """Muon for matrices, AdamW for the rest; only AdamW if `optimizer.matrix` is adamw.

    AdamW is torch's fused implementation or a kernel that equals it. Weight decay applies to tensors of two or more dims, not to scales,
    biases (of experts too) and scalars.
    Muon accepts gradients of any dtype. Fused AdamW needs the parameter's: if `precision.grads` differs, every parameter has its own
    AdamW, so that only one gradient at a time exists in both dtypes.

    AdamW runs first, so that Muon's scratch is allocated after all of AdamW's state. If a Newton-Schulz iteration is the peak, the first
    step then reaches the same peak as later steps, and a job that does not fit fails in its first step.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        inventory: Inventory,
        spec: Spec,
        tp: TensorParallel = ALONE,
        slices: TensorParallel = ALONE,
    ) -> None:
        training, tensors = spec.training, dict(inventory.tensors())
        _refuse_late_parameters(stages, tensors)
        named = [(tensors[name], parameter) for stage in stages for name, parameter in _in_update_order(stage, inventory)]
        muon = spec.optimizer.uses_muon
        matrices = [(t, p) for t, p in named if muon and t.group is Group.MATRIX]
        others = [(p, training.weight_decay if _decays(t) else 0.0) for t, p in named if not (muon and t.group is Group.MATRIX)]
        self._all: list[Muon | AdamW] = []
        self._narrow: list[tuple[AdamW, nn.Parameter]] = []
        rate = training.learning_rate
        self._base, self._matrix_base = rate, training.muon_learning_rate or rate
        if spec.precision.grads is not spec.precision.master:
            self._narrow = [(AdamW([([p], decay)], rate), p) for p, decay in others]
        elif others:
            decays = sorted({decay for _, decay in others}, reverse=True)
            self._all.append(AdamW([([p for p, found in others if found == decay], decay) for decay in decays], rate))
        if matrices:
            self._all.append(_muon(matrices, spec, self._matrix_base, tp, slices))
        self._schedule, self._num_steps = training.rate_schedule, training.steps
        self._device = next((parameter.device for _, parameter in named), torch.device("cpu"))

    def step(self, step: int, scale: float = 1.0) -> None:
        """Update with the learning rates of 0-based `step` by the gradients times `scale`, then drop them."""
        self.update(self.numbers(step, scale).to(self._device, non_blocking=True, copy=True))

    def numbers(self, step: int, scale: float = 1.0) -> Tensor:
        """The numbers of a step that its update reads, on the host: the factor of gradients, AdamW's rate and Muon's."""
        return on_host((scale, *(learning_rate(base, self._schedule, step, self._num_steps) for base in (self._base, self._matrix_base))))

    def update(self, numbers: Tensor) -> None:
        """Update by the gradients and the `numbers` of a step on the device, which no operation reads on the host; then drop them."""
        scale, rate, matrix_rate = numbers.unbind()
        for optimizer, parameter in self._narrow:
            with in_parameter_dtype(parameter):
                optimizer.step(rate=rate, scale=scale)
        for optimizer, _ in self._narrow:
            optimizer.zero_grad(set_to_none=True)
        for each in self._all:
            each.step(rate=matrix_rate if isinstance(each, Muon) else rate, scale=scale)
            each.zero_grad(set_to_none=True)

    def _optimizers(self) -> tuple[Muon | AdamW, ...]:
        return *self._all, *(optimizer for optimizer, _ in self._narrow)

    def states(self) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """Every parameter that has state, with its state."""
        for optimizer in self._optimizers():
            yield from optimizer.state.items()

    def make_states(self) -> None:
        """Create the optimizer state that does not exist, otherwise created in the first step; a checkpoint is loaded into all of it.

        State that exists stays where it is: a recorded update reads and writes it there.
        """
        for optimizer in self._optimizers():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if not optimizer.state[parameter]:
                        optimizer.state[parameter] = optimizer.first_state(parameter)

    def state_tensors(self) -> list[Tensor]:
        """Every tensor that the optimizers store between steps."""
        values = (value for _, state in self.states() for value in state.values())
        return [value for value in values if isinstance(value, Tensor)]


def _decays(tensor: ParamTensor) -> bool:
    """True if weight decay applies: a bank's biases are vectors, one an expert."""
    return len(tensor.shape) > (2 if tensor.owner is Owner.EXPERT_PARALLEL else 1)


def _in_update_order(stage: nn.Module, inventory: Inventory) -> list[tuple[str, nn.Parameter]]:
    """A stage's trained parameters, as the memory estimate assumes: blocks in its order, the tensors of a block in the inventory's."""
    parameters = dict(stage.named_parameters())
    block_of = {f"{name}.{tensor.name}": name for name, block in inventory.blocks() for tensor in block.tensors}
    blocks = dict.fromkeys(block_of[name] for name in parameters)
    trained = ((block, tensor) for block in blocks for tensor in inventory.block(block).tensors if tensor.group is not Group.FROZEN)
    names = (f"{block}.{tensor.name}" for block, tensor in trained)
    return [(name, parameters[name]) for name in names]


def _muon(
    matrices: Sequence[tuple[ParamTensor, nn.Parameter]], spec: Spec, rate: float, tp: TensorParallel, slices: TensorParallel
) -> Muon:
    return Muon(
        [(p, t.local_matrices(tp.degree, spec.mesh.ep)) for t, p in matrices],
        lr=rate,
        weight_decay=spec.training.weight_decay,
        moments_dtype=TORCH_DTYPES[spec.precision.moments],
        iteration_dtype=TORCH_DTYPES[spec.newton_schulz_dtype],
        num_steps=spec.optimizer.newton_schulz_steps,
        cut={p: dim for t, p in matrices if (dim := t.cut_dim(tp.degree, slices.degree)) is not None},
        tp=tp,
        slices=slices,
        banks=frozenset(p for t, p in matrices if t.owner is Owner.EXPERT_PARALLEL),
    )
