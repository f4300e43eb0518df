"""Rows that hold several documents: a stage computes what each document alone would, forward and backward."""

from typing import Any

import pytest
import torch

from megaplan.inventory.build import build_inventory
from megaplan.layout.build import build_layout
from megaplan.spec.models import Spec
from megarun.engine.build import build_stage, materialise
from megarun.engine.initialise import initialise
from megarun.parallel.apply.recompute import recompute_stage

pytestmark = pytest.mark.runtime
LENGTHS = (5, 1, 10)
MAMBA3 = {"model.mamba": {"kind": "mamba3", "head_dim": 16, "state_dim": 8, "mimo_rank": 2, "num_angles": 3, "save_every": 4}}


@pytest.mark.requirement("R-63")
@pytest.mark.parametrize(("pattern", "sections"), [*((letters, {}) for letters in ("A", "M", "R", "E", "D", "AMERD")), ("M", MAMBA3)])
@pytest.mark.parametrize("policy", ["none", "full"])
def test_packed_rows_equal_their_separate_documents(spec_with: Any, pattern: str, sections: dict[str, Any], policy: str) -> None:
    whole: dict[str, Any] = spec_with({"batch": {"micro_batch_size": 1, "seq_length": sum(LENGTHS)}, **sections})
    names = {"A": "attention", "M": "mamba", "E": "moe", "R": "recurrent", "D": "mlp"}
    model = {key: value for key, value in whole["model"].items() if key not in names.values()}
    model |= {names[letter]: whole["model"][names[letter]] for letter in pattern}
    values = {**whole, "model": {**model, "pattern": pattern, "num_layers": 6}}
    if policy == "full":
        values["recompute"] = {"default": "full", "blocks": {letter: "selective" for letter in "ME" if letter in pattern}}
    spec = Spec.model_validate(values)
    inventory = build_inventory(spec)
    stage = build_stage(spec, inventory, build_layout(spec, inventory, [(0, 6)]).slots[0])
    recompute_stage(stage, spec, inventory)
    materialise(stage, torch.device("cpu"))
    initialise(stage, inventory, 0)
    tokens = torch.randint(0, spec.model.vocab_size, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(0))
    edges = [sum(LENGTHS[:index]) for index in range(len(LENGTHS))]
    starts = torch.repeat_interleave(torch.tensor(edges, dtype=torch.int32), torch.tensor(LENGTHS)).unsqueeze(0)

    packed = stage(tokens, starts)
    torch.autograd.backward(packed.square().sum())
    gradients = [parameter.grad.clone() for parameter in stage.parameters()]
    stage.zero_grad()
    separate = []
    for start, length in zip(edges, LENGTHS, strict=True):
        row = torch.zeros_like(tokens)  # the document first, then anything: no position looks ahead
        row[:, :length] = tokens[:, start : start + length]
        logits = stage(row)[:, :length]
        torch.autograd.backward(logits.square().sum())
        separate.append(logits.detach())
    assert torch.allclose(packed, torch.cat(separate, 1), rtol=1e-5, atol=1e-5)
    for (name, parameter), gradient in zip(stage.named_parameters(), gradients, strict=True):
        assert (gradient - parameter.grad).abs().max() <= 1e-5 * parameter.grad.abs().max().clamp(min=1e-6), name
