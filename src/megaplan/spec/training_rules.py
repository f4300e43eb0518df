"""Rules of learning rates: phases must fit the steps of training, and the rate must be usable."""

from __future__ import annotations

from collections.abc import Iterator

from megaplan.errors import Diagnostic
from megaplan.spec.context import Checked
from megaplan.spec.training import StableRate, warm_up_steps

LARGEST_RATE = 1.0
"""Above this rate one update is as large as the parameters, which are initialised below 1."""


def training_rules(checked: Checked) -> Iterator[Diagnostic]:
    """Yields MP722 and MP729."""
    training = checked.spec.training
    for name in ("learning_rate", "muon_learning_rate"):
        rate = getattr(training, name)
        if rate is not None and rate > LARGEST_RATE:
            detail = f"training.{name} = {rate:g}, above {LARGEST_RATE:g}: one update moves a parameter by about the rate"
            yield checked.warning("MP729", detail, f"training.{name}", f"{name}: 3.0e-4")
    schedule, steps = training.rate_schedule, training.steps
    warm_up = warm_up_steps(schedule, steps)
    parts = {"warmup_steps": warm_up}
    if isinstance(schedule, StableRate):
        parts["decay_steps"] = schedule.decay_steps
    total = sum(parts.values())
    if total > steps:
        written = " + ".join(parts) if len(parts) > 1 else "warmup_steps"
        values = f" = {' + '.join(map(str, parts.values()))}" if len(parts) > 1 else ""
        detail = f"training.rate_schedule: {written}{values} = {total}, and training.steps = {steps}"
        last = list(parts)[-1]
        shorter = steps - (total - parts[last])
        hint = f"{last}: {shorter}" if shorter >= 1 else f"steps: {total}"
        yield checked.error("MP722", detail, f"training.rate_schedule.{last}", hint)
