"""Changes that would make a step faster, as lines: `megaplan estimate --advice`."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING

from megaplan.layout.step_time import PlannedTime
from megaplan.units import format_bytes, format_ns

if TYPE_CHECKING:
    from megaplan.advice.faster import Faster
    from megaplan.api.estimate import Estimate


def advice_lines(found: Estimate) -> Iterator[str]:
    """Options to append to the command, each with its resulting numbers; or the reason that there are none."""
    if not found.fits:
        yield "faster: not looked for, since the job does not fit"
    elif not isinstance(found.step_time, PlannedTime):
        yield "faster: not looked for, since the step is not timed"
    elif not found.faster:
        yield "faster: no change that was tried shortens the step by 1 % on the same number of GPUs"
    else:
        yield "faster, on the same number of GPUs:"
        yield from map(_line, found.faster)


def _line(change: Faster) -> str:
    options = " ".join(f"--set {shlex.quote(text)}" for text in change.overrides)
    peak, free = format_bytes(change.price.peak_bytes), format_bytes(-change.price.over_bytes)
    return f"  {options}   # step {format_ns(change.step_ns)} ({-100 * change.gained:+.1f} %), peak {peak}, headroom {free}"
