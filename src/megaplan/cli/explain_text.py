"""`estimate --explain`: the tensors behind a rank's numbers, by block; each distinct block once, with its count on the rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from megaplan.budget.values import RankBudget
from megaplan.cli.topics import column_lines
from megaplan.columns import Column
from megaplan.hosts.columns import HOLDS
from megaplan.hosts.megarun.dims import local_shape
from megaplan.hosts.megarun.ledger import Make, block_ledger, makes_of
from megaplan.hosts.megarun.storage import OWNER_COLUMNS
from megaplan.hosts.values import BlockLedger, LedgerTensor
from megaplan.inventory.tensors import Block
from megaplan.layout.runs import runs_label, runs_of
from megaplan.terminal.table import table, wrap
from megaplan.units import format_bytes

if TYPE_CHECKING:
    from megaplan.api.load import LoadedJob
    from megaplan.spec.models import Spec

Line = tuple[str, str]


@dataclass(frozen=True, slots=True)
class _Held:
    """Equal blocks of a rank: the name of the first, and their count."""

    name: str
    block: Block
    count: int

    @property
    def title(self) -> str:
        return (
            f"{self.name}, {self.block.family}"
            if self.count == 1
            else f"{self.name} and {self.count - 1} more like it, {self.block.family}"
        )


def explain_lines(given: LoadedJob, rank: RankBudget) -> Iterator[Line]:
    """(text, style): the position of the peak, each column's formula, then parameters and kept activations by block."""
    label = runs_label(runs_of(rank.ranks))
    yield "", ""
    yield f"details of {label}", "bold"
    for phase, text in rank.moments.items():
        mark = "*" if phase is rank.peak_phase else " "
        yield from _plain(wrap(f"{mark} {phase}: {format_bytes(rank.phases[phase])}, {text}", indent="    "))
    for column, num_bytes in rank.columns.items():
        yield "", ""
        yield f"{column}: {num_bytes:,} bytes ({format_bytes(num_bytes)})", "bold"
        host = given.spec.host.name
        yield from _plain(f"  {line}" for line in (column_lines(column) if host == "megarun" else wrap(HOLDS[host][column], width=76)))
    held = _held(given, rank.coordinate["pp"])
    yield "", ""
    yield "parameters of each block on this rank, before state sharding", "bold"
    for item in held:
        yield from _parameters(given, item)
    yield "", ""
    yield "saved for backward by each block, per microbatch in flight", "bold"
    if given.spec.host.name == "megatron":
        yield from _megatron_ledger(given, rank.coordinate["pp"])
        return
    for item in held:
        yield from _ledger(given, item)


def _megatron_ledger(given: LoadedJob, pp_rank: int) -> Iterator[Line]:
    """Megatron-Core's tensors of each operator that the rank has."""
    from megaplan.hosts.megatron.from_spec import jobs_from_spec  # noqa: PLC0415
    from megaplan.hosts.megatron.saved import operator, operators  # noqa: PLC0415

    job = jobs_from_spec(given.spec, "".join(block.family for block in given.inventory.layers), given.layout)[pp_rank]
    own = operators("".join(job.chunks))
    for letter in dict.fromkeys(own):
        sizes = operator(job, letter)
        yield f"  {letter}, {own.count(letter)} on this rank: {format_bytes(sum(sizes.values()))}", ""
        rows = [(f"    {name}", f"{size:,}") for name, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0]))]
        yield from _plain(table([("    tensor", "bytes"), *rows], left=(0,)))


def _held(given: LoadedJob, pp_rank: int) -> list[_Held]:
    """The distinct blocks of a pipeline rank, in execution order; copies that only share a storage are listed as parameters too."""
    inventory, slots = given.inventory, given.layout.of_rank(pp_rank)
    if given.spec.host.name == "torchtitan":
        from megaplan.hosts.torchtitan.blocks import in_blocks, transformer_blocks  # noqa: PLC0415
        from megaplan.hosts.torchtitan.ledger import makes_of as makes_of_titan  # noqa: PLC0415

        inventory, slots = transformer_blocks(inventory), tuple(map(in_blocks, slots))
        makes = makes_of_titan(given.spec, inventory)
    else:
        makes = makes_of(given.spec, inventory)
    found: dict[Make, _Held] = {}
    for slot in slots:
        for name in slot.blocks:
            block = inventory.block(name)
            make = makes[name]
            before = found.get(make)
            found[make] = _Held(before.name, block, before.count + 1) if before else _Held(name, block, 1)
    return list(found.values())


def _parameters(given: LoadedJob, item: _Held) -> Iterator[Line]:
    mesh = given.spec.mesh
    rows = [("    tensor", "shape", "elements", "column", "group")]
    for tensor in item.block.tensors:
        shape = local_shape(tensor, mesh.tp, mesh.ep, mesh.etp)
        rows.append((f"    {tensor.name}", _shape(shape), f"{prod(shape):,}", str(OWNER_COLUMNS[tensor.owner]), str(tensor.group)))
    yield f"  {item.title}", ""
    yield from _plain(table(rows, left=(0, 1, 3, 4)))


def _ledger(given: LoadedJob, item: _Held) -> Iterator[Line]:
    found = _block_ledger(given.spec, item.name, item.block)
    tensors = sorted(found.saved, key=lambda tensor: (-tensor.bytes, tensor.name))
    total = sum(tensor.bytes for tensor in tensors)
    yield f"  {item.title}: {format_bytes(total)}", ""
    if tensors:
        rows = [("    tensor", "shape", "dtype", "bytes", "column"), *map(_row, tensors)]
        yield from _plain(table(rows, left=(0, 1, 2, 4)))


def _block_ledger(spec: Spec, name: str, block: Block) -> BlockLedger:
    if spec.host.name == "torchtitan":
        from megaplan.hosts.torchtitan.ledger import block_ledger as of_torchtitan  # noqa: PLC0415

        return of_torchtitan(spec, name, block)
    return block_ledger(spec, name, block)


def _row(tensor: LedgerTensor) -> tuple[str, str, str, str, str]:
    column = "" if tensor.column is Column.ACTIVATIONS else str(tensor.column)
    return f"    {tensor.name}", _shape(tensor.shape), str(tensor.dtype), f"{tensor.bytes:,}", column


def _shape(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _plain(lines: Iterator[str] | Sequence[str]) -> Iterator[Line]:
    return ((line, "") for line in lines)
