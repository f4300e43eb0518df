"""What a run trains on and how fast: the sections `data` and `training`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megaplan.scalars import FactorAboveOne, NaturalInt, NonNegativeFloat, PositiveFloat, PositiveInt, Section


class Data(Section):
    """What a row of a batch holds.

    Attributes:
        packing: documents keeps the documents of a row apart and predicts nothing across their ends; none reads a row as one text.
    """

    packing: Literal["none", "documents"] = "none"


Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False, strict=True)]
LONGEST_WARM_UP_STEPS = 100


class ConstantRate(Section):
    """A linear warm-up, then the base rate.

    Attributes:
        kind: constant.
        warmup_steps: Steps up to the base rate; 0 for none, null for a tenth of training.steps, at most 100.
    """

    kind: Literal["constant"] = "constant"
    warmup_steps: NaturalInt | None = None


class CosineRate(Section):
    """A linear warm-up, then half a cosine down to the end of training.

    Attributes:
        kind: cosine.
        warmup_steps: Steps up to the base rate; 0 for none, null for a tenth of training.steps, at most 100.
        final_fraction: Of the base rate, at the last step.
    """

    kind: Literal["cosine"]
    warmup_steps: NaturalInt | None = None
    final_fraction: Fraction = 0.1


class StableRate(Section):
    """Warm-up, stable, decay (WSD): the base rate until the last decay_steps.

    Attributes:
        kind: wsd.
        warmup_steps: Steps up to the base rate; 0 for none, null for a tenth of training.steps, at most 100.
        decay_steps: Steps of the decay, the last ones of training.
        decay: Its shape, linear or by the square root of its progress.
        final_fraction: Of the base rate, at the last step.
    """

    kind: Literal["wsd"]
    warmup_steps: NaturalInt | None = None
    decay_steps: PositiveInt
    decay: Literal["linear", "sqrt"] = "linear"
    final_fraction: Fraction = 0.0


RateSchedule = Annotated[ConstantRate | CosineRate | StableRate, Field(discriminator="kind")]


def warm_up_steps(schedule: RateSchedule, num_steps: int) -> int:
    """Steps of a schedule's warm-up; where it states none, a tenth of training, at most 100."""
    return min(LONGEST_WARM_UP_STEPS, num_steps // 10) if schedule.warmup_steps is None else schedule.warmup_steps


class LossSpike(Section):
    """When a finite loss is a bad step's all the same.

    Attributes:
        factor: A loss above this many times the median of the latest steps is a spike.
        steps: How many those are; before as many have been made, no loss is a spike.
    """

    factor: FactorAboveOne = 2.0
    steps: PositiveInt = 20


class BadSteps(Section):
    """Steps whose loss or gradient norm is not finite, or whose loss is a spike: their update is never applied.

    Attributes:
        skips: Bad steps in a row that only lose their batch; the next one goes back to the last checkpoint.
        rewinds: How often one start of a run goes back; the next bad step ends it.
        window_batches: Batches before the first bad one that are left out as well after going back.
        spike: Counts leaps of the loss as bad steps; null for none.
    """

    skips: NaturalInt = 3
    rewinds: NaturalInt = 1
    window_batches: NaturalInt = 2
    spike: LossSpike | None = None


class Training(Section):
    """How long and how fast to train; outside the plan's digest.

    Attributes:
        steps: Optimizer steps.
        seed: Of initialisation and data order.
        learning_rate: Of AdamW, and of Muon where muon_learning_rate is null.
        weight_decay: Decoupled weight decay.
        gradient_clip: Bound of the gradient norm; null for none.
        muon_learning_rate: Of Muon; null for learning_rate.
        rate_schedule: How both rates go over the steps.
        bad_steps: How many are passed over, and when to go back.
    """

    steps: PositiveInt = 1000
    seed: NaturalInt = 0
    learning_rate: PositiveFloat = 3.0e-4
    weight_decay: NonNegativeFloat = 0.1
    gradient_clip: PositiveFloat | None = 1.0
    muon_learning_rate: PositiveFloat | None = None
    rate_schedule: RateSchedule = ConstantRate()
    bad_steps: BadSteps = BadSteps()
