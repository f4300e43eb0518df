"""A recorder for `megarun.parallel.apply.graphs` without a GPU: keeps every operation with its tensors, and runs them again.

As a CUDA graph does, a replay calls no Python function of the model: it repeats the operations in their order, on the tensors of the
recording, with the numbers that these calls had. Storages that the model resizes are resized again.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Step = Callable[[], None]


class Tape(TorchDispatchMode):
    """Operations in their order.

    Attributes:
        steps: Functions that run them again.
        calls: Name of each, and the numbers among its arguments.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and keep it."""
        del types
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        self.calls.append((str(func), tuple(each for each in tree_leaves((args, kwargs)) if isinstance(each, (int, float)))))
        given = {id(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        held = {each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        made = [each for each in tree_leaves(found) if isinstance(each, Tensor)]
        is_view = bool(made) and not func._schema.is_mutable and all(each.untyped_storage()._cdata in held for each in made)
        if is_view or func._schema.name.startswith(("aten::empty", "aten::new_empty", "aten::detach")):
            return found

        def again() -> None:
            results = [each for each in tree_leaves(func(*args, **kwargs)) if isinstance(each, Tensor)]
            for place, value in zip(made, results, strict=True):
                if id(place) not in given and value.untyped_storage()._cdata != place.untyped_storage()._cdata:
                    place.copy_(value)

        self.steps.append(again)
        return found


class TapeRecorder:
    """A recorder whose recordings run on the CPU, and leave no trace of the recording itself in what the model keeps between steps."""

    def __init__(self, kept: Callable[[], list[Tensor]]) -> None:
        """Args: gives the tensors, such as the sums of a step, that a recording must not change."""
        self._kept = kept
        self.tapes: list[Tape] = []
        self.num_replays = 0

    def record(self, work: Callable[[], None]) -> Step:
        """See `megarun.parallel.apply.graphs.Recorder`."""
        tape, resize = Tape(), torch.UntypedStorage.resize_
        before = [(each, each.detach().clone()) for each in self._kept()]

        def resized(storage: Any, size: int) -> Any:
            tape.steps.append(lambda: resize(storage, size) and None)
            return resize(storage, size)

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign]
        try:
            with tape:
                work()
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
            with torch.no_grad():
                for each, values in before:
                    each.copy_(values)
        self.tapes.append(tape)

        def replay() -> None:
            self.num_replays += 1
            with torch.no_grad():
                for step in tape.steps:
                    step()

        return replay

    def drop(self) -> None:
        """See `megarun.parallel.apply.graphs.Recorder`."""
        self.tapes.clear()
