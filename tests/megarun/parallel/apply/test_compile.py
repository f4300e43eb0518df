"""Compiled blocks train as eager ones do; plans that cannot are refused."""

from typing import Any

import pytest
import torch

from megaplan.errors import MegaplanError
from megaplan.inventory.build import build_inventory
from megaplan.layout.build import build_layout
from megaplan.spec.models import Spec
from megarun.data.batches import Batches
from megarun.engine.trainer import Trainer, sharded_stages
from megarun.job.job import Job
from megarun.parallel.apply.compile import refuse_compile
from megarun.parallel.groups.mesh import build_mesh

pytestmark = pytest.mark.runtime


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"recompute.default": "selective"},
        {"model.streams": {"count": 3}},
        {"model.attention_residuals": {"group_layers": 2}},
        {"model.num_layers": 6, "model.attention.shared_keys": [{"source": 0, "layers": [5]}]},
    ],
    ids=["", "selective", "streams", "depth", "keys"],
)
def test_compiled_blocks_train_as_eager_ones(settings: dict[str, Any], spec_with: Any, worker: Any, one_process: Any) -> None:
    """Losses and norms of three steps, to the rounding of fused operations."""
    spec = Spec.model_validate(spec_with(settings))
    inventory = build_inventory(spec)
    job = Job(spec, inventory, build_layout(spec, inventory, [(0, len(inventory.layers))]))
    mesh = build_mesh(spec.mesh, torch.device("cpu"))
    batches = Batches(worker.CountingRows(spec.model.vocab_size), spec, mesh)
    found = []
    for compiled in (False, True):
        torch._dynamo.reset()
        trainer = Trainer(job, mesh, sharded_stages(job, mesh, compiled=compiled))
        results = [trainer.step(step, batches.at(step)) for step in range(3)]
        found.append([(result.loss, result.gradient_norm) for result in results])
    compiled_blocks = sum(block._compiled_call_impl is not None for block in trainer.stages[0].layers.values())
    assert compiled_blocks == len(inventory.layers) - sum(layer.family == "E" for layer in inventory.layers)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= compiled_blocks
    torch.testing.assert_close(torch.tensor(found[1]), torch.tensor(found[0]), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"mesh.tp": 2, "model.recurrent.num_heads": 4}, "mesh.tp = 2"), ({"mesh.pp": 2, "schedule.kind": "zbv", "mesh.vpp": 2}, "zbv")],
)
def test_plans_that_do_not_compile(settings: dict[str, Any], words: str, spec_with: Any) -> None:
    """The axis or the schedule is named."""
    with pytest.raises(MegaplanError) as error:
        refuse_compile(Spec.model_validate(spec_with({"schedule.num_microbatches": 4} | settings)))
    (found,) = error.value.diagnostics
    assert found.code == "MP625"
    assert words in found.detail
