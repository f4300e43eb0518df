"""The figures of a step's line that are not measured but computed."""

from typing import Any

import pytest
import torch

from megaplan.cost.model import flops_per_token
from megaplan.devices import load_device
from megaplan.inventory.build import build_inventory
from megaplan.layout.build import build_layout
from megaplan.spec.models import Spec
from megarun.job import Job
from megarun.metrics import Utilisation

pytestmark = pytest.mark.runtime


def test_utilisation_is_of_all_planned_devices(spec_with: Any) -> None:
    """Ranks times the peak of the gathered dtype; a CPU has none, and still its FLOPs a second."""
    spec = Spec.model_validate(spec_with({"mesh": {"dp_shard": 4}, "precision": {"params": "bf16"}}))
    inventory = build_inventory(spec)
    job = Job(spec, inventory, build_layout(spec, inventory, [(0, 5)]))
    peak = 4 * load_device("h200").peak_flops["bf16"].value
    flops, mfu = Utilisation.of(job, torch.device("cuda")).rates(1000.0)
    assert flops == 1000.0 * flops_per_token(spec)
    assert mfu == flops / peak
    assert Utilisation.of(job, torch.device("cpu")).rates(1000.0) == (flops, None)
