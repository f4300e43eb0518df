"""The saved-activation ledger against what megarun's modules keep: storage by storage, and to the byte of what is alive after a forward."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megaplan.hosts.megarun.ledger import block_ledger
from megaplan.hosts.values import BlockLedger
from megaplan.inventory.build import build_inventory
from megaplan.layout.build import build_layout
from megaplan.spec.models import Spec
from megarun.build import build_stage, materialise
from megarun.dtypes import TORCH_DTYPES
from megarun.initialise import initialise
from megarun.model.rotary import Rotary
from megarun.model.stage import Stage
from megarun.saved import saved_storages

pytestmark = [pytest.mark.runtime, pytest.mark.requirement("R-50")]

_found = importlib.util.spec_from_file_location("random_specs", Path(__file__).with_name("random_specs.py"))
assert _found is not None
assert _found.loader is not None
random_specs = importlib.util.module_from_spec(_found)
_found.loader.exec_module(random_specs)

CASES = [(kind, seed) for kind in random_specs.KINDS for seed in range(5)]
assert len(CASES) >= 20


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


def built(kind: str, seed: int) -> tuple[Spec, Any, Stage]:
    spec = Spec.model_validate(random_specs.random_spec(kind, seed))
    inventory = build_inventory(spec)
    stage = build_stage(spec, inventory, build_layout(spec, inventory, [(0, 2)]).slots[0])
    materialise(stage, torch.device("cpu"))
    initialise(stage, inventory, 0)
    return spec, inventory, stage


def kept_of(ledger: BlockLedger) -> list[tuple[int, str]]:
    return sorted((tensor.bytes, str(TORCH_DTYPES[tensor.dtype])) for tensor in ledger.saved)


def residual(spec: Spec) -> torch.Tensor:
    shape = (spec.batch.micro_batch_size, spec.batch.seq_length, spec.model.hidden_size)
    return torch.randn(shape, dtype=TORCH_DTYPES[spec.precision.params], requires_grad=True)


@pytest.mark.parametrize(("kind", "seed"), CASES)
def test_a_layer_keeps_what_its_ledger_says(kind: str, seed: int) -> None:
    spec, inventory, stage = built(kind, seed)
    for index in range(2):
        ledger = block_ledger(spec, f"layers.{index}", inventory.layers[index])
        found = saved_storages(Alone(stage, index), (residual(spec),))
        kept = sorted((s.nbytes, str(s.dtype)) for s in found.storages if not s.is_input)
        assert kept == kept_of(ledger)
        assert found.output_bytes == ledger.output.bytes
        assert found.live_bytes == sum(tensor.bytes for tensor in ledger.saved) + ledger.output.bytes


@pytest.mark.parametrize(("kind", "seed"), [(kind, seed) for kind, seed in CASES if seed < 2])
def test_a_stage_keeps_the_sum_of_its_blocks(kind: str, seed: int) -> None:
    """Embedding, layers, final norm and head together, inputs of blocks counted once; the loss adds its log-sum-exp."""
    spec, inventory, stage = built(kind, seed)
    names = ["embedding", "layers.0", "layers.1", "final_norm"]
    ledgers = [block_ledger(spec, name, inventory.block(name)) for name in names]
    head = block_ledger(spec, "head", inventory.block("embedding" if inventory.tied else "head"))
    tokens = torch.randint(0, spec.model.vocab_size, (spec.batch.micro_batch_size, spec.batch.seq_length))
    found = saved_storages(stage, (tokens,))
    streams = 4 * ledgers[0].output.bytes  # what the two layers, the final norm and the head read
    expected = sum(tensor.bytes for ledger in ledgers for tensor in ledger.saved) + streams
    logits, log_sum_exp = head.saved
    assert found.saved_bytes == expected
    assert found.output_bytes == logits.bytes
    assert log_sum_exp.bytes == tokens.numel() * 4
    assert found.live_bytes == expected + logits.bytes
