"""Stages of a plan as text: the rank, layers and owned blocks of each, and the quality of the cuts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING

from megaplan.inventory.towers import by_part
from megaplan.partition.values import amount
from megaplan.spec.local import boundary, local_dims
from megaplan.terminal.table import line_width, table, wrap
from megaplan.units import format_bytes
from megaplan.wording import series

if TYPE_CHECKING:
    from megaplan.partition.gain import Gain
    from megaplan.plan.document import CertificateRecord, PlanDocument
    from megaplan.spec.models import Spec


def short_letters(letters: str) -> str:
    """The letters with long runs abbreviated: `AEME`, `32M`."""
    runs = [(letter, len(list(group))) for letter, group in groupby(letters)]
    return "".join(letter * count if count < 4 else f" {count}{letter} " for letter, count in runs).strip()


def stage_lines(plan: PlanDocument) -> Iterator[str]:
    """One row per slot, then the blocks that each owns outside the layers; `*` marks a copy."""
    stages, costs = plan.decisions.stages, plan.decisions.split.certificate.costs
    parameters = {stage.slot: stage.parameters for stage in plan.estimates.stages}
    pools = plan.estimates.device.pools
    rows = [["slot", "pp", "chunk", "layers", "count", "parameters", "cost share"]]
    rows[0] += ["time", "device", "peak", "usable"] if pools else []
    total = sum(costs) or 1
    for stage, cost in zip(stages, costs * plan.spec.num_copies, strict=True):
        start, stop = stage.layers
        share = f"{100 * cost / total:.1f}%"
        rows.append(
            [
                str(stage.slot),
                str(stage.pp_rank),
                str(stage.chunk),
                f"{start}-{stop - 1}",
                str(stop - start),
                f"{parameters[stage.slot]:,}",
                share,
                *((amount(cost, "ns"), *_on_device(plan, stage.pp_rank)) if pools else ()),
            ]
        )
    yield from table(rows, left=())
    yield ""
    for stage in stages:
        owns = ", ".join(f"{name}*" if name in stage.copies else name for name in by_part(stage.owns))
        yield from wrap(f"slot {stage.slot}: {_broken(stage.letters)}{f'; owns {owns}' if owns else ''}", indent="  ")
    for stage in stages:
        if text := received_text(plan.spec, stage.layers[0]):
            yield from wrap(f"slot {stage.slot} {text}", indent="  ")
    if any(stage.copies for stage in stages):
        yield "* a copy of a block that another slot owns; their gradients are summed"


def received_text(spec: Spec, start: int) -> str:
    """The values that a stage which begins with a layer receives with the stream, `receives …`; empty without any."""
    sent = boundary(spec, local_dims(spec), start)
    if not sent.values:
        return ""
    by_source: dict[int, list[str]] = {}
    for part in sent.values:
        if part.value is not None:
            by_source.setdefault(part.value.source, []).append(part.value.title)
    values = series([f"{series(titles, 'and')} of layer {source}" for source, titles in by_source.items()], "and")
    own = sent.bytes - sent.stream.own_bytes
    return f"receives {values} with the stream: {format_bytes(own)} of {format_bytes(sent.bytes)} for each microbatch"


def _on_device(plan: PlanDocument, pp_rank: int) -> tuple[str, str, str]:
    """Name of a pipeline rank's device, the rank's largest peak, and the usable bytes."""
    first, stop = (plan.spec.mesh.world_size // plan.spec.mesh.pp * rank for rank in (pp_rank, pp_rank + 1))
    ranks = plan.estimates.ranks
    peak = max(rank.peak_bytes for rank in ranks if any(run[0] < stop and run[1] > first for run in rank.ranks))
    device = plan.estimates.device.of_rank(first)
    return device.name, format_bytes(peak), format_bytes(device.usable_bytes)


def certificate_line(certificate: CertificateRecord, mode: str) -> str:
    """`weighted split, optimal for bottleneck: largest slot 9.61 B FLOPs per token, lower bound 9.61 B, gap 0`."""
    value = amount(certificate.value, certificate.unit)
    bound, gap = (amount(number, certificate.unit, named=False) for number in (certificate.lower_bound, certificate.gap))
    quality = ", optimal" if certificate.optimal else ""
    share = f" ({100 * certificate.gap / max(certificate.lower_bound, 1):.1f}%)" if certificate.gap else ""
    what = "microbatches of a step" if certificate.measures == "step" else f"largest {certificate.measures}"
    return f"{mode} split{quality} for {certificate.objective}: {what} {value}, lower bound {bound}, gap {gap}{share}"


def gain_lines(gain: Gain) -> Iterator[str]:
    """The gain of the optimal cuts over those of a manual split, in cost, time and bytes."""
    (cost, least), (step, shorter), (peak, lower) = gain.bottleneck, gain.step_ns, gain.peak_bytes
    costs = f"{amount(cost, gain.unit)} → {amount(least, gain.unit)} ({_percent(cost, least)})"
    times = f"{amount(step, 'ns')} → {amount(shorter, 'ns')} ({_percent(step, shorter)})"
    memory = f"{format_bytes(peak)} → {format_bytes(lower)} ({lower - peak:+,} bytes)"
    cuts = ", ".join(map(str, gain.cuts)) or "none"
    text = f"optimal cuts under its constraints: {cuts}; largest cost {costs}; replayed step {times}; largest peak {memory}"
    yield from wrap(text, indent="  ")


def _percent(before: int, after: int) -> str:
    return f"{100 * (after - before) / (before or 1):+.1f}%"


def _broken(letters: str) -> str:
    """The letters with spaces where a line may break."""
    short = short_letters(letters)
    step = line_width() - 30
    return short if " " in short else " ".join(short[start : start + step] for start in range(0, len(short), step))
