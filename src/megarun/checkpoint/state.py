"""The state of a run between two steps, by name: parameters, optimizer state, random generators.

A parameter has the inventory's name; a packed weight (`lora.base`) is saved as the parts of its rows, `NAME.codes` and others. The
optimizer state of a parameter is `optimizer.NAME.momentum` (Muon) or `.exp_avg`, `.exp_avg_sq` and `.step` (AdamW).
The experts' bias of an E layer is `layers.I.expert_bias`, of a prediction depth `mtp.D.mlp.expert_bias`. Under delayed
scaling a block has `NAME.scaling_factors` and `NAME.scaling_history`. Batches are a function of step and
seed, so the data position is the step.
`generator.RANK.cpu` and `.cuda` are torch's generators, which no step uses; they are restored by the rank of the same number if the number
of ranks is the same.
"""

from collections.abc import Iterator

import torch

from megaplan.inventory.tensors import Inventory
from megarun.checkpoint.pieces import Pieces, local_of, packed_pieces, pieces_of, pieces_of_local
from megarun.engine.trainer import Trainer
from megarun.model.step_sums import biases
from megarun.parallel.groups.local import local
from megarun.parallel.groups.packed import packings

OPTIMIZER, GENERATOR = "optimizer", "generator"


def model_state(trainer: Trainer, inventory: Inventory) -> list[tuple[str, Pieces]]:
    """This rank's pieces of every parameter, the experts' biases and delayed scaling; a tensor in two of its stages occurs twice."""
    tensors, parameters = dict(inventory.tensors()), list[tuple[str, Pieces]]()
    for stage in trainer.stages:
        packed = packings(stage)
        for name, parameter in stage.named_parameters():
            if name in packed:
                parts = packed_pieces(tensors[name], parameter, packed[name], trainer.mesh)
                parameters += [(f"{name}.{part}", pieces) for part, pieces in parts]
            else:
                parameters.append((name, pieces_of(tensors[name], parameter, trainer.mesh)))
    parameters += [(name, Pieces.unsharded(bias)) for name, bias in biases(trainer.stages)]
    return parameters + [(name, Pieces.unsharded(own)) for stage in trainer.stages if stage.delayed for name, own in stage.delayed.state()]


def optimizer_state(trainer: Trainer, inventory: Inventory) -> list[tuple[str, Pieces]]:
    """This rank's pieces of optimizer state, which exists after a step or after `Optimizers.make_states`."""
    tensors, names = dict(inventory.tensors()), {id(parameter): name for name, parameter in _parameters(trainer)}
    found = []
    for parameter, state in trainer.optimizers.states():
        name = names[id(parameter)]
        _, sizes, offsets = local_of(parameter)
        for key, value in state.items():
            whole = key == "step"  # an average is sharded like its parameter, also in host memory
            pieces = Pieces.unsharded(value) if whole else pieces_of_local(tensors[name], local(value), sizes, offsets, trainer.mesh)
            found.append((f"{OPTIMIZER}.{name}.{key}", pieces))
    return sorted(found, key=lambda item: item[0])


def generator_state(trainer: Trainer) -> list[tuple[str, Pieces]]:
    """This rank's generators, uint8."""
    prefix, device = f"{GENERATOR}.{trainer.mesh.rank}", trainer.mesh.device
    found = [(f"{prefix}.cpu", Pieces.unsharded(torch.get_rng_state()))]
    if device.type == "cuda":
        found.append((f"{prefix}.cuda", Pieces.unsharded(torch.cuda.get_rng_state(device))))
    return found


def whole_state(trainer: Trainer, inventory: Inventory) -> list[tuple[str, Pieces]]:
    """This rank's pieces of all state that a run needs to continue."""
    return [*model_state(trainer, inventory), *optimizer_state(trainer, inventory), *generator_state(trainer)]


def _parameters(trainer: Trainer) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for stage in trainer.stages:
        yield from stage.named_parameters()
