"""Adapters merged into the weights of their linears: W + alpha / rank · B A, with W dequantised if `lora.base` packs it."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megakernels import unpacked
from megakernels.ops.packed_weight.facts import Packing
from megaplan.inventory.adapters import A_SUFFIX, B_SUFFIX
from megarun.checkpoint.full_tensors import full_tensors
from megarun.checkpoint.index import SavedTensor
from megarun.job.job import Job
from megarun.parallel.groups.packed import PARTS
from megarun.remote import AnyPath


@dataclass(frozen=True, slots=True)
class Adapters:
    """The adapters of a checkpoint.

    Attributes:
        checkpoint: Folder of the checkpoint.
        names: Adapted linears: full names, without `.weight`.
        scale: alpha / rank.
        packed: Packed weights by name, with their shapes.
        packing: Form of their rows.
    """

    checkpoint: AnyPath
    names: frozenset[str]
    scale: float
    packed: Mapping[str, tuple[int, ...]]
    packing: Packing | None

    @classmethod
    def of(cls, checkpoint: AnyPath, job: Job, saved: Mapping[str, Any]) -> "Adapters":
        """Adapters of a checkpoint, by its index; empty for a checkpoint of a base model."""
        if job.spec.lora is None:
            return cls(checkpoint, frozenset(), 0.0, {}, None)
        names = frozenset(
            name.removesuffix(f".{A_SUFFIX}") for name in saved if name.endswith(f".{A_SUFFIX}") and not name.startswith("optimizer.")
        )
        packed = {name: tensor.shape for name, tensor in job.inventory.tensors() if f"{name}.{PARTS[0]}" in saved}
        return cls(checkpoint, names, job.spec.lora.scale, packed, job.spec.lora.packing)

    def whole(self, saved: Mapping[str, SavedTensor], dtype: str) -> dict[str, SavedTensor]:
        """Records of a checkpoint's tensors in which packed weights are matrices of this dtype."""
        return {**saved, **{name: SavedTensor(dtype, shape, ()) for name, shape in self.packed.items()}}

    def tensors(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """The parameters of these names, with their adapters."""
        for name in names:
            yield name, self.merged(name, self._read(name))

    def _read(self, name: str) -> Tensor:
        if name not in self.packed or self.packing is None:
            return dict(full_tensors(self.checkpoint, [name]))[name]
        wanted = PARTS if self.packing.nested else PARTS[:2]
        rows = torch.cat([tensor for _, tensor in full_tensors(self.checkpoint, [f"{name}.{part}" for part in wanted])], 1)
        return unpacked(rows, self.packed[name][1], self.packing, torch.float32)

    def merged(self, name: str, tensor: Tensor) -> Tensor:
        """A parameter with its adapter merged, in fp32; unchanged without an adapter."""
        linear = name.removesuffix(".weight")
        if linear not in self.names:
            return tensor
        found = dict(full_tensors(self.checkpoint, [f"{linear}.{A_SUFFIX}", f"{linear}.{B_SUFFIX}"]))
        return tensor.float().addmm_(found[f"{linear}.{B_SUFFIX}"].float(), found[f"{linear}.{A_SUFFIX}"].float(), alpha=self.scale)
