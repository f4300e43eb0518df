"""`estimate --explain`: the tensors behind a rank's numbers, by block; each distinct block is listed once, with its count on the rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING

from megaplan.budget.values import RankBudget
from megaplan.cli.stages_text import received_text
from megaplan.cli.time_text import turns_text
from megaplan.cli.topics import column_lines
from megaplan.columns import Column, Phase
from megaplan.hosts.megarun.embedding import graph_bytes
from megaplan.hosts.megarun.explain import gather_texts, plain_texts
from megaplan.hosts.megarun.libraries import library_texts
from megaplan.hosts.megarun.storage import OWNER_COLUMNS
from megaplan.hosts.values import Explained
from megaplan.inventory.tensors import Block
from megaplan.layout.ranks import runs_label, runs_of
from megaplan.spec.step_graphs import RECORDED, replays_update, why_eager
from megaplan.terminal.output import StyledLine
from megaplan.terminal.table import table, wrap
from megaplan.units import format_bytes

if TYPE_CHECKING:
    from megaplan.api.load import LoadedJob
    from megaplan.layout.step_time import PlannedTime


def explain_lines(given: LoadedJob, rank: RankBudget, time: PlannedTime | str) -> Iterator[StyledLine]:
    """(text, style): the position of the peak, each column's formula, then parameters and kept activations by block.

    `time` is the time of a step.
    """
    label, host = runs_label(runs_of(rank.ranks)), given.spec.host.kind
    yield "", ""
    yield f"details of {label}", "bold"
    for phase, text in rank.peak_places.items():
        mark = "*" if phase is rank.peak_phase else " "
        yield from _plain(wrap(f"{mark} {phase}: {format_bytes(rank.phases[phase])}, {text}", indent="    "))
    for column, num_bytes in rank.columns.items():
        yield "", ""
        yield f"{column}: {num_bytes:,} bytes ({format_bytes(num_bytes)})", "bold"
        holds = column_lines(column) if host.trained else wrap(host.holds[column], width=76)
        yield from _plain(f"  {line}" for line in holds)
    slots = given.layout.of_rank(rank.coordinate["pp"]) if host.carries_values else ()
    received = [f"  slot {slot.index} {text}" for slot in slots if (text := received_text(given.spec, slot.start))]
    if received:
        yield "", ""
        yield "values of earlier layers that stages pass on", "bold"
        for line in received:
            yield from _plain(wrap(line, indent="    "))
    yield from _steps(given, rank, time)
    found: Explained = host.explain(given.spec, given.inventory, given.layout, rank.coordinate["pp"])
    yield "", ""
    yield "parameters of each block on this rank, before state sharding", "bold"
    for title, block in found.held:
        yield f"  {title}", ""
        yield from _parameters(given, block)
    yield "", ""
    yield "saved for backward by each block, per microbatch in flight", "bold"
    texts = [index for index, head in enumerate(found.heads) if head != "bytes"]
    for title, num_bytes, tensors in found.kept:
        yield f"  {title}: {format_bytes(num_bytes)}", ""
        if tensors:
            yield from _plain(table([found.heads, *tensors], left=texts, indent="    "))


def _steps(given: LoadedJob, rank: RankBudget, time: PlannedTime | str) -> Iterator[StyledLine]:
    """Lines that say if megarun runs the microbatches of a step eagerly or as CUDA graphs, and the time that pairs in turns hide."""
    spec = given.spec
    if not spec.host.kind.trained:
        return
    yield "", ""
    texts = library_texts(spec, given.inventory)
    if texts:
        yield "libraries (host.libraries)", "bold"
        for text in texts.values():
            yield from _plain(wrap(f"  {text}", indent="    "))
        yield "", ""
    for heading, lines in (
        ("layers with their own dtype (precision.families)", plain_texts(spec, given.inventory)),
        ("gathered weights (precision.recipe.param_gather)", gather_texts(spec, given.inventory)),
    ):
        if lines:
            yield heading, "bold"
            for text in lines:
                yield from _plain(wrap(f"  {text}", indent="    "))
            yield "", ""
    if not isinstance(time, str) and time.turns is not None:
        yield "pairs in turns (host.moe_overlap)", "bold"
        yield from _plain(wrap(f"  {turns_text(time)}", indent="    "))
        yield "", ""
    yield "steps", "bold"
    reason = why_eager(spec)
    if reason is not None:
        yield from _plain(wrap(f"  eager, without CUDA graphs; {reason}", indent="    "))
        return
    inputs, update = format_bytes(graph_bytes(spec)), format_bytes(rank.cells[Phase.OPTIMIZER][Column.WORKSPACE])
    shares = "is in the pool, too" if replays_update(spec) else "is reserved in addition"
    text = (
        f"  CUDA graphs of {RECORDED[spec.host.graphs]} (host.cuda_graphs = {spec.host.graphs}), recorded after eager steps. Their"
        f" pool holds activations, gradients and copies of parameters, and serves nothing else: {inputs} of inputs are in it again,"
        f" gradients stay until the next step, and the optimizer's workspace, {update}, {shares} (modelled)"
    )
    yield from _plain(wrap(text, indent="    "))


def _parameters(given: LoadedJob, block: Block) -> Iterator[StyledLine]:
    mesh = given.spec.mesh
    rows = [("tensor", "shape", "elements", "column", "group")]
    for tensor in block.tensors:
        shape = tensor.local_shape(mesh.tp, mesh.ep, mesh.etp)
        sizes = f"[{', '.join(map(str, shape))}]", f"{prod(shape):,}"
        rows.append((tensor.name, *sizes, str(OWNER_COLUMNS[tensor.owner]), str(tensor.group)))
    yield from _plain(table(rows, left=(0, 1, 3, 4), indent="    "))


def _plain(lines: Iterator[str] | Sequence[str]) -> Iterator[StyledLine]:
    return ((line, "") for line in lines)
