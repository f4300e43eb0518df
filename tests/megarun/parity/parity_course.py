"""Three steps in two halves, each as smooth as the metric asks for.

AdamW divides by the gradient's size and Muon by a direction's: an entry or a direction that is rounding becomes a whole step, of a random
sign, and one process and a layout diverge there although both are right. So the parts of a step are compared separately:

- gradients of three batches, at parameters that plain gradient steps change in between: an error of a step shows in all later ones;
- three steps of the plan's own optimizers, on gradients that are a function of tensor and step alone, at the plan's rates.

A gradient that is a small difference of large sums cannot be known to the metric's bound in fp32, however it is computed. How well it can
be known is measured: one process trains again with its parameters moved by one unit in their last place (`perturb`). A recipe rounds its
operands to eight bits, where a unit in the last place moves nothing or, where an element crosses a boundary, 2^-4 of it: gradients jump.
Jumps are rare, so the parameters move by `RECIPE_UNITS` there, the fewest with which every step has several among eight perturbations:
of 30 by one unit, `low-tp2-rows` has no jump in its first and second steps, and 19 times the same one, 9e-4, in the third. A single jump
moves its gradients by up to 1e-2 in the first step and 5e-3 in the second, where TP differs by 4e-6 and 1e-4.
"""

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch.distributed.tensor import DTensor

from megaplan.inventory.tensors import Init
from megarun.data.batches import Batches
from megarun.engine import initialise
from megarun.engine.trainer import Trainer
from megarun.job.job import Job

STEPS = 3
RATE = 1.0e-2
"""Learning rate of the plain steps; gradients are clipped to the norm of 1."""
RECIPE_UNITS = 4
"""Units in the last place by which parameters are perturbed in a model with a recipe."""
ByName = Callable[[list[tuple[str, torch.nn.Parameter]], Any], dict[str, list[torch.Tensor]]]


def perturb(trainer: Trainer, seed: int, units: int) -> None:
    """Move every entry of every parameter by so many fp32 numbers, up or down by the seed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in (parameter for stage in trainer.stages for parameter in stage.parameters()):
            local = _local(parameter)
            upwards = torch.rand(local.shape, generator=generator) < 0.5
            for _ in range(units):
                local.copy_(torch.nextafter(local, torch.where(upwards, torch.inf, -torch.inf)))


def course(job: Job, trainer: Trainer, batches: Batches, by_name: ByName) -> dict[str, Any]:
    """Values that this rank computed; FSDP2's shards gathered by `by_name`."""
    parameters = [named for stage in trainer.stages for named in stage.named_parameters() if named[1].requires_grad]
    record: dict[str, Any] = {"initial": by_name(parameters, lambda p: p)}
    results = []
    for step in range(STEPS):
        results.append(trainer.measure(batches.at(step)))
        record[f"gradients {step + 1}"] = by_name(parameters, lambda p: p.grad)
        with torch.no_grad():
            for _, parameter in parameters:
                _local(parameter).sub_(_local(parameter.grad), alpha=RATE)
        trainer.drop_gradients()
    record["losses"] = [result.loss for result in results]
    record["norms"] = [result.gradient_norm for result in results]
    record["auxiliary"] = [result.routed.balance_loss + result.routed.z_loss + result.further_loss for result in results]
    record["trained"] = by_name(parameters, lambda p: p)
    trainer.fill(job)
    for step in range(STEPS):
        _stated_gradients(job, trainer, step)
        trainer.update(step)
    record["updated"] = by_name(parameters, lambda p: p)
    return record


def _stated_gradients(job: Job, trainer: Trainer, step: int) -> None:
    """Normal numbers that every layout has the same of: the rule that fills parameters, under another seed."""
    trained = [parameter for stage in trainer.stages for parameter in stage.parameters() if parameter.requires_grad]
    values = [(parameter, _local(parameter).detach().clone()) for parameter in trained]
    fill = initialise.fill
    with mock.patch.object(initialise, "fill", lambda tensor, *rest: fill(tensor._replace(init=Init.NORMAL), *rest)):
        trainer.fill(job.with_seed(1 + step))
    with torch.no_grad():
        for parameter, value in values:
            parameter.grad = parameter.detach().clone()
            _local(parameter).copy_(value)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
