"""The figures of a step's line that are not measured but computed."""

import errno
import json
import os
import shutil
import struct
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megaplan.budget.peaks import build_budget
from megaplan.columns import Column, Phase
from megaplan.cost.model import flops_per_token
from megaplan.devices import load_device
from megaplan.inventory.build import build_inventory
from megaplan.layout.build import build_layout
from megaplan.spec.models import Spec
from megarun.errors import MegaplanError
from megarun.job.job import Job
from megarun.metrics.curves import TensorBoard, WeightsAndBiases, require_package
from megarun.metrics.file import FILE_NAME, MetricsFile
from megarun.metrics.memory import planned_bytes
from megarun.metrics.records import Evaluated
from megarun.metrics.utilisation import Utilisation

pytestmark = pytest.mark.runtime


def test_utilisation_is_of_all_planned_devices(spec_with: Any) -> None:
    """Ranks times the peak of the gathered dtype; a CPU has none, and still its FLOPs per second."""
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


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_curves_are_asked_for_by_name(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run does not begin without the package."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(MegaplanError) as error:
        require_package(package)
    (found,) = error.value.diagnostics
    assert (found.code, found.hints[0]) == ("MP624", f"pip install 'megaplan[{package}]'")


def test_tensorboard_gets_every_number(tmp_path: Path) -> None:
    """Curves by step; a list is one curve a rank, what is by layer one per layer, and what is not a number is left to metrics.jsonl."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    board = TensorBoard(tmp_path)
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
        metrics.write(Evaluated(2, 1.0, 1.0, 1, 1.0))
    assert [each["step"] for each in records(path)] == ([1, 2] if '{"step": 1}' in before else [2])


def full_after(num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A disk with room for so many more bytes; the list's number can be raised."""
    room, real = [num_bytes], os.write

    def write(handle: int, data: bytes) -> int:
        if not room[0] and handle > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = real(handle, data[: room[0]] if handle > 2 else data)
        room[0] -= written * (handle > 2)
        return written

    monkeypatch.setattr("megarun.metrics.file.os.write", write)
    return room


@pytest.mark.parametrize(("before", "taken"), [("", True), ('{"step": 1, "lo', True), ('{"step": 1}\n', False)])
def test_a_file_without_a_line_is_not_a_run(before: str, taken: bool, tmp_path: Path) -> None:
    """A job that was killed before its first step is started again by the same command."""
    (tmp_path / FILE_NAME).write_text(before)
    with nullcontext() if taken else pytest.raises(MegaplanError, match="MP608"), MetricsFile(tmp_path, 0):
        assert (tmp_path / FILE_NAME).read_text() == ""


def test_lines_wait_for_room_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Said once; a line that was written in part is completed."""
    with MetricsFile(tmp_path, 0) as metrics:
        room = full_after(30, monkeypatch)
        for step in (1, 2, 3):
            metrics.write(Evaluated(step, 1.0, 1.0, 1, 1.0))
        said = capsys.readouterr().err
        assert said.count("warning[MP661]") == 1
        assert "No space left on device; the run continues" in said
        room[0] = 10_000
        metrics.write(Evaluated(4, 1.0, 1.0, 1, 1.0))
    assert [each["step"] for each in records(tmp_path / FILE_NAME)] == [1, 2, 3, 4]
    assert "lost" not in capsys.readouterr().err


def test_lines_that_never_find_room_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with MetricsFile(tmp_path, 0) as metrics:
        full_after(0, monkeypatch)
        metrics.write(Evaluated(1, 1.0, 1.0, 1, 1.0))
        metrics.write(Evaluated(2, 1.0, 1.0, 1, 1.0))
    assert "2 lines were lost" in capsys.readouterr().err


def test_a_file_that_is_removed_is_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The new file has the lines of the old; one that is moved keeps them; a folder that is renamed is followed."""
    out = tmp_path / "out"
    out.mkdir()
    with MetricsFile(out, 0) as metrics:
        metrics.write(Evaluated(1, 1.0, 1.0, 1, 1.0))
        (out / FILE_NAME).unlink()
        metrics.write(Evaluated(2, 1.0, 1.0, 1, 1.0))
        assert "made again with all its lines" in capsys.readouterr().err
        (out / FILE_NAME).rename(out / "old.jsonl")
        metrics.write(Evaluated(3, 1.0, 1.0, 1, 1.0))
        assert "in a new file" in capsys.readouterr().err
        out.rename(tmp_path / "renamed")
        metrics.write(Evaluated(4, 1.0, 1.0, 1, 1.0))
    assert [each["step"] for each in records(tmp_path / "renamed" / "old.jsonl")] == [1, 2]
    assert [each["step"] for each in records(tmp_path / "renamed" / FILE_NAME)] == [3, 4]
    assert not out.exists()


def test_a_folder_that_is_removed_ends_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with MetricsFile(out, 0) as metrics:
        metrics.write(Evaluated(1, 1.0, 1.0, 1, 1.0))
        shutil.rmtree(out)
        metrics.write(Evaluated(2, 1.0, 1.0, 1, 1.0))
    assert "1 lines were lost" in capsys.readouterr().err
    assert not out.exists()


def test_curves_that_fail_end_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """TensorBoard's own thread fails on a full disk, and raises at the next number."""

    class Writer:
        def __init__(self, _: str) -> None:
            self.add_scalar = self.close = self.fail

        def fail(self, *_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    board = TensorBoard(tmp_path)
    board.write({"step": 1, "loss": 1.0, "mfu": 0.5})
    board.close()
    assert capsys.readouterr().err.count("there are no further curves, and the run continues") == 1


class FakeRun:
    """A run of Weights & Biases as far as the runtime uses it."""

    def __init__(self, **given: object) -> None:
        self.given, self.lines, self.ended = given, list[dict[str, object]](), False

    def define_metric(self, name: str, step_metric: str) -> None:
        assert (name, step_metric) == ("*", "step")

    def log(self, values: dict[str, object]) -> None:
        self.lines.append(values)

    def finish(self) -> None:
        self.ended = True


def test_weights_and_biases_continue_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are values, so that one that is made again is logged again; the identity is that of the folder."""
    runs: list[FakeRun] = []

    def init(**given: object) -> FakeRun:
        runs.append(FakeRun(**given))
        return runs[-1]

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(Settings=dict, init=init))
    for _ in range(2):
        curves = WeightsAndBiases(tmp_path, "hybrids", {"plan_digest": "sha256:1"})
        curves.write({"step": 3, "loss": 2.5, "mfu": None, "router_load": {"3": 1.5}})
        curves.close()
    assert [run.lines for run in runs] == [[{"loss": 2.5, "router_load/3": 1.5, "step": 3}]] * 2
    first, second = (run.given for run in runs)
    assert (first["id"], first["project"], first["name"], first["resume"]) == (second["id"], "hybrids", tmp_path.name, "allow")
    assert all(run.ended for run in runs)


def test_a_login_that_is_missing_ends_the_curves_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def init(**_: object) -> None:
        raise RuntimeError("api_key not configured (no-tty)")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(Settings=dict, init=init))
    curves = WeightsAndBiases(tmp_path, "hybrids", {})
    curves.write({"step": 1, "loss": 1.0})
    curves.close()
    assert capsys.readouterr().err.count("api_key not configured (no-tty); there are no further curves, and the run continues") == 1


def test_an_offline_run_of_weights_and_biases_has_every_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package writes records of its protocol in LevelDB's log format, whole ones in the first block."""
    records = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    monkeypatch.setenv("WANDB_MODE", "offline")
    curves = WeightsAndBiases(tmp_path, "hybrids", {"plan_digest": "sha256:1"})
    curves.write({"step": 3, "loss": 2.5})
    curves.write({"step": 4, "rank_allocated_bytes": [7, 8]})
    curves.close()
    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    data, at, found = file.read_bytes()[: 1 << 15], 7, []
    while at + 7 <= len(data):
        _, size, kind = struct.unpack_from("<IHB", data, at)
        record = records.Record()
        if kind == 1:
            record.ParseFromString(data[at + 7 : at + 7 + size])
        found += [{item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}]
        at += 7 + size
    assert [{key: value for key, value in line.items() if key[0] != "_"} for line in found if line] == [
        {"loss": 2.5, "step": 3},
        {"rank_allocated_bytes/0": 7, "rank_allocated_bytes/1": 8, "step": 4},
    ]


def test_links_are_not_written_through(tmp_path: Path) -> None:
    """Neither the file nor the folder of curves, also where the link is made after the start."""
    (tmp_path / "precious").write_text("precious")
    (tmp_path / FILE_NAME).symlink_to(tmp_path / "precious")
    with pytest.raises(MegaplanError, match="MP671"), MetricsFile(tmp_path, 0, resumed=True):
        pass
    with pytest.raises(MegaplanError, match="MP671"), MetricsFile(tmp_path, 0):
        pass
    (tmp_path / FILE_NAME).unlink()
    (tmp_path / "tensorboard").symlink_to(tmp_path)
    with pytest.raises(MegaplanError, match="MP671"):
        TensorBoard(tmp_path)
    (tmp_path / "tensorboard").unlink()
    with MetricsFile(tmp_path, 0) as metrics:
        (tmp_path / FILE_NAME).unlink()
        (tmp_path / FILE_NAME).symlink_to(tmp_path / "precious")
        metrics.write(Evaluated(1, 1.0, 1.0, 1, 1.0))
    assert (tmp_path / "precious").read_text() == "precious"
