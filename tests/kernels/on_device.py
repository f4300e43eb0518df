"""Checks that were written for the host, on a device: their tensors are there, with the same values."""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

DRAWN = (torch.randn, torch.rand, torch.randint, torch.randperm, torch.normal)
"""A call with a generator of the host runs on the host."""
DRAWN_LIKE = {torch.randn_like: torch.randn, torch.rand_like: torch.rand}
DRAWN_INTO = (Tensor.normal_, Tensor.uniform_, Tensor.random_, Tensor.bernoulli_)
TO_HOST = (Tensor.numpy, Tensor.__array__)
FROM_HOST = ("from_numpy", "frombuffer")
"""Functions that torch's mode does not see: they are replaced."""


class OnDevice(TorchFunctionMode):  # type: ignore[no-untyped-call]  # torch's mode has no types
    """Random values are drawn on the host and moved; numpy's arrays go there and back. `torch.device` as a context does the rest."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._originals = {name: getattr(torch, name) for name in FROM_HOST}

    def __enter__(self) -> Any:
        for name, original in self._originals.items():
            setattr(torch, name, lambda *args, _original=original, **given: _original(*args, **given).to(self._device))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for name, original in self._originals.items():
            setattr(torch, name, original)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if func in DRAWN and given.get("device") is None:
            return func(*args, **given, device="cpu").to(self._device)
        if func in DRAWN_LIKE and args[0].device == self._device:
            return DRAWN_LIKE[func](args[0].shape, **{"dtype": args[0].dtype, **given}, device="cpu").to(self._device)
        if func in DRAWN_INTO and args[0].device == self._device:
            host = torch.empty(args[0].shape, dtype=args[0].dtype, device="cpu")
            return args[0].copy_(func(host, *args[1:], **given))
        if func in TO_HOST:
            return func(args[0].cpu(), *args[1:], **given)
        return func(*args, **given)
