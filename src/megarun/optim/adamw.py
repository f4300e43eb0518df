"""AdamW with the state of torch's, whose update reads scaled gradients."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megakernels import adamw_
from megarun.optim.numbers import number
from megarun.parallel.groups.local import gradient_of, local

BETAS = (0.9, 0.95)
EPSILON = 1e-8


class AdamW(torch.optim.AdamW):
    """torch's fused AdamW: on CUDA with host.kernels triton by a kernel that also scales the gradients, else by torch's own.

    Args:
        groups: (parameters, weight decay) pairs.
        lr: Learning rate.
    """

    def __init__(self, groups: Sequence[tuple[list[nn.Parameter], float]], lr: float) -> None:
        params: list[dict[str, Any]] = [{"params": params, "weight_decay": decay} for params, decay in groups]
        super().__init__(params, lr=lr, betas=BETAS, eps=EPSILON, foreach=False, fused=True)

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, *, rate: Tensor | None = None, scale: Tensor | None = None
    ) -> None:
        """Update every parameter with its gradient, multiplied by `scale`; numbers are on the device, `rate` is by default the group's."""
        if closure is not None:
            raise ValueError("this AdamW does not support a closure")
        for group in self.param_groups:
            members: list[Tensor] = group["params"]
            for parameter in members:
                gradient_of(parameter)
                if not self.state[parameter]:
                    self.state[parameter] |= self.first_state(parameter)
            states, device = [self.state[parameter] for parameter in members], members[0].device
            adamw_(
                [local(parameter) for parameter in members],
                [local(gradient_of(parameter)).contiguous() for parameter in members],
                *([local(state[key]) for state in states] for key in ("exp_avg", "exp_avg_sq", "step")),
                lr=number(group["lr"], device) if rate is None else rate,
                betas=group["betas"],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                scale=number(1.0, device) if scale is None else scale,
            )

    def averages(self, parameter: Tensor) -> dict[str, torch.dtype]:
        """Names of the averages of a parameter, with their dtypes."""
        return {"exp_avg": parameter.dtype, "exp_avg_sq": parameter.dtype}

    def first_state(self, parameter: Tensor, held: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """State of a parameter before its first update; its averages are the ones `held` in host memory, if any, else new.

        Source: torch/optim/adamw.py and adam.py, `_init_group` with `fused`.
        """
        averages = held or {key: torch.zeros_like(parameter, memory_format=torch.preserve_format) for key in self.averages(parameter)}
        return {"step": torch.zeros((), dtype=torch.float32, device=parameter.device), **averages}
