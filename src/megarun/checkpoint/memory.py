"""Copies of a job's last states in the memory of two nodes: a restart by torchrun continues from them when a process or a node is lost.

After every step a thread of each rank copies its state into shared memory of its own node while the next step computes gradients, which
changes no state. It sends the copy to a rank of another node, which keeps it in the same way. The next update waits for it. Shared memory
belongs to no process, so it is there for the processes that torchrun starts again; its folder is named after the torchrun of the node,
whose end makes it garbage that the next start removes. Each copy has two places, for even and odd steps, and counts once its record is
written: so the newest step of which every rank has a copy somewhere is the last one or the one before.
"""

import errno
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISDIR

import torch
import torch.distributed as dist
from torch import Tensor

from megaplan.terminal.output import note
from megarun.checkpoint.pieces import Pieces
from megarun.checkpoint.state import GENERATOR
from megarun.data.progress import DataProgress
from megarun.files import read_bounded, write_whole
from megarun.launch.process import ProcessIdentity
from megarun.launch.process_group import TORCHRUN_KEEPS_STORE

ROOT = Path("/dev/shm")
LAUNCHED = "TORCHELASTIC_RUN_ID"
NODE = "GROUP_RANK"
PLACES = 2
SHARED_STORE = "with torchrun's shared store a lost node cannot be replaced: export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on every node"
ALIGNMENT = 64
PART_BYTES = 1 << 26
"""Size of one message between two ranks."""
MAX_RECORD_BYTES = 1 << 20
NamedPieces = Sequence[tuple[str, Pieces]]


@dataclass(frozen=True, slots=True)
class Record:
    """A complete copy of a rank's state.

    Attributes:
        rank: The rank.
        step: Optimizer steps done.
        num_bytes: Size of the copy.
        plan: Digest of the plan that it belongs to.
        skipped: Skipped batches of the data progress.
        losses: Latest losses of the data progress.
    """

    rank: int
    step: int
    num_bytes: int
    plan: str
    skipped: tuple[tuple[int, int], ...]
    losses: tuple[float, ...]

    @property
    def data_progress(self) -> DataProgress:
        """The data progress of the step."""
        return DataProgress(self.skipped, self.losses)

    def text(self) -> str:
        """JSON."""
        return json.dumps([self.rank, self.step, self.num_bytes, self.plan, self.skipped, self.losses])

    @classmethod
    def parse(cls, text: str) -> "Record":
        """The record of a text.

        Raises:
            ValueError, TypeError: The text is not such a value.
        """
        rank, step, num_bytes, plan, skipped, losses = json.loads(text)
        return cls(int(rank), int(step), int(num_bytes), str(plan), tuple((int(a), int(b)) for a, b in skipped), tuple(map(float, losses)))


class NodeMemory:
    """The copies in the memory of this node.

    Args:
        agent: The torchrun of the node.
        root: Folder of a file system in memory.

    Raises:
        PermissionError: Another user has taken the folder's name.
    """

    def __init__(self, agent: ProcessIdentity, root: Path = ROOT) -> None:
        user, space = root / f"megarun-{os.getuid()}", hashlib.sha256(agent.namespace.encode()).hexdigest()[:12]
        self.folder = user / f"{space}-{agent.pid}-{agent.started}"
        with suppress(FileExistsError):
            user.mkdir(mode=0o700)
        found = user.lstat()
        if not S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise PermissionError(errno.EPERM, "not a folder of this user", str(user))
        for old in user.glob(f"{space}-*-*"):
            with suppress(ValueError):
                pid, started = map(int, old.name.split("-")[1:])
                if ProcessIdentity(agent.host, pid, started, agent.namespace).has_ended:
                    shutil.rmtree(old, ignore_errors=True)
        self.folder.mkdir(mode=0o700, exist_ok=True)
        self._maps: dict[Path, Tensor] = {}

    def begin(self, rank: int, step: int, num_bytes: int) -> Tensor:
        """Memory for a copy, uint8 [num_bytes]; the copy that was in this place no longer counts."""
        data, record = self._files(rank, step)
        record.unlink(missing_ok=True)
        known = self._maps.get(data)
        if known is not None and len(known) == num_bytes:
            return known
        descriptor = os.open(data, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)  # raises an error here instead of a SIGBUS in the copy
            os.ftruncate(descriptor, num_bytes)
        finally:
            os.close(descriptor)
        self._maps[data] = self._mapped(data, num_bytes)
        return self._maps[data]

    def commit(self, record: Record) -> None:
        """Make a copy count."""
        write_whole(self._files(record.rank, record.step)[1], record.text(), str(os.getpid()))

    def records(self, plan: str) -> list[Record]:
        """The records of complete copies of this plan."""
        found = []
        for path in sorted(self.folder.glob("*.json")):
            with suppress(OSError, ValueError, TypeError):
                record = Record.parse(read_bounded(path, MAX_RECORD_BYTES))
                if record.plan == plan and self._files(record.rank, record.step)[0].stat().st_size == record.num_bytes:
                    found.append(record)
        return found

    def copy_of(self, record: Record) -> Tensor:
        """The bytes of a copy."""
        return self._mapped(self._files(record.rank, record.step)[0], record.num_bytes)

    def forget(self) -> None:
        """Make no copy count."""
        for path in self.folder.glob("*.json"):
            path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Give the memory back."""
        self._maps.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _files(self, rank: int, step: int) -> tuple[Path, Path]:
        name = f"rank-{rank}.{step % PLACES}"
        return self.folder / f"{name}.state", self.folder / f"{name}.json"

    @staticmethod
    def _mapped(path: Path, num_bytes: int) -> Tensor:
        return torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8)


class MemoryCopies:
    """A rank's copies of its own state, and of the states of ranks on another node; every method is collective.

    Args:
        node: Memory of this node.
        plan: Digest of the job's plan.
        control: gloo group of all ranks.
        sending: gloo group of all ranks, for the sending threads alone.
    """

    def __init__(self, node: NodeMemory, plan: str, control: dist.ProcessGroup, sending: dist.ProcessGroup) -> None:
        self._node, self._plan, self._control, self._sending = node, plan, control, sending
        self._rank, size = dist.get_rank(), dist.get_world_size()
        nodes = [""] * size
        dist.all_gather_object(nodes, os.environ.get(NODE, "0"), group=control)
        self.peer = peer_of(self._rank, nodes)
        if self.peer is not None and self._rank == 0 and os.environ.get(TORCHRUN_KEEPS_STORE) == str(True):
            note([SHARED_STORE])
        self._wards = [rank for rank in range(size) if peer_of(rank, nodes) == self._rank]
        self._sizes: list[int] = []
        self._thread: threading.Thread | None = None
        self._failed: BaseException | None = None
        self._held: list[list[Record]] = []

    @classmethod
    def of_job(cls, plan: str, control: dist.ProcessGroup) -> "MemoryCopies | None":
        """The copies of a job that torchrun has started, because only torchrun can restart its processes; else None."""
        if LAUNCHED not in os.environ:
            return None
        return cls(NodeMemory(ProcessIdentity.of(os.getppid())), plan, control, dist.new_group(backend="gloo"))

    def newest(self) -> Record | None:
        """A copy of the newest step of which a copy of every rank exists on some node; None if there is none."""
        size = dist.get_world_size()
        self._held = [[] for _ in range(size)]
        dist.all_gather_object(self._held, self._node.records(self._plan), group=self._control)
        steps = [{record.step for held in self._held for record in held if record.rank == rank} for rank in range(size)]
        step = max(set.intersection(*steps), default=None)
        return None if step is None else next(record for held in self._held for record in held if record.step == step)

    def load(self, step: int, state: NamedPieces) -> None:
        """Read the copies of a step that `newest` has found into the ranks' states."""
        for rank in range(dist.get_world_size()):
            holders = [index for index, held in enumerate(self._held) for each in held if (each.rank, each.step) == (rank, step)]
            sender = rank if rank in holders else holders[0]
            record = next(each for each in self._held[sender] if (each.rank, each.step) == (rank, step))
            if self._rank not in (rank, sender):
                continue
            copy = self._node.copy_of(record) if self._rank == sender else torch.empty(record.num_bytes, dtype=torch.uint8)
            if sender != rank:
                for index, part in enumerate(_parts(copy)):
                    if self._rank == sender:
                        dist.send(part, rank, group=self._control, tag=index)
                    else:
                        dist.recv(part, sender, group=self._control, tag=index)
            if self._rank == rank:
                for pieces, held in _placed(state, copy):
                    pieces.local.copy_(held)
                for name, pieces in state:
                    if name.startswith(GENERATOR):
                        torch.set_rng_state(pieces.local) if name.endswith(".cpu") else torch.cuda.set_rng_state(pieces.local)

    def keep(self, step: int, data_progress: DataProgress, state: NamedPieces) -> None:
        """Begin to copy this rank's state, which must not change until `wait` returns, and to send it to the peer.

        Raises:
            OSError: The node had no memory left for the step before.
            RuntimeError: The step before could not be sent.
        """
        self.wait()
        if not self._sizes:
            self._sizes = [0] * dist.get_world_size()
            dist.all_gather_object(self._sizes, sum(_padded(pieces) for _, pieces in state), group=self._control)
        records = {rank: self._record(rank, step, data_progress) for rank in (self._rank, *self._wards)}
        words = state, records, _stream_after_update(state)
        self._thread = threading.Thread(target=self._copy_and_send, args=words, name="memory copies", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the last copy is complete and sent to the peer.

        Raises:
            OSError: The node has no memory left.
            RuntimeError: It could not be sent.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failed is not None:
            raise self._failed

    def forget(self) -> None:
        """Invalidate the copies: the run goes back to an earlier step."""
        self.wait()
        dist.barrier(self._control)
        self._node.forget()
        dist.barrier(self._control)

    def close(self) -> None:
        """Give the memory back at the end of a run."""
        self.wait()
        dist.barrier(self._control)
        self._node.remove()

    def _record(self, rank: int, step: int, progress: DataProgress) -> Record:
        return Record(rank, step, self._sizes[rank], self._plan, progress.skipped, progress.losses)

    def _copy_and_send(self, state: NamedPieces, records: dict[int, Record], stream: torch.cuda.Stream | None) -> None:
        try:
            step = records[self._rank].step
            own = self._node.begin(self._rank, step, self._sizes[self._rank])
            with torch.cuda.stream(stream):  # none on a CPU
                for pieces, held in _placed(state, own):
                    held.copy_(pieces.local)
            self._node.commit(records[self._rank])
            arriving = {rank: self._node.begin(rank, step, self._sizes[rank]) for rank in self._wards}
            works = [
                dist.irecv(part, rank, group=self._sending, tag=index)
                for rank, copy in arriving.items()
                for index, part in enumerate(_parts(copy))
            ]
            if self.peer is not None:
                works += [dist.isend(part, self.peer, group=self._sending, tag=index) for index, part in enumerate(_parts(own))]
            for work in works:
                if work is not None:
                    work.wait()
            for rank in arriving:
                self._node.commit(records[rank])
        except BaseException as error:  # raised where the loop waits
            self._failed = error


def _stream_after_update(state: NamedPieces) -> torch.cuda.Stream | None:
    """A stream that begins when the work of this thread's stream is done; None on a CPU."""
    device = next((pieces.local.device for _, pieces in state if pieces.local.is_cuda), None)
    if device is None:
        return None
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream


def peer_of(rank: int, nodes: Sequence[str]) -> int | None:
    """The rank on the next node that keeps a rank's copy; None on one node.

    Args:
        rank: The rank.
        nodes: Node of every rank.
    """
    order = list(dict.fromkeys(nodes))
    if len(order) < 2:
        return None
    members = {node: [index for index, each in enumerate(nodes) if each == node] for node in order}
    there = members[order[(order.index(nodes[rank]) + 1) % len(order)]]
    return there[members[nodes[rank]].index(rank) % len(there)]


def _parts(copy: Tensor) -> list[Tensor]:
    return [copy[start : start + PART_BYTES] for start in range(0, len(copy), PART_BYTES)]


def _padded(pieces: Pieces) -> int:
    return -(-pieces.local.nbytes // ALIGNMENT) * ALIGNMENT


def _placed(state: NamedPieces, copy: Tensor) -> Iterator[tuple[Pieces, Tensor]]:
    """Each tensor of a state with its part of a copy."""
    start = 0
    for _, pieces in state:
        local = pieces.local
        yield pieces, copy[start : start + local.nbytes].view(local.dtype).view(local.shape)
        start += _padded(pieces)
