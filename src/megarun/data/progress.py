"""Maps steps to batches when bad steps have skipped some; needs no torch.

Batch b is rows b · n to (b + 1) · n of training (`megarun.data.token_file`). Without bad steps, step s trains on batch s. A bad step makes
no update and skips its batch, so step s trains on the s-th batch that is not skipped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class DataProgress:
    """The data position of a run: together with its step, sufficient to read the same batches again.

    Attributes:
        skipped: Skipped batches, as increasing half-open ranges that do not touch.
        losses: Losses of the latest steps, newest last, for spike detection (`training.bad_steps.spike`).
    """

    skipped: tuple[tuple[int, int], ...] = ()
    losses: tuple[float, ...] = ()

    def batch(self, step: int) -> int:
        """The batch of 0-based `step`."""
        number = step
        for first, stop in self.skipped:
            if first > number:
                break
            number += stop - first
        return number

    def without(self, *ranges: tuple[int, int]) -> DataProgress:
        """A copy with more skipped batches, given as half-open ranges."""
        merged: list[tuple[int, int]] = []
        for first, stop in sorted((*self.skipped, *ranges)):
            if merged and first <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(stop, merged[-1][1])
            else:
                merged.append((first, stop))
        return replace(self, skipped=tuple(merged))

    def after(self, loss: float, num_losses: int) -> DataProgress:
        """A copy with one more loss; the last `num_losses` are kept."""
        return replace(self, losses=(*self.losses, loss)[-num_losses:] if num_losses else ())


START = DataProgress()
"""Data progress at the start of a run."""
