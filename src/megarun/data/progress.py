"""Maps steps to batches when bad steps have skipped some; needs no torch.

Batch b is rows b · n to (b + 1) · n of training (`megarun.data.token_file`). Without bad steps, step s trains on batch s. A bad step makes
no update and skips its batch, so step s trains on the s-th batch that is not skipped.
"""

from dataclasses import dataclass, replace

GROWTH_STEPS = 2000


@dataclass(frozen=True, slots=True)
class DataProgress:
    """The data position of a run: together with its step, sufficient to read the same batches again.

    Attributes:
        skipped: Skipped batches, as increasing half-open ranges that do not touch.
        losses: Losses of the latest steps, newest last, for spike detection (`training.bad_steps.spike`).
        loss_scale: Factor of the next step's loss if gradients are in fp16.
        num_scaled: Consecutive good steps at this scale.
    """

    skipped: tuple[tuple[int, int], ...] = ()
    losses: tuple[float, ...] = ()
    loss_scale: float = 65536.0
    num_scaled: int = 0

    def batch(self, step: int) -> int:
        """The batch of 0-based `step`."""
        number = step
        for first, stop in self.skipped:
            if first > number:
                break
            number += stop - first
        return number

    def without(self, *ranges: tuple[int, int]) -> "DataProgress":
        """A copy with more skipped batches, given as half-open ranges."""
        merged: list[tuple[int, int]] = []
        for first, stop in sorted((*self.skipped, *ranges)):
            if merged and first <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(stop, merged[-1][1])
            else:
                merged.append((first, stop))
        return replace(self, skipped=tuple(merged))

    def after(self, loss: float, num_losses: int) -> "DataProgress":
        """A copy with one more loss; the last `num_losses` are kept."""
        return replace(self, losses=(*self.losses, loss)[-num_losses:] if num_losses else ())

    def scaled(self, *, overflows: bool) -> "DataProgress":
        """A copy after one more step with scaled losses: half the scale if gradients overflow, twice after 2,000 steps in which none did.

        Source: torch/amp/grad_scaler.py (`GradScaler`), whose defaults these are.
        """
        if overflows:
            return replace(self, loss_scale=self.loss_scale / 2, num_scaled=0)
        grows = self.num_scaled + 1 == GROWTH_STEPS
        return replace(self, loss_scale=self.loss_scale * (2 if grows else 1), num_scaled=0 if grows else self.num_scaled + 1)


START = DataProgress()
"""Data progress at the start of a run."""
