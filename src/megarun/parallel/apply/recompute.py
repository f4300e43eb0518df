"""Activation recompute by family, applied to a stage from outside, before FSDP2 (R-55, R-67).

A region is one method of a block, run under torch's non-reentrant checkpoint: it saves the region's inputs, drops the tensors inside, and
runs the region again when backward first needs one of them. The second run stops as soon as all saved tensors are recomputed, so a product
at the end of a region is not repeated. The ledger lists the saved tensors (`megaplan.hosts.megarun`).

| | selective | keeps | drops |
|---|---|---|---|
| A | attention → o_proj | q, k, v | output, log-sum-exp |
| D | activation → down_proj | gate, up | down_proj's input |
| E | the experts' products and activation | dispatched rows, weights | the products before the activation |
| M (mamba2) | in_proj → convolution → scan → gated norm | normed input; cached outputs of scan and norm | outputs of in_proj and
convolution |
| M (mamba3) | projections → norms of B and C → scan | normed input; cached outputs of the scan | outputs of projections and norms |
| R | recurrence → gated norm → out_proj | q, k, v, forget, gate | y, states, gated output |

`full` recomputes the complete block (A, D and R): only its input is saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from megaplan.hosts.megarun.ledger import layer_policy
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
    """Wrap, on every layer with a policy, the method that the policy recomputes; parameters and their names do not change."""
    for name, block in stage.layers.items():
        policy = layer_policy(spec, int(name), inventory.layers[int(name)])
        if policy == "full":
            _run_again(_full_region(block), "forward")
        elif policy == "selective":
            _checkpoint_selective(block)


def _full_region(block: nn.Module) -> nn.Module:
    if not isinstance(block, FULL):
        raise TypeError(f"{type(block).__name__} does not support full recompute; MP720 should have refused the spec")
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
            # the block's backward reads their outputs anyway; caching them avoids a second run
            kept = [torch.ops.megakernels.ssd.default, torch.ops.megakernels.gated_rms_norm.default]
            _run_again(block, "mix", context_fn=partial(_keeping, kept))
        case Mamba3Block():
            _run_again(block, "mix", context_fn=partial(_keeping, [torch.ops.megakernels.mamba3.default]))
        case _:
            raise TypeError(f"{type(block).__name__} has no selective recompute")


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
