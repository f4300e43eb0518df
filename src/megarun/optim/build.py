"""The optimizers of one rank's stages, by the inventory's groups, and their learning rates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from megaplan.dtypes import DType
from megaplan.inventory.tensors import Group, Inventory
from megaplan.spec.models import Spec
from megarun.dtypes import TORCH_DTYPES
from megarun.optim.muon import Muon

BETAS = (0.9, 0.95)
EPSILON = 1e-8
LONGEST_WARM_UP_STEPS = 100


def newton_schulz_dtype(spec: Spec) -> DType:
    """Dtype of Muon's iteration: as written, else fp32 where params are fp32, else bf16."""
    return spec.optimizer.newton_schulz_dtype or (DType.FP32 if spec.precision.params is DType.FP32 else DType.BF16)


def learning_rate(base: float, step: int, num_steps: int) -> float:
    """Rate of 0-based `step`: linear up to `base` over the first tenth of `num_steps`, at most 100 steps, then constant."""
    warm_up = max(1, min(LONGEST_WARM_UP_STEPS, num_steps // 10))
    return base * min(1.0, (step + 1) / warm_up)


class Optimizers:
    """Muon on matrices, AdamW on the rest; AdamW alone where `optimizer.matrix` says so.

    AdamW is torch's fused one, whatever the device. Weight decay is on tensors of two or more dims; scales, biases and scalars have none.
    """

    def __init__(self, stages: Iterable[nn.Module], inventory: Inventory, spec: Spec) -> None:
        training, tensors = spec.training, dict(inventory.tensors())
        named = [(tensors[name], parameter) for stage in stages for name, parameter in stage.named_parameters()]
        muon = spec.optimizer.matrix == "muon"
        matrices = [(p, t.num_matrices) for t, p in named if muon and t.group is Group.MATRIX]
        others = [(p, t) for t, p in named if not (muon and t.group is Group.MATRIX)]
        self._all: list[tuple[torch.optim.Optimizer, float]] = []
        if matrices:
            rate = training.muon_learning_rate or training.learning_rate
            optimizer = Muon(
                matrices,
                lr=rate,
                weight_decay=training.weight_decay,
                moments_dtype=TORCH_DTYPES[spec.precision.moments],
                iteration_dtype=TORCH_DTYPES[newton_schulz_dtype(spec)],
                num_steps=spec.optimizer.newton_schulz_steps,
            )
            self._all.append((optimizer, rate))
        if others:
            groups = [
                {"params": [p for p, t in others if len(t.shape) > 1], "weight_decay": training.weight_decay},
                {"params": [p for p, t in others if len(t.shape) == 1], "weight_decay": 0.0},
            ]
            rate = training.learning_rate
            groups = [group for group in groups if group["params"]]
            self._all.append((torch.optim.AdamW(groups, lr=rate, betas=BETAS, eps=EPSILON, foreach=False, fused=True), rate))
        self._num_steps = training.steps

    def step(self, step: int) -> None:
        """Update with the learning rate of 0-based `step`, then drop the gradients."""
        for optimizer, base in self._all:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(base, step, self._num_steps)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def states(self) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
        """Every parameter that has state, with its state."""
        for optimizer, _ in self._all:
            yield from optimizer.state.items()

    def state_tensors(self) -> list[torch.Tensor]:
        """Every tensor the optimizers keep between steps."""
        values = (value for _, state in self.states() for value in state.values())
        return [value for value in values if isinstance(value, torch.Tensor)]
