"""What blocks sum up over the microbatches of a step, on the device, and what a step's metrics make of it.

An E layer has one row of sums: how many rows each of its E experts got, the entropy of all tokens' routing distributions, and its two
losses. All of them are sums over tokens, so ranks, microbatches and stages add up in any order: one row a layer, one sum over ranks a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

NUM_LOSSES = 2
"""Balance loss and z-loss, the last columns of a layer's sums."""


def num_sums(num_experts: int) -> int:
    """Columns of an E layer's sums: rows of each expert, entropy in nats, balance loss, z-loss."""
    return num_experts + 1 + NUM_LOSSES


@dataclass(frozen=True, slots=True)
class LayerRouting:
    """Where an E layer has sent one step's tokens.

    Attributes:
        layer: Its index in the model.
        load: Rows of its busiest expert, over the mean of all: 1 where they are even, E / k at most.
        entropy: Of the routing distribution over all experts, in nats, mean of the tokens: log E where it is uniform.
        num_idle: Experts that got no row.
    """

    layer: int
    load: float
    entropy: float
    num_idle: int


@dataclass(frozen=True, slots=True)
class Routed:
    """What all routers did in a step.

    Attributes:
        balance_loss: What load balancing adds to the loss, over all layers, its coefficient included.
        z_loss: Likewise the z-loss.
        layers: Each E layer, in model order.
    """

    balance_loss: float = 0.0
    z_loss: float = 0.0
    layers: tuple[LayerRouting, ...] = ()

    @classmethod
    def of(cls, layers: Sequence[int], table: Sequence[Sequence[float]], top_k: int) -> Routed:
        """From whole sums.

        Args:
            layers: Index of each E layer.
            table: Its sums, over all ranks.
            top_k: Experts that a token chooses.
        """
        found = []
        for layer, (*rows, entropy, _, _) in zip(layers, table, strict=True):
            mean, num_tokens = sum(rows) / len(rows), sum(rows) / top_k
            found.append(LayerRouting(layer, max(rows) / mean, entropy / num_tokens, sum(count == 0 for count in rows)))
        return cls(sum(row[-2] for row in table), sum(row[-1] for row in table), tuple(found))


def start_sums(stages: Iterable[nn.Module]) -> None:
    """Begin the sums of a step."""
    for name in ("sums", "further_loss"):
        for _, sums in _buffers(stages, name):
            sums.zero_()


def sum_further(stages: Iterable[nn.Module], device: torch.device) -> Tensor:
    """This rank's loss of further tokens in a step, fp64 scalar."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for _, sums in _buffers(stages, "further_loss"):
        total += sums
    return total


def routing_table(stages: Iterable[nn.Module], layers: Sequence[int], num_experts: int, device: torch.device) -> Tensor:
    """This rank's sums of all E layers of the model, zeros for those of other ranks: fp64 [layers, `num_sums`]."""
    table = torch.zeros((len(layers), num_sums(num_experts)), dtype=torch.float64, device=device)
    for name, sums in _buffers(stages, "sums"):
        table[layers.index(int(name.split(".")[1]))] += sums
    return table


def _buffers(stages: Iterable[nn.Module], wanted: str) -> Iterator[tuple[str, Tensor]]:
    return ((name, buffer) for stage in stages for name, buffer in stage.named_buffers() if name.rpartition(".")[2] == wanted)
