"""The module that an operation belongs to: the running module in forward, the owner of its operands in backward."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import local
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from megaplan.inventory.tensors import Outside
from megaplan.spec.models import SIDES
from megarun.parallel.apply.pipeline import BatchLoss
from megarun.trace.kinds import Kind
from megarun.trace.tracker import StorageRecord

LOSS = "loss"
RESIDUAL_OUTPUTS = {
    "aten.add.Tensor": (0,),
    "megakernels.gated_add.default": (0,),
    "megakernels.gated_add_backward.default": (0,),
}
"""Outputs of side embeddings that are the residual stream or its gradient."""


class Places:
    """The stack of running modules of each thread, by their paths in the stage; a pair in turns runs in two."""

    def __init__(self, stages: Iterable[nn.Module]) -> None:
        self._paths = {module: path for stage in stages for path, module in stage.named_modules()}
        self._threads = local()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context in which the running modules are tracked."""

        def pop(_: nn.Module, __: Any, ___: Any) -> None:
            self._stack.pop()

        handles = (
            register_module_forward_pre_hook(lambda module, _: self._stack.append(module)),
            register_module_forward_hook(pop, always_call=True),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @property
    def _stack(self) -> list[nn.Module]:
        found: list[nn.Module] = vars(self._threads).setdefault("stack", [])
        return found

    def path(self, module: nn.Module) -> str:
        """A module's path in its stage; `loss` for the criterion, "" for the stage itself and for modules outside stages."""
        return LOSS if isinstance(module, BatchLoss) else self._paths.get(module, "")

    @property
    def running(self) -> str:
        """Path of the innermost running module with a path; a side embedding that a prediction depth adds is below the depth."""
        inner = ""
        for module in reversed(self._stack):
            if module in self._paths or isinstance(module, BatchLoss):
                path = self.path(module)
                if inner and path.startswith("mtp."):
                    return f"{path}.{inner}"
                inner = inner or path
                if inner.partition(".")[0] not in SIDES:
                    break
        return inner

    @property
    def in_module(self) -> bool:
        """True if any module runs."""
        return bool(self._stack)

    @property
    def in_forward(self) -> bool:
        """True if a forward pass is running, not autograd."""
        return bool(self._stack) and torch._C._current_autograd_node() is None

    def of_operation(self, operands: Iterable[StorageRecord]) -> tuple[str, bool]:
        """Place of the running operation, and whether it is a forward's.

        In backward, an operation belongs to the module of its parameter operand, else of an operand allocated in forward, else of any
        operand. No operation of the A layers makes the table that they share.
        """
        if self._stack:
            return self.running, self.in_forward
        best, place = 3, ""
        for record in operands:
            rank = 0 if record.kind in (Kind.PARAMETER, Kind.GATHERED_PARAMETER) and record.name else 1 if record.forward else 2
            owner = record.name.rpartition(".")[0] if rank == 0 else "" if is_stream(record) else record.place
            if rank < best and owner not in ("", Outside.RELATION_BIAS):
                best, place = rank, owner
        return place, False


def in_side_embedding(record: StorageRecord) -> bool:
    """True if a storage is made in a side embedding of the stage or of a prediction depth."""
    parts = record.place.split(".")
    return (parts[2:] if parts[0] == "mtp" else parts)[:1] in ([name] for name in SIDES)


def is_stream(record: StorageRecord) -> bool:
    """True if a side embedding makes the storage from the residual stream or its gradient."""
    return record.output in RESIDUAL_OUTPUTS.get(record.op, ()) and in_side_embedding(record)
