"""The figures of a step's line that are not measured but computed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megaplan.budget.build import build_budget
from megaplan.columns import Column, Phase
from megaplan.cost.model import flops_per_token
from megaplan.devices import load_device
from megaplan.inventory.build import build_inventory
from megaplan.layout.build import build_layout
from megaplan.spec.models import Spec
from megarun.errors import MegaplanError
from megarun.job.job import Job
from megarun.metrics.file import FILE_NAME, MetricsFile
from megarun.metrics.memory import planned_bytes
from megarun.metrics.records import Evaluated
from megarun.metrics.tensorboard import Board, require_tensorboard
from megarun.metrics.utilisation import Utilisation

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


def test_every_rank_is_held_to_its_own_plan(spec_with: Any) -> None:
    """Two stages of two shards, in rank order; a steady step, without allocator rounding."""
    spec = Spec.model_validate(spec_with({"mesh": {"pp": 2, "dp_shard": 2}, "schedule.num_microbatches": 2}))
    inventory = build_inventory(spec)
    layout = build_layout(spec, inventory, [(0, 2), (2, 5)])
    planned = planned_bytes(Job(spec, inventory, layout))
    assert planned[0] != planned[2]
    for rank, found in enumerate(planned):
        cells = build_budget(spec, inventory, layout).of_rank(rank).cells
        steady = [sum(cells[phase].values()) - cells[phase][Column.OVERHEAD] for phase in (Phase.FORWARD_BACKWARD, Phase.OPTIMIZER)]
        assert found == max(steady)


def test_tensorboard_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run does not begin without the package."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(MegaplanError) as error:
        require_tensorboard()
    assert error.value.diagnostics[0].code == "MP624"


def test_tensorboard_gets_every_number(tmp_path: Path) -> None:
    """Curves by step; a list is one curve a rank, what is by layer one a layer, and what is no number is left to metrics.jsonl."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    board = Board(tmp_path)
    board.write({"step": 3, "loss": 2.5, "mfu": None, "allocated_basis": "peak"})
    board.write({"step": 4, "rank_allocated_bytes": [7, 8], "router_load": {"3": 1.5}})
    board.close()
    found = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert {tag: [(event.step, event.value) for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]} == {
        "loss": [(3, 2.5)],
        "rank_allocated_bytes/0": [(4, 7.0)],
        "rank_allocated_bytes/1": [(4, 8.0)],
        "router_load/3": [(4, 1.5)],
    }


def records(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("before", ["", '{"step": 1}\n', '{"step": 1}\n{"ste', '{"ste', '{"step": 1}\n' + "x" * 200_000])
def test_a_cut_line_does_not_merge_with_the_next(before: str, tmp_path: Path) -> None:
    """A process killed while it writes leaves a part of a line."""
    path = tmp_path / FILE_NAME
    path.write_text(before)
    with MetricsFile(tmp_path, 0, resumed=True) as metrics:
        metrics.write(Evaluated(2, 1.0, 1, 1.0))
    assert [each["step"] for each in records(path)] == ([1, 2] if '{"step": 1}' in before else [2])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_an_error_of_its_own(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).symlink_to("/dev/full")
    with MetricsFile(tmp_path, 0, resumed=True) as metrics, pytest.raises(MegaplanError, match=r"MP661.*No space left"):
        metrics.write(Evaluated(2, 1.0, 1, 1.0))
