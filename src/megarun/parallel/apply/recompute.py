"""Activation recompute by family, applied to a stage from outside, before FSDP2 (R-55, R-67).

A region is one method of a block, run under torch's non-reentrant checkpoint: it saves the region's inputs, drops the tensors inside, and
runs the region again when backward first needs one of them. The second run stops as soon as all saved tensors are recomputed, so a product
at the end of a region is not repeated. The ledger lists the saved tensors (`megaplan.hosts.megarun`).

The part recomputed under `selective` is stated by the family (`megaplan.families.family.Selective`), which the ledger and the cost model
read too.

`full` recomputes the whole block: only its input is saved. Families may refuse it (`Family.full_refused`).
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from megaplan.families.family import Selective
from megaplan.families.registry import FAMILIES
from megaplan.inventory.tensors import Inventory
from megaplan.inventory.towers import block_of
from megaplan.spec.models import Spec
from megarun.model.stage import Stage
from megarun.parallel.groups.relay import scan_once_contexts


def recompute_stage(stage: Stage, spec: Spec, inventory: Inventory) -> None:
    """Replace, on every layer with a policy, the method that the policy recomputes; parameters and their names do not change.

    Raises:
        ValueError: A family refuses the policy, which the rules of the spec should have reported.
    """
    for name, module in stage.layers.items():
        block = inventory.layers[int(name)]
        family, policy = FAMILIES[block.family], spec.policy(int(name), block.family)
        if policy == "full":
            if family.full_refused is not None:
                raise ValueError(f"layer {name}: {family.title} blocks refuse full recompute, which the spec's rules report (MP720)")
            _run_again(module, "forward")
        elif policy == "selective":
            _checkpoint_selective(module, family.selective(family.section_of(spec.model), block.variant), relays=spec.mesh.cp > 1)
    _recompute_encoder(stage, spec)


def _recompute_encoder(stage: Stage, spec: Spec) -> None:
    towers, policy = spec.model.towers, spec.recompute.towers
    encoder = None if towers is None or towers.vision is None else towers.vision.encoder
    if stage.vision is None or encoder is None or not stage.vision.trained:
        return
    for name, module in stage.vision.blocks():
        block = block_of(encoder, name)
        if block is not None and policy == "full":
            _run_again(module, "forward")
        elif block is not None and policy == "selective":
            _checkpoint_selective(module, block.family.selective(block.section, block.variant), relays=False)


def _checkpoint_selective(module: nn.Module, selective: Selective, *, relays: bool) -> None:
    """`relays`: whether context ranks hand a scan's state on, which torch.compile does not take: it accepts only dispatch modes."""
    path, _, method = selective.method.rpartition(".")
    kept = [getattr(torch.ops.megakernels, kernel).default for kernel in selective.caches.values()]
    contexts = partial(_keeping if relays else create_selective_checkpoint_contexts, kept)
    _run_again(module.get_submodule(path), method, **({"context_fn": contexts} if kept else {}))


def _keeping(kept: list[torch._ops.OpOverload]) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts of a region's two runs: the outputs of `kept` and of CP scans are computed only in the first."""
    cached: tuple[AbstractContextManager[object], ...] = create_selective_checkpoint_contexts(kept)  # type: ignore[no-untyped-call]
    first, again = zip(cached, scan_once_contexts(), strict=True)
    return _both(*first), _both(*again)


@contextmanager
def _both(outer: AbstractContextManager[object], inner: AbstractContextManager[object]) -> Iterator[None]:
    with outer, inner:
        yield


def _run_again(module: nn.Module, method: str, **options: Any) -> None:
    inner: Callable[..., Any] = getattr(module, method)
    # the model uses no random numbers, whose state each region would otherwise save (5 KB)
    setattr(module, method, partial(checkpoint, inner, use_reentrant=False, preserve_rng_state=False, **options))
