"""Worlds of 1, 2, 4 or 8 processes, each forked from one server that has loaded torch once, and each used for many cells."""

import io
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Self

import torch
from torch.distributed import TCPStore
from torch.utils._pytree import tree_flatten

TIMEOUT_SECONDS = 240
COMPARED = ("initial", "gradients", "losses", "auxiliary", "router_load", "norms", "parameters")
"""Results of a training that `assert_bitwise` compares."""


class CellFailedError(AssertionError):
    """A rank raised, crashed or did not answer."""


@dataclass(frozen=True)
class World:
    """The processes, and the parent's end of each one's pipe."""

    processes: list[Any]
    pipes: list[Connection]
    store: TCPStore

    def stop(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.kill()
            process.join()


class Worlds:
    """One world for each number of processes, and what one process computed for each reference."""

    def __init__(self) -> None:
        os.environ["OMP_NUM_THREADS"] = "1"
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # modules that the server preloads; Python 3.11 does not pass it a path
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["parity_worker"])
        self._worlds: dict[int, World] = {}
        self._references: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for world in self._worlds.values():
            world.stop()

    def reference(self, case: dict[str, Any]) -> dict[str, Any]:
        """One process's record; computed once for each spec."""
        key = json.dumps(case, sort_keys=True)
        if key not in self._references:
            self._references[key] = self.train(case, 1)[0]
        return self._references[key]

    def train(self, case: dict[str, Any], world_size: int) -> list[dict[str, Any]]:
        """The records of all ranks.

        Raises:
            CellFailedError: A rank failed; its world is taken down, so that the next cell meets a fresh one.
        """
        world = self._worlds.get(world_size) or self._start(world_size)
        self._worlds[world_size] = world
        for pipe in world.pipes:
            pipe.send(case)
        try:
            return _answers(world)
        except CellFailedError:
            self._worlds.pop(world_size).stop()
            raise

    def _start(self, world_size: int) -> World:
        from parity_worker import serve  # noqa: PLC0415

        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        pipes, processes = [], []
        for rank in range(world_size):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=serve, args=(rank, world_size, store.port, theirs), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        return World(processes, pipes, store)


def _answers(world: World) -> list[dict[str, Any]]:
    """Every rank's record, in whichever order they come; the first error is the cell's."""
    ranks = {pipe: rank for rank, pipe in enumerate(world.pipes)}
    records: dict[int, dict[str, Any]] = {}
    end = time.monotonic() + TIMEOUT_SECONDS
    while len(records) < len(ranks):
        waiting = [pipe for pipe, rank in ranks.items() if rank not in records]
        ready = wait(waiting, timeout=end - time.monotonic())
        if not ready:
            missing = ", ".join(str(ranks[pipe]) for pipe in waiting)
            raise CellFailedError(f"no answer within {TIMEOUT_SECONDS} s from rank {missing}")
        for pipe in ready:
            rank = ranks[pipe]  # type: ignore[index]
            try:
                record = torch.load(io.BytesIO(pipe.recv_bytes()))  # type: ignore[union-attr]
            except EOFError:
                raise CellFailedError(f"rank {rank} crashed") from None
            if "error" in record:
                raise CellFailedError(f"rank {rank} failed first: {record['error']}")
            records[rank] = record
    return [records[rank] for rank in range(len(ranks))]


def assert_bitwise(found: Sequence[dict[str, Any]], expected: Sequence[dict[str, Any]], compared: Sequence[str] = COMPARED) -> None:
    """Two trainings of one layout have equal results on every rank, bit by bit."""
    for rank, (one, other) in enumerate(zip(found, expected, strict=True)):
        for key in compared:
            (mine, shape), (theirs, other_shape) = tree_flatten(one[key]), tree_flatten(other[key])
            assert shape == other_shape
            wrong = sum(not torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(mine, theirs, strict=True))
            assert wrong == 0, f"rank {rank}: {wrong} of {len(mine)} {key} differ"
