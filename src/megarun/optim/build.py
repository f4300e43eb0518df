"""The optimizers of one rank's stages, by the inventory's groups, and their learning rates."""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from megaplan.inventory.tensors import Group, Inventory, Owner, ParamTensor
from megaplan.spec.models import Spec
from megarun.dtypes import TORCH_DTYPES
from megarun.optim.adamw import AdamW
from megarun.optim.host_state import HostState, Unit
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
    Muon accepts gradients of any dtype. Fused AdamW needs gradients in the parameter's dtype: if `precision.grads` differs, every parameter
    has its own AdamW, so that only one gradient at a time exists in both dtypes. The same holds with state in host memory
    (`host.optimizer_offload`): the device has the state of two parameters, or two rounds of Muon, at a time.

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
        self._single: list[tuple[AdamW, nn.Parameter]] = []
        rate = training.learning_rate
        self._base, self._matrix_base = rate, training.muon_learning_rate or rate
        fraction = spec.host.optimizer_offload
        if spec.precision.grads is not spec.precision.master or fraction is not None:
            self._single = [(AdamW([([p], decay)], rate), p) for p, decay in others]
        elif others:
            self._all.append(AdamW(_by_decay(others), rate))
        if matrices:
            self._all.append(_muon(matrices, spec, self._matrix_base, tp, slices))
        self._schedule, self._num_steps = training.rate_schedule, training.steps
        self._device = next((parameter.device for _, parameter in named), torch.device("cpu"))
        self.host = None if fraction is None else HostState(list(self._units()), fraction, self._device)
        """State in host memory; None if there is none."""

    def step(self, step: int, scale: float = 1.0) -> None:
        """Update with the learning rates of 0-based `step` by the gradients times `scale`, then drop them."""
        self.update(self.numbers(step, scale).to(self._device, non_blocking=True, copy=True))

    def numbers(self, step: int, scale: float = 1.0) -> Tensor:
        """The numbers of a step that its update reads, on the host: the factor of gradients, AdamW's rate and Muon's."""
        return on_host((scale, *(learning_rate(base, self._schedule, step, self._num_steps) for base in (self._base, self._matrix_base))))

    def update(self, numbers: Tensor) -> None:
        """Update by the gradients and the `numbers` of a step on the device, which no operation reads on the host; then drop them."""
        if self.host is None:
            self._update(numbers, nullcontext)
            return
        self.make_states()
        with self.host.updating():
            self._update(numbers, self.host.lent)

    def _update(self, numbers: Tensor, lent: Callable[[Sequence[Tensor]], AbstractContextManager[object]]) -> None:
        """Update; each parameter, or round of Muon's, in the context `lent`, in which its state is on the device."""
        scale, rate, matrix_rate = numbers.unbind()
        for optimizer, parameter in self._single:
            with lent([parameter]), in_parameter_dtype(parameter):
                optimizer.step(rate=rate, scale=scale)
        for optimizer, _ in self._single:
            optimizer.zero_grad(set_to_none=True)
        for each in self._all:
            if isinstance(each, Muon):
                each.step(rate=matrix_rate, scale=scale, lent=lent)
            else:
                each.step(rate=rate, scale=scale)
            each.zero_grad(set_to_none=True)

    def _units(self) -> Iterator[Unit]:
        """The parts of an update, in order; every AdamW parameter is a separate part."""
        yield from (Unit(optimizer, [parameter]) for optimizer, parameter in self._single)
        for each in self._all:
            if isinstance(each, Muon):
                yield from (Unit(each, parameters) for parameters in each.rounds())

    def _optimizers(self) -> tuple[Muon | AdamW, ...]:
        return *self._all, *(optimizer for optimizer, _ in self._single)

    def states(self) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """Every parameter that has state, with its state, which the host can read and write."""
        if self.host is not None:
            self.host.settle()
        for optimizer in self._optimizers():
            yield from optimizer.state.items()

    def make_states(self) -> None:
        """Create missing optimizer state, which otherwise the first step creates; a checkpoint is loaded into all of it.

        State that exists stays where it is: a recorded update reads and writes it there.
        """
        for optimizer in self._optimizers():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if not optimizer.state[parameter]:
                        held = None if self.host is None else self.host.of(parameter)
                        optimizer.state[parameter] = optimizer.first_state(parameter, held)

    def state_tensors(self) -> list[Tensor]:
        """Every tensor that the optimizers store on the device between steps."""
        values = (value for parameter, state in self.states() for value in self.on_device(parameter, state))
        return [value for value in values if isinstance(value, Tensor)]

    def on_device(self, parameter: Tensor, state: Mapping[str, Any]) -> list[Any]:
        """The part of a parameter's state that is not in host memory."""
        held = {} if self.host is None else self.host.of(parameter)
        return [value for key, value in state.items() if key not in held]


def _by_decay(parameters: Sequence[tuple[nn.Parameter, float]]) -> list[tuple[list[nn.Parameter], float]]:
    """Parameters with their weight decay as groups of equal decay, the largest first."""
    decays = sorted({decay for _, decay in parameters}, reverse=True)
    return [([parameter for parameter, found in parameters if found == decay], decay) for decay in decays]


def _decays(tensor: ParamTensor) -> bool:
    """True if weight decay applies: a bank's biases are vectors, one per expert."""
    return len(tensor.shape) > (2 if tensor.owner is Owner.EXPERT_PARALLEL else 1)


def _in_update_order(stage: nn.Module, inventory: Inventory) -> list[tuple[str, nn.Parameter]]:
    """A stage's trained parameters, as the memory estimate assumes: blocks in its order, tensors in the inventory's."""
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
