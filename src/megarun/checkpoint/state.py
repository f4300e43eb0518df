"""Everything of a run that outlives a step, by name: parameters, optimizer state, generators.

A parameter has the inventory's name; its optimizer state `optimizer.NAME.momentum` (Muon) or `.exp_avg`, `.exp_avg_sq` and `.step` (AdamW).
Batches are a function of step and seed, so the data position is the step. `generator.RANK.cpu` and `.cuda` are torch's generators, which
nothing in a step draws from; they are read back by the rank of the same number where the number of ranks is the same.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megaplan.inventory.tensors import Inventory
from megarun.checkpoint.pieces import Pieces, pieces_of
from megarun.engine.trainer import Trainer

PARAMETER_STATES = ("momentum", "exp_avg", "exp_avg_sq", "step")
OPTIMIZER, GENERATOR = "optimizer", "generator"


def model_state(trainer: Trainer, inventory: Inventory) -> list[tuple[str, Pieces]]:
    """This rank's pieces of every parameter; a tensor that two of its stages hold comes twice."""
    tensors = dict(inventory.tensors())
    return [(name, pieces_of(tensors[name], parameter, trainer.mesh)) for name, parameter in _parameters(trainer)]


def optimizer_state(trainer: Trainer, inventory: Inventory) -> list[tuple[str, Pieces]]:
    """This rank's pieces of what the optimizers keep, which exists once they have stepped or `Optimizers.make_states` was called."""
    tensors, names = dict(inventory.tensors()), {id(parameter): name for name, parameter in _parameters(trainer)}
    found = []
    for parameter, state in trainer.optimizers.states():
        name = names[id(parameter)]
        for key, value in state.items():
            whole = value.dim() == 0
            pieces = Pieces.whole(value) if whole else pieces_of(tensors[name], value, trainer.mesh)
            found.append((f"{OPTIMIZER}.{name}.{key}", pieces))
    return sorted(found, key=lambda item: item[0])


def generator_state(trainer: Trainer) -> list[tuple[str, Pieces]]:
    """This rank's generators, uint8."""
    prefix, device = f"{GENERATOR}.{trainer.mesh.rank}", trainer.mesh.device
    found = [(f"{prefix}.cpu", Pieces.whole(torch.get_rng_state()))]
    if device.type == "cuda":
        found.append((f"{prefix}.cuda", Pieces.whole(torch.cuda.get_rng_state(device))))
    return found


def _parameters(trainer: Trainer) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for stage in trainer.stages:
        yield from stage.named_parameters()
