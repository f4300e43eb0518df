"""An operation beside an implementation that others publish: outputs, and the gradient of every input."""

import sys
from collections.abc import Callable, Iterable, Mapping

import pytest
import torch
from torch import Tensor, nn

TOLERANCE = 1e-5
ZERO = 1e-6
"""Values that are expected to be zero may be rounding: the gradient of a single key."""
ROWS: list[tuple[str, str, str, float]] = []
"""Operation, implementation, what is farthest apart, and how far; printed when all tests have run."""


def normal(seed: int, *shape: int) -> Tensor:
    """fp32 values from N(0, 1), the same for one seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rms_ratio(found: Tensor, expected: Tensor) -> float:
    """Root mean square of the difference over that of what is expected, or plain where that is zero up to rounding; NaN is infinite."""
    difference = (found.double() - expected.double()).square().mean().sqrt()
    size = expected.double().square().mean().sqrt()
    ratio = (difference / size if size > ZERO else difference).item()
    return ratio if ratio == ratio else float("inf")  # noqa: PLR0124


def note(operation: str, source: str, ratios: Mapping[str, float], tolerance: float = TOLERANCE) -> None:
    """Writes the row of a comparison, and fails where something is farther apart than the tolerance."""
    worst = max(ratios, key=lambda name: ratios[name])
    ROWS.append((operation, source, worst, ratios[worst]))
    assert {name: ratio for name, ratio in ratios.items() if not ratio <= tolerance} == {}


def run(call: Callable[..., Tensor | tuple[Tensor, ...]], inputs: Mapping[str, Tensor], constant: Iterable[str]) -> dict[str, Tensor]:
    """Outputs and gradients by name, for fixed gradients of the outputs."""
    own = {name: tensor.detach().clone() for name, tensor in inputs.items()}
    wanted = [name for name, tensor in own.items() if tensor.is_floating_point() and name not in constant]
    for name in wanted:
        own[name].requires_grad_()
    outputs = call(**own)
    outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
    seeds = [normal(11 + index, *output.shape) for index, output in enumerate(outputs)]
    gradients = torch.autograd.grad(outputs, [own[name] for name in wanted], seeds)
    found = {f"output {index}": output.detach() for index, output in enumerate(outputs)}
    return found | {f"gradient of {name}": gradient for name, gradient in zip(wanted, gradients, strict=True)}


def compare(
    operation: str,
    source: str,
    ours: Callable[..., Tensor | tuple[Tensor, ...]],
    theirs: Callable[..., Tensor | tuple[Tensor, ...]],
    inputs: Mapping[str, Tensor],
    constant: Iterable[str] = (),
) -> None:
    """Both on the same inputs, in fp32."""
    found, expected = run(ours, inputs, constant), run(theirs, inputs, constant)
    note(operation, source, {name: rms_ratio(found[name], expected[name]) for name in expected})


def use_plain_torch(layer: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions that transformers wraps to prefer an installed package's kernels, which need a GPU."""
    module = sys.modules[type(layer).__module__]
    for name, function in list(vars(module).items()):
        if name.startswith(("torch_", "chunk_", "causal_conv1d")) and hasattr(function, "__wrapped__"):
            monkeypatch.setattr(module, name, function.__wrapped__)
