"""The ledger of a TP rank against its modules: what is kept, and what is alive at the peaks, in a group whose collectives end at once."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from saved_storages import saved_storages
from torch import nn

from megakernels import use_kernels
from megaplan.hosts.megarun.ledger import block_bytes, block_ledger
from megaplan.inventory.build import build_inventory
from megaplan.inventory.tensors import Inventory
from megaplan.layout.build import build_layout
from megaplan.spec.local import local_dims
from megaplan.spec.models import Spec
from megarun.dtypes import TORCH_DTYPES
from megarun.engine.build import build_stage, materialise
from megarun.model.rotary import Rotary
from megarun.model.stage import Stage
from megarun.parallel.apply.pipeline import batch_loss
from megarun.parallel.apply.recompute import recompute_stage
from megarun.parallel.groups.mesh import build_mesh
from megarun.parallel.groups.shapes import token_shape
from megarun.parallel.groups.tensor import tensor_parallel
from megarun.trace.fake import lone_rank

pytestmark = [pytest.mark.runtime, pytest.mark.requirement("R-50")]
HEADS = {"kind": "mla", "num_heads": 4, "kv_lora_rank": 14, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
INDEXER = {"num_heads": 3, "head_dim": 7, "layers": [0, 1], "top_k": 5}
STATES = {"kind": "mamba3", "expand": 2, "head_dim": 10, "state_dim": 5, "num_groups": 4, "chunk_size": 3, "save_every": 8}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gqa": ("A", {"attention": {"kind": "gqa", "num_heads": 8, "num_kv_heads": 4, "head_dim": 6}}),
    "gqa-rich": ("A", {"attention": {"kind": "gqa", "num_heads": 4, "num_kv_heads": 4, "head_dim": 6, "qk_norm": True, "bias": True}}),
    "gqa-nope": ("A", {"attention": {"kind": "gqa", "num_heads": 4, "num_kv_heads": 4, "head_dim": 6, "nope_layers": [0, 1]}}),
    "mla": ("A", {"attention": {**HEADS, "q_lora_rank": 10}}),
    "mla-direct": ("A", {"attention": {**HEADS, "q_lora_rank": None, "nope_layers": [0, 1]}}),
    "mla-indexed": ("A", {"attention": {**HEADS, "q_lora_rank": 10, "nope_layers": [1], "indexer": INDEXER}}),
    "mamba2": ("M", {"mamba": {"kind": "mamba2", "num_heads": 8, "head_dim": 6, "state_dim": 5, "num_groups": 4, "chunk_size": 8}}),
    "mamba3": ("M", {"mamba": {**STATES, "mimo_rank": 2, "num_angles": 2}}),
    "mamba3-single": ("M", {"mamba": STATES}),
    "moe": ("E", {"moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 24, "shared_ffn_hidden_size": 16}}),
    "moe-losses": ("E", {"moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 24, "z_loss_coefficient": 0.1}}),
    "m2rnn": ("R", {"recurrent": {"kind": "m2rnn", "num_heads": 4, "key_dim": 5, "value_dim": 6, "save_every": 8}}),
    "swiglu": ("D", {"mlp": {"ffn_hidden_size": 52}}),
    "gelu": ("D", {"mlp": {"ffn_hidden_size": 52, "activation": "gelu"}}),
}  # fmt: skip
CASES = [(kind, "none") for kind in KINDS]
CASES += [(kind, "selective") for kind in KINDS] + [(kind, "full") for kind, (letter, _) in KINDS.items() if letter not in "ME"]
STATED = [(kind, policy, "triton") for kind, policy in CASES if kind in ("mamba2", "m2rnn")]
"""Scans whose kernels state what they hold inside themselves."""


class Alone(nn.Module):
    """A layer with its stage's rotary tables as its own buffers."""

    def __init__(self, stage: Stage, index: int) -> None:
        super().__init__()
        self.block = stage.layers[str(index)]
        self.rotates = stage.attention is not None
        if self.rotates:
            self.register_buffer("cos", stage.rope_cos)
            self.register_buffer("sin", stage.rope_sin)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x, Rotary(self.cos, self.sin) if self.rotates else None)


def spec_of(kind: str, tp: int, policy: str, precision: str = "bf16", kernels: str = "reference", **mesh: Any) -> Spec:
    letter, section = KINDS[kind]
    model = {"pattern": letter, "num_layers": 2, "hidden_size": 40, "vocab_size": 64, **section}
    return Spec.model_validate(
        {
            "format": "megaplan.spec/1",
            "name": kind,
            "model": model,
            "mesh": {"tp": tp, **mesh},
            "batch": {"micro_batch_size": 3, "seq_length": 24},
            "precision": dict.fromkeys(("params", "grads", "master", "moments", "reduce"), precision),
            "recompute": {"default": policy},
            "host": {"kernels": kernels},
        }
    )


@pytest.fixture(params=[2, 4], ids=["tp2", "tp4"])
def tp(request: Any) -> Iterator[int]:
    """TP degree; a process group of that size exists."""
    with lone_rank(0, request.param):
        yield request.param


def built(spec: Spec) -> tuple[Inventory, Stage, nn.Module]:
    inventory, mesh = build_inventory(spec), build_mesh(spec.mesh, torch.device("cpu"))
    slot = build_layout(spec, inventory, [(0, 2)]).slots[0]
    stage = build_stage(spec, inventory, slot, tensor_parallel(mesh))
    recompute_stage(stage, spec, inventory)
    use_kernels(spec.host.kernels)
    materialise(stage, torch.device("cpu"))
    for parameter in stage.parameters():
        nn.init.normal_(parameter, std=0.02)
    return inventory, stage, batch_loss(spec, mesh)


def residual(spec: Spec) -> torch.Tensor:
    dtype = TORCH_DTYPES[spec.precision.params]
    return torch.randn(local_dims(spec).residual, dtype=dtype, requires_grad=True)


@pytest.mark.requirement("R-17")
@pytest.mark.requirement("R-67")
@pytest.mark.parametrize(("kind", "policy"), CASES)
def test_a_layer_of_a_tp_rank_keeps_what_its_ledger_says(kind: str, policy: str, tp: int) -> None:
    """Own tokens of gathered inputs, local heads and widths; storage by storage and to the byte."""
    spec = spec_of(kind, tp, policy)
    inventory, stage, _ = built(spec)
    for index in range(2):
        ledger = block_ledger(spec, f"layers.{index}", inventory.layers[index])
        found = saved_storages(Alone(stage, index), (residual(spec),))
        expected = sorted((tensor.bytes, str(TORCH_DTYPES[tensor.dtype])) for tensor in ledger.saved)
        assert sorted((storage.nbytes, str(storage.dtype)) for storage in found.kept) == expected
        assert found.live_bytes == sum(tensor.bytes for tensor in ledger.saved) + ledger.output.bytes


@pytest.mark.parametrize(("kind", "policy", "kernels"), [(*case, "reference") for case in CASES] + STATED)
def test_the_working_set_of_a_tp_rank(kind: str, policy: str, kernels: str, tp: int, live_storages: ModuleType) -> None:
    """Gathered inputs, partial sums and their gradients included: first microbatch and later ones, forward and backward, to the byte."""
    spec = spec_of(kind, tp, policy, kernels=kernels)
    inventory, stage, _ = built(spec)
    sums = block_bytes(spec, local_dims(spec), "layers.0", inventory.layers[0])
    found = live_storages.peaks(Alone(stage, 0), residual(spec))
    assert found == [(sums.forward_bytes, sums.backward_bytes), (sums.forward_bytes, sums.accumulating_bytes)]


class HeadAndLoss(nn.Module):
    """The head of a stage and the loss of all-zero labels, which are an input."""

    def __init__(self, stage: Stage, loss: nn.Module, labels: torch.Tensor) -> None:
        super().__init__()
        self.stage, self.loss = stage, loss
        self.register_buffer("labels", labels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.loss(self.stage.logits(x), self.labels) * self.loss.num_tokens


@pytest.mark.parametrize("vocab_parallel", [False, True])
def test_the_working_set_of_head_and_loss(vocab_parallel: bool, tp: int, live_storages: ModuleType) -> None:
    """Own tokens and all words, or all tokens and own words; of the loss, what joins the slices, within a few scalars and a mask."""
    spec = spec_of("swiglu", tp, "none", precision="fp32", vocab_parallel=vocab_parallel)
    inventory, stage, loss = built(spec)
    labels = torch.zeros(token_shape(spec), dtype=torch.int64)
    module = HeadAndLoss(stage, loss, labels)
    kept = saved_storages(module, (residual(spec),)).kept
    ledger = block_ledger(spec, "head", inventory.block("head"))
    assert sorted(storage.nbytes for storage in kept) == sorted(tensor.bytes for tensor in ledger.saved)
    sums = block_bytes(spec, local_dims(spec), "head", inventory.block("head"))
    expected = [(sums.forward_bytes, sums.backward_bytes), (sums.forward_bytes, sums.accumulating_bytes)]
    slack = (1 if vocab_parallel else 0) * labels.numel() + 16
    for found, wanted in zip(live_storages.peaks(module, residual(spec)), expected, strict=True):
        assert all(abs(a - b) <= slack for a, b in zip(found, wanted, strict=True)), (found, wanted)


def test_the_working_set_of_a_cut_embedding(tp: int, live_storages: ModuleType) -> None:
    """Rows of own words for all tokens, then own tokens, within the masks of other ranks' words."""
    spec = spec_of("swiglu", tp, "none", precision="fp32", vocab_parallel=True)
    inventory, stage, _ = built(spec)
    tokens = torch.randint(0, 64, token_shape(spec))
    sums = block_bytes(spec, local_dims(spec), "embedding", inventory.block("embedding"))
    arriving = sums.output_bytes  # the caller's gradient, which a chunk would have freed
    for index, (forward, backward) in enumerate(live_storages.peaks(stage.embedding, tokens)):
        assert 0 <= forward - sums.forward_bytes <= tokens.numel()
        assert 0 <= backward - arriving - (sums.accumulating_bytes if index else sums.backward_bytes) <= tokens.numel() + 16


class JoinedHead(nn.Module):
    """Head and loss of a stage in one operation."""

    def __init__(self, stage: Stage, labels: torch.Tensor) -> None:
        super().__init__()
        self.stage = stage
        self.register_buffer("labels", labels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.stage.loss_of(x, self.labels)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("vocab_parallel", [False, True])
def test_the_working_set_of_head_and_loss_in_one(vocab_parallel: bool, precision: str, tp: int, live_storages: ModuleType) -> None:
    """No logits are kept. What the operation holds inside itself no one sees; the ledger has what the operation states."""
    spec = spec_of("swiglu", tp, "none", precision, kernels="triton", vocab_parallel=vocab_parallel)
    inventory, stage, _ = built(spec)
    labels = torch.zeros(token_shape(spec), dtype=torch.int64)
    x, module = residual(spec), JoinedHead(stage, labels)
    ledger = block_ledger(spec, "head", inventory.block("head"))
    sums = block_bytes(spec, local_dims(spec), "head", inventory.block("head"))
    assert sorted(storage.nbytes for storage in saved_storages(module, (x,)).kept) == sorted(tensor.bytes for tensor in ledger.saved)
    expected = [(sums.forward_bytes, sums.backward_bytes), (sums.forward_bytes, sums.accumulating_bytes)]
    slack = (1 if vocab_parallel else 0) * labels.numel() + 16
    for found, wanted in zip(live_storages.peaks(module, residual(spec)), expected, strict=True):
        assert all(abs(one - other) <= slack for one, other in zip(found, wanted, strict=True)), (found, wanted)
