"""`megaplan rl`: a post-training plan, its memory by phase, the time of an iteration, and a search over placements."""

from typing import Annotated

import typer

from megaplan.cli.options import AsJson, CostsFile, DeviceFile, Overrides, SpecOrPlan
from megaplan.diagnostics import refuse
from megaplan.terminal import output

DOES_NOT_FIT = 1


def rl(
    subject: SpecOrPlan,
    *,
    search: Annotated[bool, typer.Option("--search", help="Search placements, pools, meshes and the engine's degrees.")] = False,
    gpus: Annotated[int | None, typer.Option("--gpus", metavar="N", min=1, help="GPUs of a search; by default those of the spec.")] = None,
    top: Annotated[int, typer.Option("--top", metavar="N", min=1, max=100, help="Rows of a search.")] = 8,
    seconds: Annotated[float, typer.Option("--seconds", metavar="S", min=1, help="Time limit of a search.")] = 20.0,
    explain: Annotated[bool, typer.Option("--explain", help="Print the formula of every column.")] = False,
    figures: Annotated[bool, typer.Option("--figures", help="Print every figure with its basis and source.")] = False,
    costs: CostsFile = None,
    device_file: DeviceFile = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> int:
    """Estimate reinforcement learning: memory by phase, time of an iteration, idle devices. Exits 1 if it does not fit."""
    if gpus is not None and not search:
        raise refuse(
            "MP480",
            f"--gpus {gpus} is given without --search, but the plan's mesh decides the number of devices",
            f"--search --gpus {gpus}",
        )
    changes = tuple(overrides or ())
    if search:
        return _searched(subject, changes, gpus, top, seconds, as_json=as_json)
    from megaplan.api.rl import rl as rl_of  # noqa: PLC0415  (a help text needs no model)

    found = rl_of(subject, *changes, costs=costs, device_file=device_file)
    if as_json:
        output.write_json(found.to_dict())
    else:
        from megaplan.cli import rl_text  # noqa: PLC0415

        output.write_styled(rl_text.rl_lines(found))
        if explain:
            output.write_styled(rl_text.column_lines(found))
        if figures:
            output.write_styled(rl_text.figure_lines(found.figures))
    return 0 if found.fits else DOES_NOT_FIT


def _searched(subject: str, changes: tuple[str, ...], gpus: int | None, top: int, seconds: float, *, as_json: bool) -> int:
    from megaplan.api.rl_search import rl_search  # noqa: PLC0415

    found = rl_search(subject, *changes, gpus=gpus, top=top, seconds=seconds)
    if as_json:
        output.write_json(found.to_dict())
    else:
        from megaplan.cli.rl_text import search_lines  # noqa: PLC0415

        output.write_styled(search_lines(found))
    return 0 if found.rows else DOES_NOT_FIT
