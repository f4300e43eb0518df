"""Copies in memory: the step from which every rank can continue, and the loss with a process or node."""

import contextlib
import io
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megarun.checkpoint.memory import NODE, SHARED_STORE, MemoryCopies, NamedPieces, NodeMemory, Record, peer_of
from megarun.checkpoint.pieces import Pieces
from megarun.data.progress import DataProgress
from megarun.launch.process import ProcessIdentity
from megarun.launch.process_group import TORCHRUN_KEEPS_STORE

pytestmark = pytest.mark.runtime
PLAN = "sha256:plan"


def test_a_peer_is_on_the_next_node() -> None:
    assert [peer_of(rank, ["0", "0", "1", "1"]) for rank in range(4)] == [2, 3, 0, 1]
    assert [peer_of(rank, ["0", "0", "0", "1"]) for rank in range(4)] == [3, 3, 3, 0]
    assert peer_of(0, ["0", "0"]) is None


def test_a_copy_counts_once_it_is_whole(tmp_path: Path) -> None:
    node = NodeMemory(ProcessIdentity.own(), tmp_path)
    record = Record(3, 6, 8, PLAN, ((1, 2),), (0.5,))
    node.begin(3, 6, 8).copy_(torch.arange(8, dtype=torch.uint8))
    assert node.records(PLAN) == []
    node.commit(record)
    assert node.records(PLAN) == [record]
    assert node.records("sha256:other") == []
    assert node.copy_of(record).tolist() == list(range(8))
    node.begin(3, 8, 8)  # the next step of the same place
    assert node.records(PLAN) == []
    node.commit(Record(3, 8, 9, PLAN, (), ()))  # a size that differs from the file's
    assert node.records(PLAN) == []


def test_memory_of_a_torchrun_that_has_ended_is_given_back(tmp_path: Path) -> None:
    """It is not a child of the process that looks, and its number may be another process's by now."""
    own = ProcessIdentity.own()
    left = NodeMemory(ProcessIdentity(own.host, own.pid, own.started + 1, own.namespace), tmp_path)
    here = NodeMemory(own, tmp_path)
    assert not left.folder.exists()
    assert NodeMemory(own, tmp_path).folder == here.folder
    assert here.folder.is_dir()


def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"megarun-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="not a folder of this user"):
        NodeMemory(ProcessIdentity.own(), tmp_path)


def in_ranks(number: int, folder: Path, action: Callable[[int, Path], Any]) -> list[Any]:
    """Results of an action in forked processes of a gloo group, each on its own node."""
    context, results = multiprocessing.get_context("fork"), multiprocessing.get_context("fork").SimpleQueue()

    def body(rank: int) -> None:
        os.environ |= {NODE: str(rank), "GLOO_SOCKET_IFNAME": "lo"}
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=number)
        results.put((rank, action(rank, folder / f"node-{rank}")))
        dist.barrier()

    processes = [context.Process(target=body, args=(rank,)) for rank in range(number)]
    for process in processes:
        process.start()
    found = dict(results.get() for _ in processes)
    for process in processes:
        process.join()
    return [found[rank] for rank in range(number)]


def state_of(rank: int, step: int) -> NamedPieces:
    tensors = {"a": torch.full((3, 5), 100.0 * rank + step), "b": torch.tensor(step / 3, dtype=torch.float64)}
    tensors["c"] = torch.full((7,), rank == step)
    return [(name, Pieces.unsharded(tensor)) for name, tensor in tensors.items()]


def lose_and_load(rank: int, place: Path) -> list[Any]:
    """The states that a rank continues from after losses: of no node, of one and a copy of the newest step elsewhere, of two neighbours."""
    place.mkdir()
    agent, plain = ProcessIdentity.of(os.getppid()), dist.group.WORLD
    assert plain is not None

    def copies() -> MemoryCopies:
        return MemoryCopies(NodeMemory(agent, place), PLAN, plain, plain)

    kept = copies()
    for step in (1, 2, 3):
        kept.keep(step, DataProgress(((step, step + 1),)), state_of(rank, step))
    kept.wait()
    found: list[Any] = []
    for lost in ((), (1,), (0, 1)):
        dist.barrier()
        if rank in lost:
            NodeMemory(agent, place).remove()
        if lost == (1,) and rank == 2:  # and node 2, which keeps a copy for rank 1, was killed while it received the newest one
            NodeMemory(agent, place).begin(1, 3, 8)
        dist.barrier()
        again, state = copies(), state_of(9, 9)
        record = again.newest()
        if record is not None:
            again.load(record.step, state)
        wanted = None if record is None else [pieces.local.tolist() for _, pieces in state_of(rank, record.step)]
        equal = record is not None and [pieces.local.tolist() for _, pieces in state] == wanted
        found.append((None if record is None else (record.step, record.data_progress.skipped), equal))
    return found


def test_a_lost_node_is_filled_from_its_peers(tmp_path: Path) -> None:
    """A restored state is bitwise complete; without both copies of one rank there is none."""
    expected = [((3, ((3, 4),)), True), ((2, ((2, 3),)), True), (None, False)]
    assert in_ranks(3, tmp_path, lose_and_load) == [expected] * 3


def said_at_the_start(_: int, place: Path) -> str:
    place.mkdir()
    plain = dist.group.WORLD
    assert plain is not None
    with contextlib.redirect_stderr(io.StringIO()) as said:
        MemoryCopies(NodeMemory(ProcessIdentity.own(), place), PLAN, plain, plain)
    return said.getvalue()


@pytest.mark.parametrize(("number", "shared", "named"), [(2, "True", True), (2, "False", False), (1, "True", False)])
def test_what_keeps_a_node_from_being_replaced_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int, shared: str, named: bool
) -> None:
    monkeypatch.setenv(TORCHRUN_KEEPS_STORE, shared)
    first, *rest = in_ranks(number, tmp_path, said_at_the_start)
    assert (SHARED_STORE.split(":")[0] in first) == named
    assert not any(rest)
