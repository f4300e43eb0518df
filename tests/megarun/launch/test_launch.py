"""Rendezvous of processes: who is missing is named within the time they are given, whoever started them."""

import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megaplan.errors import MegaplanError
from megaplan.spec.models import Mesh
from megarun.launch.process_group import Launch, MissingProcessError, read_launch

pytestmark = pytest.mark.runtime


@pytest.fixture
def taken() -> Iterator[socket.socket]:
    """A port at which another program listens and never answers."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number: int = free.getsockname()[1]
        return number


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Set the variables of a rank of three that was started without torchrun."""

    def put(rank: int, port: int, **more: str) -> None:
        for name in ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT", "LOCAL_RANK"):
            monkeypatch.delenv(name, raising=False)
        values = {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} | more
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return put


def problem(error: MegaplanError) -> tuple[str, str]:
    return error.diagnostics[0].code, error.diagnostics[0].detail


def test_missing_ranks_are_named_with_their_places(place: Any, port: int) -> None:
    """Rank 0 keeps the store and waits for ranks 1 and 2."""
    place(0, port)
    with pytest.raises(MissingProcessError) as refused:
        read_launch(1, Mesh(pp=3))
    assert problem(refused.value) == ("MP650", "2 of 3 processes did not start within 1 s: rank 1 (pp 1), rank 2 (pp 2)")
    assert refused.value.launch.world_size == 3


def test_every_rank_that_came_says_the_same(place: Any, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 0 and 1 of three: rank 1 finds the store of rank 0, and both miss rank 2."""
    place(0, port)
    said: list[tuple[str, str]] = []

    def first() -> None:
        try:
            read_launch(2)
        except MissingProcessError as error:
            said.append(problem(error))

    keeper = threading.Thread(target=first)
    keeper.start()
    keeper.join(0.5)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(MissingProcessError) as refused:
        read_launch(1)
    keeper.join()
    assert [problem(refused.value), *said] == [("MP650", f"1 of 3 processes did not start within {s} s: rank 2") for s in (1, 2)]


def test_rank_0_that_never_starts_is_named(place: Any, port: int) -> None:
    place(1, port)
    with pytest.raises(MegaplanError) as refused:
        read_launch(1)
    code, detail = problem(refused.value)
    assert code == "MP650"
    assert detail.startswith(f"rank 1: no store at 127.0.0.1:{port} within 1 s: rank 0 did not start, or another program owns its port\n")


def test_a_port_in_use_is_said(place: Any, taken: socket.socket) -> None:
    port = taken.getsockname()[1]
    place(0, port)
    with pytest.raises(MegaplanError) as refused:
        read_launch(1, Mesh(pp=3))
    code, detail = problem(refused.value)
    assert code == "MP651"
    assert detail.startswith(f"rank 0 (pp 0) hosts the store of the job, and cannot listen at 127.0.0.1:{port}\n")
    assert "address already in use" in detail


@pytest.mark.slow
def test_another_program_at_the_port_is_not_a_store(place: Any, taken: socket.socket) -> None:
    """Rank 1 reaches what listens there, which never says a word."""
    place(1, taken.getsockname()[1])
    with pytest.raises(MegaplanError) as refused:
        read_launch(1)
    code, detail = problem(refused.value)
    assert code == "MP650"
    assert detail.endswith("\nno answer from the port")


@pytest.mark.parametrize(
    ("name", "value", "detail"),
    [
        ("RANK", "", "RANK is not set, WORLD_SIZE is"),
        ("MASTER_PORT", "http", "MASTER_PORT = http"),
        ("MASTER_ADDR", "", "MASTER_ADDR is not set, WORLD_SIZE is"),
    ],
)
def test_a_missing_variable_is_named(name: str, value: str, detail: str, place: Any, port: int) -> None:
    place(0, port, **{name: value})
    with pytest.raises(MegaplanError) as refused:
        read_launch(1)
    assert problem(refused.value) == ("MP652", detail)


def test_one_process_needs_no_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    found = read_launch(1)
    assert isinstance(found, Launch)
    assert (found.rank, found.world_size) == (0, 1)


HOLDS_A_GROUP = """
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from megarun.launch.process_group import process_group, read_launch

def work():
    with process_group(read_launch(), torch.device("cpu")):
        mesh = init_device_mesh("cpu", (2,))
        for _ in range(200):
            dist.all_reduce(torch.ones(1000), group=mesh.get_group(), async_op=True).wait()
        cycle = [mesh]
        cycle.append(cycle)

work()
"""


@pytest.mark.slow
def test_a_process_whose_group_is_in_a_reference_cycle_exits_cleanly(
    torchrun: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """gloo's threads end before Python does; without that two of three such runs abort."""
    script = tmp_path / "holds.py"
    script.write_text(HOLDS_A_GROUP)
    for _ in range(2):
        ended = torchrun(2, str(script))
        assert ended.returncode == 0, ended.stderr[-2000:]
