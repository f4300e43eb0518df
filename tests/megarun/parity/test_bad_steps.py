"""NaN in a stage's output or in one rank's gradient: every rank skips it or goes back; the curve is that of the other batches."""

import json
from pathlib import Path
from typing import Any

import pytest
from parity_cells import Cell
from parity_world import CellFailedError, Worlds

from megarun.checkpoint.manifest import list_checkpoints, read_manifest

pytestmark = [pytest.mark.runtime, pytest.mark.jobs]
RULES = {"training.bad_steps": {"skips": 1, "rewinds": 1, "window_batches": 1}}
STAGES = Cell("stages", {"pp": 2}, spec=RULES)
DATA_RANKS = Cell("data ranks", {"dp_shard": 2}, spec=RULES)


def run(worlds: Worlds, cell: Cell, to: Path, steps: int, **poison: list[int]) -> dict[int, float]:
    """Losses by step; those of a step that was made twice are the last ones."""
    case = {**cell.case, "run": "bad steps", "to": str(to), "save_every": 2, "steps": steps, "data": [], "gradient": [], **poison}
    records = worlds.train(case, cell.world_size)
    assert all(record == records[0] for record in records)
    losses: dict[int, float] = records[0]["losses"]
    return losses


def decisions(folder: Path) -> list[dict[str, Any]]:
    return [line for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) if "decision" in line]


@pytest.mark.parametrize("cell", [STAGES, pytest.param(DATA_RANKS, marks=pytest.mark.slow)], ids=lambda cell: cell.name)
def test_bad_batches_are_left_out(cell: Cell, worlds: Worlds, tmp_path: Path) -> None:
    """Batch 1 is skipped; 6 and 7 in a row rewind to step 4, and 5, right before them, is skipped too. A resumed run skips the same."""
    losses = run(worlds, cell, tmp_path, 6, data=[1, 6], gradient=[7])
    assert [(each["decision"], each["step"], each["batches"], each["next_step"]) for each in decisions(tmp_path)] == [
        ("skip", 2, [1, 2], 2),
        ("skip", 6, [6, 7], 6),
        ("rewind", 6, [5, 8], 5),
    ]
    reasons = [each["reason"] for each in decisions(tmp_path)]
    assert reasons == ["the loss is not finite", "the loss is not finite", "the gradient norm is not finite"]
    newest = list_checkpoints(tmp_path)[0]
    assert (newest.name, read_manifest(newest).data_progress.skipped) == ("step-00000006", ((1, 2), (5, 8)))
    losses |= run(worlds, cell, tmp_path, 8)
    clean = {**cell.case, "run": "batches", "batches": [0, 2, 3, 4, 8, 9, 10, 11]}
    expected = worlds.train(clean, cell.world_size)[0]["losses"]
    assert [losses[step] for step in sorted(losses)] == expected


def test_what_does_not_end_is_refused(worlds: Worlds, tmp_path: Path) -> None:
    """Two bad steps before the first checkpoint; and, after one, two more behind the rewind."""
    with pytest.raises(
        CellFailedError, match=r"MP607 step 2: the loss is not finite.*\n2 bad steps in a row.*\nno checkpoint to rewind to"
    ):
        run(worlds, STAGES, tmp_path / "early", 6, data=[1, 2])
    with pytest.raises(CellFailedError, match=r"MP607 step 3.*\n.*\n1 rewinds, training.bad_steps.rewinds = 1"):
        run(worlds, STAGES, tmp_path / "late", 6, gradient=[3, 4, 5, 6])
    assert [each["decision"] for each in decisions(tmp_path / "late")] == ["skip", "rewind", "skip", "stop"]
    assert [path.name for path in list_checkpoints(tmp_path / "late")] == ["step-00000002"]
