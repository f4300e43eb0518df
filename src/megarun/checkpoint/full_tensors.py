"""Full tensors of a checkpoint, on one process: for export, and to compare two checkpoints."""

import warnings
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from megarun.checkpoint.manifest import read_manifest
from megarun.checkpoint.pieces import Pieces, PiecesLoadPlanner
from megarun.checkpoint.storage import CheckpointReader, first_reason
from megarun.errors import refusal
from megarun.remote import AnyPath


def tensor_names(checkpoint: AnyPath) -> list[str]:
    """Every tensor of a checkpoint, sorted.

    Raises:
        MegaplanError: MP644.
    """
    return sorted(CheckpointReader(checkpoint, read_manifest(checkpoint)).read_metadata().state_dict_metadata)


def full_tensors(checkpoint: AnyPath, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """Unsharded tensors, one at a time, in host memory; files are summed before they are read.

    Raises:
        MegaplanError: MP644.
        KeyError: The checkpoint has no such tensor.
    """
    manifest = read_manifest(checkpoint)
    saved = CheckpointReader(checkpoint, manifest).read_metadata().state_dict_metadata
    for name in names:
        found = saved[name]
        if not isinstance(found, TensorStorageMetadata):
            raise TypeError(f"{name} is not a tensor")
        tensor = torch.empty(found.size, dtype=found.properties.dtype)
        with warnings.catch_warnings():  # `no_dist` warns that there is no process group
            warnings.simplefilter("ignore", UserWarning)
            wanted, reader = {name: Pieces.unsharded(tensor)}, CheckpointReader(checkpoint, manifest)
            try:
                load(wanted, storage_reader=reader, planner=PiecesLoadPlanner(), no_dist=True)
            except (CheckpointException, OSError, RuntimeError, ValueError) as error:  # the first is not a subclass of Exception
                raise refusal("MP644", f"{checkpoint}: {name}: {first_reason(error)}", file=str(checkpoint)) from None
        yield name, tensor
