"""`megaplan report`: a spec's or a plan's estimate, two plans, or the result of a search, as one HTML page."""

import os
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from megaplan.cli.options import CostsFile, Overrides, SpecOrPlan
from megaplan.terminal import output


def report(
    subject: SpecOrPlan,
    other: Annotated[str | None, typer.Argument(metavar="[B]", help="A second plan, which the page compares with the first.")] = None,
    *,
    target: Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="Output file; - for stdout.")] = "report.html",
    tokens: Annotated[str | None, typer.Option("--tokens", metavar="N", help="Tokens of the run, for its days and cost: 2T, 300B.")] = None,
    price: Annotated[str | None, typer.Option("--price", metavar="N", help="Price of a device for an hour.")] = None,
    costs: CostsFile = None,
    overrides: Overrides = None,
) -> int:
    """Write one HTML page: memory by rank and over time, timeline, layers, cuts; of two plans their difference, of a search its layouts."""
    from megaplan.api.estimate import estimate  # noqa: PLC0415  (a help text needs no model)
    from megaplan.api.estimate_json import estimate_document  # noqa: PLC0415
    from megaplan.api.load import load  # noqa: PLC0415
    from megaplan.cli.files import STDOUT, write_page  # noqa: PLC0415
    from megaplan.diagnostics import refuse  # noqa: PLC0415
    from megaplan.report.document import report_document  # noqa: PLC0415
    from megaplan.report.page import report_html  # noqa: PLC0415

    def written(document: Mapping[str, Any]) -> None:
        write_page(target, report_html(document))
        if target != STDOUT:
            output.write(f"wrote {target}\n")

    given = any(value is not None for value in (tokens, price, costs)) or bool(overrides)
    if other is not None:
        from megaplan.api.plans import diff  # noqa: PLC0415
        from megaplan.report.comparison import comparison_report  # noqa: PLC0415

        if given:
            raise refuse("MP492", f"{subject} and {other} are compared unchanged, with no option except --output", file=subject)
        compared = diff(subject, other)
        written(comparison_report(compared, subject, other))
        output.report(compared.diagnostics)
        return 0
    if (result := _search_result(subject)) is not None:
        from megaplan.report.search import search_report  # noqa: PLC0415

        if given:
            raise refuse("MP492", f"{subject} is the result of a search, which takes no option except --output", file=subject)
        written(search_report(result, subject))
        return 0
    found = estimate(load(subject, *(overrides or ()), *_run_keys(tokens, price), costs=costs))
    written(report_document(found, estimate_document(found, found.ranks)))
    output.report(found.diagnostics)
    return 0


def _run_keys(tokens: str | None, price: str | None) -> list[str]:
    """Changes of the section `run`; the price is the project's if a run is given without one."""
    from megaplan.spec.settings import find_settings  # noqa: PLC0415

    if tokens is not None and price is None and (known := find_settings().price) is not None:
        price = str(known)
    return [f"run.{key}={value}" for key, value in (("tokens", tokens), ("price", price)) if value is not None]


def _search_result(subject: str) -> str | None:
    """The text of a search's result; None of every other file, which loading then reads and judges."""
    from pathlib import Path  # noqa: PLC0415

    from megaplan.report.search import MAX_BYTES, is_search  # noqa: PLC0415

    path = Path(subject)
    if path.suffix != ".json" or not os.path.isfile(path) or path.stat().st_size > MAX_BYTES:
        return None
    text = path.read_text(encoding="utf-8", errors="replace")
    return text if is_search(text) else None
