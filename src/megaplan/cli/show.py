"""`megaplan show`: a plan as readable text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from megaplan.cli.options import AsJson, Overrides, PlanFile
from megaplan.terminal import output
from megaplan.terminal.output import StyledLine

if TYPE_CHECKING:
    from megaplan.plan.document import PlanDocument


def show(
    plan: PlanFile,
    *,
    svg: Annotated[
        str | None, typer.Option("--svg", metavar="FILE", help="Write the timeline with memory over time as SVG; - for stdout.")
    ] = None,
    all_ranks: Annotated[bool, typer.Option("--all-ranks", help="Show every distinct rank.")] = False,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> int:
    """Show a plan: stages and owners, the schedule's timeline, and every rank's budget."""
    from megaplan.plan.read import inspect_plan  # noqa: PLC0415

    loaded = inspect_plan(plan)
    if loaded.tampered:
        from megaplan.errors import MegaplanError  # noqa: PLC0415

        raise MegaplanError(loaded.tampered)
    shown = loaded.plan
    warnings = list(loaded.warnings)
    if overrides:
        from megaplan.plan.vary import vary_plan  # noqa: PLC0415

        shown, found = vary_plan(loaded.plan, plan, overrides)
        warnings += found
    if svg is not None:
        from megaplan.cli.files import STDOUT, write_picture  # noqa: PLC0415
        from megaplan.plan.timeline_svg import timeline_svg  # noqa: PLC0415

        write_picture(svg, timeline_svg(shown.spec, shown.spans))
        if svg == STDOUT:
            output.report(warnings)
            return 0
    if as_json:
        output.write_json(shown.to_dict())
    else:
        output.write_styled(_lines(shown, all_ranks=all_ranks))
        output.report(warnings)
    return 0


def _lines(plan: PlanDocument, *, all_ranks: bool) -> Iterator[StyledLine]:
    from megaplan.cli.header import header_lines  # noqa: PLC0415
    from megaplan.cli.ranks_text import rank_table, view_of_estimate  # noqa: PLC0415
    from megaplan.cli.stages_text import certificate_line, stage_lines  # noqa: PLC0415
    from megaplan.cli.time_text import time_lines  # noqa: PLC0415
    from megaplan.cli.timeline import timeline_lines  # noqa: PLC0415
    from megaplan.layout.step_time import planned_time  # noqa: PLC0415
    from megaplan.terminal.table import wrap  # noqa: PLC0415

    estimates, decided = plan.estimates, plan.decisions
    totals = estimates.totals
    yield from header_lines(plan.spec, decided.pattern.expanded, totals.parameters, totals.active_parameters)
    if plan.overrides:
        yield f"with {', '.join(plan.overrides)}", ""
    certificate = wrap(certificate_line(decided.split.certificate, decided.split.mode), indent="  ")
    yield from _section("stages", [*certificate, "", *stage_lines(plan)])
    if decided.split.reason:
        yield from ((line, "") for line in wrap(f"reason: {decided.split.reason}", indent="  "))
    if decided.split.protects:
        yield from ((line, "") for line in wrap(f"protects: {', '.join(decided.split.protects)}", indent="  "))
    yield from _section(
        f"timeline: {decided.schedule.kind}, {decided.schedule.num_microbatches} microbatches", timeline_lines(plan.spec, plan.spans)
    )
    yield from _section(
        "order",
        [
            f"build: {' → '.join(decided.code_order)}",
            f"{'groups' if plan.spec.sharding.copies else 'fully_shard'}: {' → '.join(decided.wrap_order)}",
        ],
    )
    verdict = plan.verdict if estimates.fits else "DOES NOT FIT"
    views = [view_of_estimate(rank) for rank in estimates.ranks]
    devices = dict.fromkeys(device.name for device in (estimates.device, *estimates.device.pools))
    yield from _section(f"memory on {' and '.join(devices)}: {verdict}", rank_table(views, all_ranks=all_ranks))
    yield from _section("time", list(time_lines(planned_time(plan.spec, plan.spans, plan.inventory))))
    yield from _section("digests", [f"plan   {plan.digests.plan}", f"model  {plan.digests.model}"])


def _section(title: str, lines: Iterator[str] | list[str]) -> Iterator[StyledLine]:
    yield "", ""
    yield title, "bold"
    yield from ((line, "") for line in lines)
