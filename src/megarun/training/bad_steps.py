"""Steps whose update would corrupt the parameters: detected on all ranks, skipped, and rewound if they persist.

A bad step skips its batch. More consecutive bad steps than `training.bad_steps.skips` mean that the parameters are corrupted rather than a
batch: the run rewinds to its last checkpoint and continues without those batches and some before them, whose updates may be the cause.
"""

import math
from statistics import median
from typing import Literal

import torch
import torch.distributed as dist

from megaplan.spec.training import BadSteps
from megarun.checkpoint.keeper import Keeper
from megarun.checkpoint.resume import Found
from megarun.data.progress import START, DataProgress
from megarun.engine.trainer import StepResult, Trainer
from megarun.errors import refusal
from megarun.metrics.records import Decision

REASONS = (
    "",
    "the loss is a spike",
    "gradients overflow fp16, so the scale of the loss is halved",
    "the gradient norm is not finite",
    "the loss is not finite",
)
OVERFLOWS = 2


class StepGuard:
    """Checks every step before its update; every method is collective.

    Attributes:
        data_progress: Skipped batches, and the latest losses.
    """

    def __init__(self, rules: BadSteps, keeper: Keeper, trainer: Trainer) -> None:
        self._rules, self._keeper, self._trainer = rules, keeper, trainer
        self.data_progress: DataProgress = START
        self._row: list[int] = []  # batches of consecutive bad steps
        self._num_rewinds = 0
        self._back: Found | None = None

    def start(self) -> int:
        """Load the checkpoint that was found, if any; returns the number of steps done."""
        step, self.data_progress = self._keeper.start(self._trainer)
        self._trainer.scale_losses(self.data_progress.loss_scale)
        return step

    def judge(self, step: int, result: StepResult) -> Decision | None:
        """The decision about 0-based `step`; None if it is good and can be applied."""
        reason = torch.tensor(self._reason(result))
        dist.all_reduce(reason, op=dist.ReduceOp.MAX, group=self._keeper.control)  # all ranks decide equally, despite rounding differences
        if not reason:
            self._row.clear()
            spike = self._rules.spike
            self.data_progress = self.data_progress.after(result.loss, spike.steps if spike else 0)
            self._scale(overflows=False)
            return None
        bad = self.data_progress.batch(step)
        if reason == OVERFLOWS:
            self._scale(overflows=True)
            return self._decision("skip", step, result, OVERFLOWS, (bad, bad + 1), step)
        self._row.append(bad)
        if len(self._row) <= self._rules.skips:
            return self._decision("skip", step, result, int(reason), (bad, bad + 1), step)
        self._back = self._keeper.last() if self._num_rewinds < self._rules.rewinds else None
        if self._back is None:
            return self._decision("stop", step, result, int(reason), (bad, bad + 1), step)
        target = self._back.manifest
        # batches before the checkpoint have already updated the parameters
        first = max(self._row[0] - self._rules.window_batches, target.data_progress.batch(target.step))
        return self._decision("rewind", step, result, int(reason), (first, bad + 1), target.step)

    def follow(self, decision: Decision) -> int:
        """Apply a decision after every rank has reported it; returns the next 0-based step.

        Raises:
            MegaplanError: MP607 if the run ends.
        """
        self._trainer.drop_gradients()
        if decision.decision == "stop":
            # the first failing rank ends the others: wait until rank 0 has written its line of metrics.jsonl
            dist.barrier(self._keeper.control)
            raise self._refusal(decision)
        left_out = self.data_progress.without(decision.batches).skipped
        if self._back is not None:
            _, self.data_progress = self._keeper.go_back(self._trainer, self._back)
            self._back, self._num_rewinds = None, self._num_rewinds + 1
            self._row.clear()
            self._trainer.scale_losses(self.data_progress.loss_scale)
        self.data_progress = self.data_progress.without(*left_out)
        return decision.next_step - 1

    def _scale(self, *, overflows: bool) -> None:
        if self._trainer.scales_losses:
            self.data_progress = self.data_progress.scaled(overflows=overflows)
            self._trainer.scale_losses(self.data_progress.loss_scale)

    def _reason(self, result: StepResult) -> int:
        """Index of `REASONS`."""
        if not math.isfinite(result.loss):
            return 4
        if not math.isfinite(result.gradient_norm):
            return OVERFLOWS if self._trainer.scales_losses and self.data_progress.loss_scale > 1 else 3
        spike, losses = self._rules.spike, self.data_progress.losses
        return int(spike is not None and len(losses) == spike.steps and result.loss > spike.factor * median(losses))

    def _decision(
        self, what: Literal["skip", "rewind", "stop"], step: int, result: StepResult, reason: int, batches: tuple[int, int], following: int
    ) -> Decision:
        loss, norm = (value if math.isfinite(value) else None for value in (result.loss, result.gradient_norm))
        return Decision(what, step + 1, REASONS[reason], loss, norm, batches, following + 1)

    def _refusal(self, decision: Decision) -> Exception:
        row, rules = len(self._row), self._rules
        lines = [f"step {decision.step}: {decision.reason}: loss = {_shown(decision.loss)}, gradient norm = {_shown(decision.grad_norm)}"]
        if row > 1 or rules.skips:
            lines.append(f"{row} bad steps in a row, training.bad_steps.skips = {rules.skips}")
        if self._num_rewinds < rules.rewinds:
            lines.append("no checkpoint to rewind to")
        else:
            lines.append(f"{self._num_rewinds} rewinds, training.bad_steps.rewinds = {rules.rewinds}")
        return refusal("MP607", "\n".join(lines), "training.learning_rate")


def _shown(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"
