"""Compares the storages that the first forward of a stage leaves alive, by block, with the saved-activation ledger.

Liveness decides: a storage that a forward allocated and that is alive at its end is kept, whether autograd saved it, a context references
it as an attribute, or a module stores it. Hooks on saved tensors only record who saved it.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from megaplan.hosts.megarun.ledger import block_ledger
from megaplan.hosts.values import LedgerTensor
from megaplan.inventory.tensors import Inventory, Outside
from megaplan.inventory.towers import PROJECTOR
from megaplan.spec.models import SIDES, Spec
from megarun.dtypes import TORCH_DTYPES
from megarun.model.norm import Block
from megarun.model.stage import Stage
from megarun.parallel.apply.pipeline import BatchLoss
from megarun.trace.kinds import Kind
from megarun.trace.owners import Owners
from megarun.trace.places import Places
from megarun.trace.rows import row_of
from megarun.trace.tracker import StorageRecord
from megarun.trace.values import Difference, Kept

HEAD = "head"
_OWNED_ELSEWHERE = (Kind.PARAMETER, Kind.GATHERED_PARAMETER, Kind.COLLECTIVE, Kind.RECEIVE_BUFFER, Kind.INPUT)


class FirstForward:
    """Observes the first forward of every stage on a rank, including the loss."""

    def __init__(self, owners: Owners, places: Places, stages: Iterable[Stage]) -> None:
        self._owners, self._places, self._waiting = owners, places, set(stages)
        self._running: Stage | None = None
        self._before: set[StorageRecord] = set()
        self._hooks: Any = None
        self._takers: dict[StorageRecord, str] = {}  # blocks that save tensors made outside them: choices of keys, scaled rows
        self.kept: list[Kept] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context in which forwards are observed."""
        handles = register_module_forward_pre_hook(self._enter), register_module_forward_hook(self._leave)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        if self._running is not None and self._places.path(module) == "embedding.norm":
            for record in self._owners.live.records(inputs[0]):  # the stage may have scaled this input
                self._takers.setdefault(record, "embedding")
        if self._running is not None and self._places.path(module).startswith("layers.") and _is_block(self._places.path(module)):
            self._hand_over(inputs[0])  # embeddings that the stage has scaled are not the output of any module
            if isinstance(module, Block) and int(self._places.path(module).rpartition(".")[2]) in self._running.taking:
                for record in self._owners.live.records(inputs[1].given):
                    self._takers.setdefault(record, self._places.path(module))
        if module in self._waiting and isinstance(module, Stage):
            self._waiting.discard(module)
            self._running, self._before = module, set(self._owners.live.live())
            self._hooks = saved_tensors_hooks(self._save, lambda tensor: tensor)
            self._hooks.__enter__()

    def _leave(self, module: nn.Module, _: Any, output: Any) -> None:
        if self._running is None:
            return
        path = self._places.path(module)
        in_depth = path.startswith("mtp.") or self._places.running.startswith("mtp.")  # a depth saves its output itself
        last = "embedding.norm" if self._running.norms_words else "embedding"  # which makes an embedding's output
        ends = path == last if path.startswith("embedding") else _is_block(path)
        if isinstance(module, BatchLoss) or (ends and not in_depth):
            self._hand_over(output)
        if module is self._running and not self._running.predicts:  # only the last stage packs values after the stream
            self._hand_over(output)
        if module is self._running and self._running.predicts:  # a loss that is passed to the criterion, alone or after the logits
            losses = output[1:] if isinstance(output, tuple) else output if self._running.joins_loss else ()
            for record in self._owners.live.records(losses):
                record.is_block_output = True
        if isinstance(module, BatchLoss) or (module is self._running and not self._running.predicts):
            self._hooks.__exit__(None, None, None)
            self._take()
            self._running, self._before, self._takers = None, set(), {}

    def _hand_over(self, stream: Any) -> None:
        """Mark the output of a block; only the stream if the block also returns a shared norm's output or the keys that it chose."""
        while isinstance(stream, tuple):
            stream = stream[0]
        for record in self._owners.live.records(stream):
            record.is_block_output = True

    def _save(self, tensor: Tensor) -> Tensor:
        record = self._owners.live.known(tensor)
        if record is not None:
            record.savers.add(self._places.running)
        return tensor.detach()  # keeping the tensor itself would make a reference cycle if it is the operation's output

    def _take(self) -> None:
        for record in self._owners.live.live():
            elsewhere = record.kind in _OWNED_ELSEWHERE and not (record.kind is Kind.COLLECTIVE and record.savers)
            if record in self._before or record.is_block_output or elsewhere or not record.nbytes:
                continue
            block = self._takers.get(record) or block_of(record.place)
            savers = sorted(path.removeprefix(block).removeprefix(".") for path in record.savers)
            self.kept.append(Kept(block, row_of(self._owners.column(record), record, record.nbytes), tuple(savers)))


def compare_kept(spec: Spec, inventory: Inventory, blocks: Sequence[tuple[str, int]], kept: Iterable[Kept]) -> list[Difference]:
    """Storages that the runtime keeps and the ledger does not list, or vice versa, by name.

    Args:
        spec: Spec of the job.
        inventory: Inventory of the job.
        blocks: Names of the blocks that ran, with the first layer of their stage.
        kept: Storages that they left alive.
    """
    outside = dict(inventory.outside)
    found: list[Difference] = []
    starts: dict[str, list[int]] = {}
    for name, start in blocks:
        starts.setdefault(name, []).append(start)
    for name, copies in starts.items():  # two stages of a rank may have copies of a block
        tied = name == HEAD and inventory.tied
        block = outside["embedding"] if tied else inventory.block(name)
        away = _is_away(spec, name, block.family)
        listed = () if away else tuple(each for start in copies for each in block_ledger(spec, name, block, start).saved)
        found += _compare_block(name, listed, [item for item in kept if item.block == name])
    return found


def _is_away(spec: Spec, name: str, family: str) -> bool:
    """True if a block's saved tensors are in host memory at the end of a forward."""
    return name.startswith("layers.") and spec.offloads(int(name.removeprefix("layers.")), family)


def block_of(place: str) -> str:
    """The inventory block of a module path; the stage itself runs the head."""
    parts, images = place.split("."), _of_images(place)
    if images is not None:
        return images
    if parts[0] in ("layers", "mtp"):
        return ".".join(parts[:2])
    if parts[0] in (*SIDES, Outside.EMBEDDING, Outside.RELATION_BIAS, Outside.FINAL_NORM):
        return parts[0]
    return place if _is_block(place) else HEAD


def _of_images(path: str) -> str | None:
    """The block of an encoder, or the projection of its features, that has a module path; None for other paths."""
    parts = path.split(".")
    if parts[0] == PROJECTOR:
        return PROJECTOR
    length = 4 if parts[1:2] == ["layers"] else 2
    return ".".join(parts[:length]) if parts[0] == "vision" and len(parts) >= length else None


def _compare_block(block: str, ledger: Sequence[LedgerTensor], kept: Sequence[Kept]) -> Iterator[Difference]:
    ledger = [tensor for tensor in ledger if tensor.bytes]  # a layer may read another layer's tensors
    pairs = [(tensor, item) for tensor in range(len(ledger)) for item in range(len(kept)) if _same_storage(ledger[tensor], kept[item])]
    missing, extra = set(range(len(ledger))), set(range(len(kept)))
    for tensor, item in sorted(pairs, key=lambda pair: -_likeness(ledger[pair[0]], kept[pair[1]])):
        if tensor in missing and item in extra:
            missing.discard(tensor)
            extra.discard(item)
    for absent in (ledger[index] for index in sorted(missing)):
        name = f"{block}: {absent.name} {list(absent.shape)} {absent.dtype}, {absent.why} in the ledger, is not in the trace"
        yield Difference(name, absent.column, absent.bytes, 0)
    for found in (kept[index] for index in sorted(extra)):
        why = f"saved by {', '.join(path or 'the block' for path in found.savers)}" if found.savers else "alive, not saved by autograd"
        yield Difference(f"{found.row.describe()}, {why}, is not in the ledger", found.row.column, 0, found.row.nbytes)


def _same_storage(tensor: LedgerTensor, item: Kept) -> bool:
    dtype = str(TORCH_DTYPES[tensor.dtype]).removeprefix("torch.")
    return item.row.nbytes == tensor.bytes and item.row.dtype == dtype and item.row.column == tensor.column


def _likeness(tensor: LedgerTensor, item: Kept) -> float:
    """Agreement of savers and maker with the ledger's keepers: it distinguishes storages of one size."""
    keepers = tensor.keepers
    named = sum(keeper in item.savers for keeper in keepers)
    functional = any(keeper not in item.savers for keeper in keepers) and "" in item.savers
    return 0.25 * bool(item.savers) + named + 0.5 * functional + 0.25 * any(keeper.rpartition(".")[2] in item.row.op for keeper in keepers)


def _is_block(path: str) -> bool:
    parts = path.split(".")
    return _of_images(path) == path or path in ("embedding", *SIDES, "final_norm") or (parts[0] in ("layers", "mtp") and len(parts) == 2)
