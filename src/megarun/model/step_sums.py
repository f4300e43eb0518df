"""Sums that blocks accumulate on the device over the microbatches of a step, and the metrics derived from them.

An E layer has one row of sums: the rows that each of its E experts received, the entropy of all tokens' routing distributions, and its two
losses. All are sums over tokens, independent of the order of ranks, microbatches and stages: one row per layer, one reduction per step.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

EXPERT_BIAS = "expert_bias"
"""Name of the buffer that is added to an E layer's scores for the choice, which `move_biases` moves after each step."""
NUM_LOSSES = 2
"""Balance loss and z-loss, the last columns of a layer's sums."""


def num_sums(num_experts: int) -> int:
    """Columns of an E layer's sums: rows of each expert, entropy in nats, balance loss, z-loss."""
    return num_experts + 1 + NUM_LOSSES


@dataclass(frozen=True, slots=True)
class LayerRouting:
    """Routing statistics of an E layer in one step.

    Attributes:
        layer: Index of the layer in the model, or a prediction depth's block: `2`, `mtp.0.mlp`.
        load: Rows of the busiest expert over the mean of all: from 1 (balanced) to E / k.
        entropy: Mean entropy of the tokens' routing distributions in nats; log E if uniform.
        num_idle: Number of experts without rows.
    """

    layer: str
    load: float
    entropy: float
    num_idle: int


@dataclass(frozen=True, slots=True)
class Routed:
    """Routing statistics of a step.

    Attributes:
        balance_loss: Load-balancing loss over all layers, including its coefficient.
        z_loss: Z-loss over all layers, including its coefficient.
        layers: Statistics of each E layer, in model order.
    """

    balance_loss: float = 0.0
    z_loss: float = 0.0
    layers: tuple[LayerRouting, ...] = ()

    @classmethod
    def of(cls, layers: Sequence[str], table: Sequence[Sequence[float]], top_k: int) -> "Routed":
        """Compute the statistics from global sums.

        Args:
            layers: Module of each E block: `layers.2`, `mtp.0.mlp`.
            table: Sums over all ranks, by layer.
            top_k: Number of experts per token.
        """
        found = []
        for layer, (*rows, entropy, _, _) in zip(layers, table, strict=True):
            mean, num_tokens = sum(rows) / len(rows), sum(rows) / top_k
            found.append(
                LayerRouting(layer.removeprefix("layers."), max(rows) / mean, entropy / num_tokens, sum(count == 0 for count in rows))
            )
        return cls(sum(row[-2] for row in table), sum(row[-1] for row in table), tuple(found))


def start_sums(stages: Iterable[nn.Module]) -> None:
    """Reset the sums at the start of a step."""
    for name in ("sums", "further_loss"):
        for _, sums in _buffers(stages, name):
            sums.zero_()


def sum_further(stages: Iterable[nn.Module], device: torch.device) -> Tensor:
    """This rank's multi-token prediction loss in a step, fp64 scalar."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for _, sums in _buffers(stages, "further_loss"):
        total += sums
    return total


def routing_table(stages: Iterable[nn.Module], layers: Sequence[str], num_experts: int, device: torch.device) -> Tensor:
    """This rank's sums for all E blocks of the model, by module, zeros for blocks of other ranks: fp64 [layers, `num_sums`]."""
    table = torch.zeros((len(layers), num_sums(num_experts)), dtype=torch.float64, device=device)
    for name, sums in _buffers(stages, "sums"):
        table[layers.index(name.rpartition(".")[0])] += sums
    return table


def biases(stages: Iterable[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """The experts' biases of these stages, fp64 [E], by their full names."""
    return _buffers(stages, EXPERT_BIAS)


def move_biases(stages: Iterable[nn.Module], layers: Sequence[str], table: Sequence[Sequence[float]], rate: float) -> None:
    """Add `rate` to the bias of each expert with fewer rows than the mean, and subtract it from the bias of each with more.

    Args:
        stages: This rank's stages.
        layers: Module of each E block.
        table: Sums over all ranks, by layer.
        rate: The spec's `expert_bias_rate`.

    Source: arXiv:2408.15664, algorithm 1.
    """
    for name, bias in biases(stages):
        rows = table[layers.index(name.rpartition(".")[0])][: bias.shape[0]]
        mean = sum(rows) / len(rows)
        moves = [rate * ((count < mean) - (count > mean)) for count in rows]
        bias.add_(torch.tensor(moves, dtype=bias.dtype).to(bias.device, non_blocking=True))  # the host does not wait for the update


def _buffers(stages: Iterable[nn.Module], wanted: str) -> Iterator[tuple[str, Tensor]]:
    return ((name, buffer) for stage in stages for name, buffer in stage.named_buffers() if name.rpartition(".")[2] == wanted)
