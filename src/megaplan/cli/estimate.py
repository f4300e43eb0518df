"""`megaplan estimate`: the memory of every rank, worst first."""

from __future__ import annotations

from typing import Annotated

import typer

from megaplan.cli.options import AsJson, CostsFile, Overrides, SpecOrPlan
from megaplan.terminal import output

DOES_NOT_FIT = 1


def estimate(
    subject: SpecOrPlan,
    *,
    rank: Annotated[int | None, typer.Option("--rank", metavar="N", help="Show only the ranks that share rank N's budget.")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Print the formulas and the tensors of each number.")] = False,
    compare: Annotated[
        list[str] | None,
        typer.Option("--compare", metavar="KEY=VALUE", help="Compare with the estimate for this changed value; repeatable."),
    ] = None,
    costs: CostsFile = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> int:
    """Estimate the memory of every rank by category, and the time of a step. Exits 0 if all ranks fit, 1 if one does not."""
    from megaplan.budget.build import build_budget  # noqa: PLC0415  (help needs no model)
    from megaplan.budget.fit import fit_diagnostics  # noqa: PLC0415
    from megaplan.budget.padding import padding_diagnostics  # noqa: PLC0415
    from megaplan.budget.serving import serving_budget  # noqa: PLC0415
    from megaplan.budget.skew import routing_range  # noqa: PLC0415
    from megaplan.cli.inputs import load_again, load_subject  # noqa: PLC0415
    from megaplan.cli.problems import refuse  # noqa: PLC0415
    from megaplan.layout.step_time import planned_time  # noqa: PLC0415

    given = load_subject(subject, overrides or (), costs)
    world_size = given.spec.mesh.world_size
    if rank is not None and not 0 <= rank < world_size:
        raise refuse("MP485", f"--rank {rank}; the ranks are 0 to {world_size - 1}", f"--rank {max(0, min(rank, world_size - 1))}")
    other = load_again(subject, overrides or (), compare, costs) if compare else None
    budget, serving = build_budget(given.spec, given.inventory, given.layout), serving_budget(given.spec, given.inventory)
    routing = routing_range(given.spec, given.inventory, given.layout, budget)
    ranks = budget.ranks if rank is None else (budget.of_rank(rank),)
    subject_of = given.spec, given.inventory, given.layout
    found = [*given.diagnostics, *fit_diagnostics(*subject_of, budget), *padding_diagnostics(*subject_of, budget)]
    time = planned_time(given.spec, given.spans)
    compared = None if other is None else build_budget(other.spec, other.inventory, other.layout)
    if as_json:
        from megaplan.cli.estimate_json import estimate_document  # noqa: PLC0415

        document = estimate_document(budget, ranks, serving, found, routing, time)
        if compared is not None:
            from megaplan.cli.compare import compare_document  # noqa: PLC0415

            document["compared"] = compare_document(compared, compare or ())
        output.write_json(document)
    else:
        from megaplan.cli.estimate_text import estimate_lines  # noqa: PLC0415

        output.write_styled(estimate_lines(given, budget, ranks, serving, routing, time))
        if compared is not None:
            from megaplan.cli.compare import compare_lines  # noqa: PLC0415

            output.write_styled([("", ""), *((line, "") for line in compare_lines(budget, compared, compare or ()))])
        if explain:
            from megaplan.cli.explain_text import explain_lines  # noqa: PLC0415

            output.write_styled(explain_lines(given, ranks[0]))
        output.report(found)
    return 0 if budget.fits else DOES_NOT_FIT
