"""The numbers of delayed scaling of a rank's stages (`megakernels.ops.fp8_linear.delayed`): their storage, and their update once per step.

A stage has the numbers of all its products in one buffer, and their histories in another, by blocks and weights in the inventory's order.
Products read the factors and raise the largest magnitudes; evaluations raise a copy of them. After an update of the parameters the ranks
that multiply by the same weights reduce the largest magnitudes, in one collective, so that all have equal factors whatever data they
processed. In a checkpoint a block has its factors and its history; the magnitudes of a step that has begun are dropped with it.

Source: Transformer Engine, `FP8GlobalStateManager.reduce_and_update_fp8_tensors`, whose group Megatron-Core makes of tensor, context and
data ranks.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megakernels.ops.fp8_linear.delayed import FACTOR, LARGEST, LIMIT, update_factors
from megakernels.ops.fp8_linear.facts import DELAYED_NUMBERS, DELAYED_ROLES
from megakernels.ops.fp8_linear.inputs import FORMATS
from megaplan.spec.low_precision import LowPrecision
from megarun.parallel.groups.mesh import RankMesh

FACTORS, HISTORY = "scaling_factors", "scaling_history"
"""Names of a block's tensors in a checkpoint."""


def is_scaling(name: str) -> bool:
    """True for the name of a tensor of delayed scaling in a checkpoint."""
    return name.rpartition(".")[2] in (FACTORS, HISTORY)


class DelayedNumbers:
    """Numbers of a stage's products.

    Attributes:
        now: fp32 [3, operands]: factors, largest magnitudes of the step, largest numbers of the formats; none before `create`.
        history: fp32 [operands, steps].
        of: Numbers of each weight by its full name.
    """

    def __init__(self, recipe: LowPrecision) -> None:
        """Nothing has numbers yet."""
        self.recipe = recipe
        self.now = self.history = torch.empty(0)
        self.of: dict[str, OwnNumbers] = {}
        self._blocks: dict[str, slice] = {}
        self._limits: list[float] = []

    def add(self, block: str, gradient_formats: Mapping[str, str]) -> None:
        """Have numbers for a block's weights, in whose products outputs' gradients have these formats."""
        start, largest = len(self._limits), {name: torch.finfo(dtype).max for name, dtype in FORMATS.items()}
        for weight, format_of in gradient_formats.items():
            self.of[f"{block}.{weight}"] = OwnNumbers(self, len(self._limits))
            self._limits += [largest["e4m3"], largest["e4m3"], largest[format_of]]
        self._blocks[block] = slice(start, len(self._limits))

    def create(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The two buffers in the initial state: factors of 1 and no recorded maxima."""
        count = len(self._limits)
        self.now = torch.ones((DELAYED_NUMBERS, count), device=device)
        self.history = torch.zeros((count, self.recipe.amax_history), device=device)
        for index, limit in enumerate(self._limits):  # one tensor for all would need memory in addition to the buffers
            self.now[LIMIT, index].fill_(limit)
        self.drop()
        return self.now, self.history

    def drop(self) -> None:
        """Forget the largest magnitudes of the step."""
        self.now[LARGEST].zero_()

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Factors and histories by block."""
        for block, own in self._blocks.items():
            yield f"{block}.{FACTORS}", self.now[FACTOR, own]
            yield f"{block}.{HISTORY}", self.history[own]


class OwnNumbers(NamedTuple):
    """Numbers of the products with one weight.

    Attributes:
        stage: Numbers of its stage.
        first: Index of its first operand.
    """

    stage: DelayedNumbers
    first: int

    def __call__(self) -> Tensor:
        """fp32 [3, 3], to be read and raised."""
        return self.stage.now[:, self.first : self.first + DELAYED_ROLES]


def numbers_of(each: Iterable[OwnNumbers | None], *, records: bool) -> list[Tensor]:
    """The delayed-scaling numbers of the products that have any, or copies of them if this pass must not record maxima."""
    found = [own() for own in each if own is not None]
    return found if records else [own.clone() for own in found]


class DelayedUpdates:
    """Updates the numbers of a rank's stages; its methods are called by all ranks together.

    Groups are created here, by every rank for all stages in the same order.
    """

    def __init__(self, stages: Sequence[DelayedNumbers], mesh: RankMesh, copies: int) -> None:
        """`stages` in the model's order; `copies`: pipeline ranks with copies of the same stages."""
        self._stages = [each for each in stages if each.now.numel()]
        self._group: dist.ProcessGroup | None = None
        self._shared = False
        pp = mesh.size("pp")
        per_stage = mesh.axes.size() // pp
        if not stages:
            return
        for place in range(pp // copies):
            places = [place] if copies == 1 else [place, pp - 1 - place]
            members = [one * per_stage + index for one in places for index in range(per_stage)]
            group = dist.new_group(members) if 1 < len(members) < mesh.axes.size() else None
            if mesh.rank in members:
                self._group, self._shared = group, len(members) > 1

    def update(self, step: int) -> None:
        """Reduce the largest magnitudes and make the factors of the step after 0-based `step`."""
        if not self._stages:
            return
        largest = torch.cat([each.now[LARGEST] for each in self._stages]) if len(self._stages) > 1 else self._stages[0].now[LARGEST]
        if self._shared:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._group)
        for each, own in zip(self._stages, torch.split(largest, [each.now.shape[1] for each in self._stages]), strict=True):
            each.now[LARGEST].copy_(own)
            recipe = each.recipe
            most_recent = recipe.amax_compute == "most_recent"
            update_factors(each.now, each.history, step % recipe.amax_history, most_recent=most_recent, margin=recipe.margin)

    def drop(self) -> None:
        """Discard the values that a step without an update has recorded."""
        for each in self._stages:
            each.drop()
