"""What a run trains on and how fast: the sections `data` and `training`."""

from __future__ import annotations

from typing import Literal

from megaplan.spec.scalars import NaturalInt, NonNegativeFloat, PositiveFloat, PositiveInt, Section


class Data(Section):
    """What a row of a batch holds.

    Attributes:
        packing: documents keeps the documents of a row apart and predicts nothing across their ends; none reads a row as one text.
    """

    packing: Literal["none", "documents"] = "none"


class Training(Section):
    """How long and how fast to train; outside the plan's digest.

    Attributes:
        steps: Optimizer steps.
        seed: Of initialisation and data order.
        learning_rate: Of AdamW, and of Muon where muon_learning_rate is null.
        weight_decay: Decoupled weight decay.
        gradient_clip: Bound of the gradient norm; null for none.
        muon_learning_rate: Of Muon; null for learning_rate.
    """

    steps: PositiveInt = 1000
    seed: NaturalInt = 0
    learning_rate: PositiveFloat = 3.0e-4
    weight_decay: NonNegativeFloat = 0.1
    gradient_clip: PositiveFloat | None = 1.0
    muon_learning_rate: PositiveFloat | None = None
