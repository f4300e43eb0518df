"""Activation recompute by family, applied to a stage from outside, before FSDP2 (R-55, R-67).

A region is one method of a block, run under torch's non-reentrant checkpoint: it keeps the region's inputs, drops what is inside, and runs
the region again when backward first needs any of that. The second run stops as soon as everything that had been saved is there again, so
a product at the end of a region is not repeated. What is kept, storage by storage, is the ledger's (`megaplan.hosts.megarun`).

| | selective | keeps | drops |
|---|---|---|---|
| A | attention → o_proj | q, k, v | output, log-sum-exp |
| D | activation → down_proj | gate, up | down_proj's input |
| E | the experts' products and activation | dispatched rows, weights | the products before the activation |
| M (mamba2) | in_proj → convolution → scan → gated norm | normed input; what scan and norm make, cached | in_proj's and convolution's |
| M (mamba3) | projections → norms of B and C → scan | normed input; what the scan makes, cached | what projections and norms make |
| R | recurrence → gated norm → out_proj | q, k, v, forget, gate | y, states, gated output |

`full` is the whole block of A, D and R: only its input is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from megaplan.inventory.tensors import Inventory
from megaplan.spec.models import Spec
from megarun.model.attention import GroupedQueryAttention, LatentAttention
from megarun.model.mamba import Mamba2Block
from megarun.model.mamba3 import Mamba3Block
from megarun.model.mlp import DenseBlock
from megarun.model.moe import ExpertBlock
from megarun.model.recurrent import MatrixRecurrenceBlock
from megarun.model.stage import Stage
from megarun.parallel.groups.relay import scan_once_contexts

FULL: tuple[type[nn.Module], ...] = (GroupedQueryAttention, LatentAttention, DenseBlock, MatrixRecurrenceBlock)


def recompute_stage(stage: Stage, spec: Spec, inventory: Inventory) -> None:
    """Replace, on every layer with a policy, the method that the policy runs again; parameters and their names stay as they are."""
    for name, block in stage.layers.items():
        policy = spec.policy(int(name), inventory.layers[int(name)].family)
        if policy == "full":
            _run_again(_whole(block), "forward")
        elif policy == "selective":
            _checkpoint_selective(block)


def _whole(block: nn.Module) -> nn.Module:
    if not isinstance(block, FULL):
        raise TypeError(f"{type(block).__name__} refuses full recompute; the rules of the spec should have said so (MP720)")
    return block


def _checkpoint_selective(block: nn.Module) -> None:
    match block:
        case LatentAttention(indexer=indexer) if indexer is not None:
            _run_again(block, "indexed_core")
        case GroupedQueryAttention() | LatentAttention() | MatrixRecurrenceBlock():
            _run_again(block, "core")
        case DenseBlock():
            _run_again(block, "contract")
        case ExpertBlock():
            _run_again(block.experts, "forward")
        case Mamba2Block():
            # their outputs are read by the block's backward anyway; kept, they need not run twice
            kept = [torch.ops.megakernels.ssd.default, torch.ops.megakernels.gated_rms_norm.default]
            _run_again(block, "mix", context_fn=partial(_keeping, kept))
        case Mamba3Block():
            _run_again(block, "mix", context_fn=partial(_keeping, [torch.ops.megakernels.mamba3.default]))
        case _:
            raise TypeError(f"{type(block).__name__} has no selective recompute")


def _keeping(kept: list[torch._ops.OpOverload]) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts of a region's two runs: the outputs of `kept`, and of scans that a CP group walks, are made in the first alone."""
    cached: tuple[AbstractContextManager[object], ...] = create_selective_checkpoint_contexts(kept)  # type: ignore[no-untyped-call]
    first, again = zip(cached, scan_once_contexts(), strict=True)
    return _both(*first), _both(*again)


@contextmanager
def _both(outer: AbstractContextManager[object], inner: AbstractContextManager[object]) -> Iterator[None]:
    with outer, inner:
        yield


def _run_again(module: nn.Module, method: str, **options: Any) -> None:
    inner: Callable[..., Any] = getattr(module, method)
    # the model draws no random numbers, whose state each region would otherwise keep (5 KB)
    setattr(module, method, partial(checkpoint, inner, use_reentrant=False, preserve_rng_state=False, **options))
