"""`megaplan report`: a spec's or a plan's estimate as one HTML page."""

from __future__ import annotations

from typing import Annotated

import typer

from megaplan.cli.options import CostsFile, Overrides, SpecOrPlan
from megaplan.terminal import output


def report(
    subject: SpecOrPlan,
    *,
    target: Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="Output file; - for stdout.")] = "report.html",
    costs: CostsFile = None,
    overrides: Overrides = None,
) -> int:
    """Write one HTML page: memory by rank and over time, timeline, layers and cuts. It needs no network."""
    from megaplan.api.estimate import estimate  # noqa: PLC0415  (a help text needs no model)
    from megaplan.api.load import load  # noqa: PLC0415
    from megaplan.cli.estimate_json import estimate_document  # noqa: PLC0415
    from megaplan.cli.files import STDOUT, write_page  # noqa: PLC0415
    from megaplan.report.document import report_document  # noqa: PLC0415
    from megaplan.report.page import report_html  # noqa: PLC0415

    found = estimate(load(subject, *(overrides or ()), costs=costs))
    write_page(target, report_html(report_document(found, estimate_document(found, found.ranks))))
    if target != STDOUT:
        output.write(f"wrote {target}\n")
    output.report(found.diagnostics)
    return 0
