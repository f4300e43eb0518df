"""Hyper-connections compared with transformers' modules of DeepSeek-V4 and hy_v4: values and every gradient."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megakernels import collapse_streams, expand_streams
from megakernels.ops.hyper_connection.facts import Connection

v4 = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
hy = pytest.importorskip("transformers.models.hy_v4.modeling_hy_v4")
EPS, NORM_EPS, MAGNITUDE, FACTOR = 1e-6, 1e-5, 1.7, 1.5


def theirs(kind: str, module: Any, streams: torch.Tensor, made: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The stream that a block reads and, except for the head, the new streams."""
    if kind == "head":
        return (module(streams),)
    post, *comb, read = module(streams)
    old = torch.matmul(comb[0].transpose(-1, -2), streams) if comb else streams
    return read, FACTOR * post.unsqueeze(-1) * made.unsqueeze(-2) + old


@pytest.mark.parametrize(
    ("kind", "count", "width", "steps"),
    [("mixed", 4, 16, 20), ("mixed", 3, 10, 1), ("mixed", 5, 8, 2), ("separate", 4, 16, 1), ("separate", 2, 16, 1), ("head", 4, 8, 1)],
)
def test_connections_of_transformers(kind: str, count: int, width: int, steps: int) -> None:
    torch.manual_seed(0)
    config = SimpleNamespace(
        hc_mult=count, hc_sinkhorn_iters=steps, hc_eps=EPS, rms_norm_eps=NORM_EPS, hidden_size=width, hc_magnitude=MAGNITUDE
    )
    module = {"mixed": v4.DeepseekV4HyperConnection, "separate": hy.HYV4HyperConnection, "head": v4.DeepseekV4HyperHead}[kind](config)
    parameters = {name.removeprefix("hc_"): torch.nn.init.normal_(parameter) for name, parameter in module.named_parameters()}
    streams, made = torch.randn(2, 7, count, width, requires_grad=True), torch.randn(2, 7, width, requires_grad=True)
    expected = theirs(kind, module, streams, made)
    how = Connection(count, NORM_EPS, EPS, MAGNITUDE if kind == "separate" else 2.0, steps)
    x = streams.flatten(2)
    read, weights = collapse_streams(x, parameters["fn"], parameters["base"], parameters["scale"], how)
    found = (read,) if kind == "head" else (read, expand_streams(x, made, weights, count, FACTOR).unflatten(-1, (count, width)))
    wanted = [streams, *parameters.values(), *([] if kind == "head" else [made])]
    slopes = [torch.randn_like(each) for each in expected]
    for ours, other in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, other, atol=1e-5, rtol=1e-5)
    for ours, other in zip(torch.autograd.grad(found, wanted, slopes), torch.autograd.grad(expected, wanted, slopes), strict=True):
        assert (ours - other).norm() <= 1e-5 * other.norm()
