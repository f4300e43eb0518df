"""Adapters merged into the weights of their linears: W + alpha / rank · B A."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megaplan.inventory.adapters import A_SUFFIX, B_SUFFIX
from megarun.checkpoint.full_tensors import full_tensors
from megarun.job.job import Job
from megarun.remote import AnyPath


@dataclass(frozen=True, slots=True)
class Adapters:
    """The adapters of a checkpoint.

    Attributes:
        checkpoint: Folder of the checkpoint.
        names: Adapted linears: full names, without `.weight`.
        scale: alpha / rank.
    """

    checkpoint: AnyPath
    names: frozenset[str]
    scale: float

    @classmethod
    def of(cls, checkpoint: AnyPath, job: Job, saved: Mapping[str, Any]) -> Adapters:
        """Those that a checkpoint has, by its index; one of a base has none."""
        if job.spec.lora is None:
            return cls(checkpoint, frozenset(), 0.0)
        names = frozenset(
            name.removesuffix(f".{A_SUFFIX}") for name in saved if name.endswith(f".{A_SUFFIX}") and not name.startswith("optimizer.")
        )
        return cls(checkpoint, names, job.spec.lora.scale)

    def merged(self, name: str, tensor: Tensor) -> Tensor:
        """A parameter with its adapter, in fp32; without one as it is."""
        linear = name.removesuffix(".weight")
        if linear not in self.names:
            return tensor
        found = dict(full_tensors(self.checkpoint, [f"{linear}.{A_SUFFIX}", f"{linear}.{B_SUFFIX}"]))
        return tensor.float().addmm_(found[f"{linear}.{B_SUFFIX}"].float(), found[f"{linear}.{A_SUFFIX}"].float(), alpha=self.scale)
