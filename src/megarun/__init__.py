"""The PyTorch runtime that trains a megaplan plan exactly.

    import megarun

    megarun.train("plan.json", "corpus.tokens", "runs/first", steps=100)

Each name is imported when it is first asked for; torch is loaded when a run starts.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megarun.api import train
    from megarun.metrics.records import StepMetrics
    from megarun.training.loop import Trained

_HOMES = {"api": ("train",), "metrics.records": ("StepMetrics",), "training.loop": ("Trained",)}

__all__ = ["StepMetrics", "Trained", "train"]


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"megarun.{module}"), name)
    raise AttributeError(f"module 'megarun' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
