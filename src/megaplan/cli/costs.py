"""`megaplan costs`: the modelled time of every layer, as a costs file to fill with measurements."""

from typing import Annotated

import typer

from megaplan.cli.files import STDOUT, write_new
from megaplan.cli.options import Overrides, SpecFile
from megaplan.terminal import output


def costs(
    spec: SpecFile,
    *,
    target: Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="Output file; - for stdout.")] = STDOUT,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    overrides: Overrides = None,
) -> int:
    """Print the modelled time of every layer as a costs file; replace what you measure, and pass it to split --costs."""
    from megaplan.api.load import load_to_split  # noqa: PLC0415  (help needs no model)
    from megaplan.cost.file import costs_document  # noqa: PLC0415
    from megaplan.cost.times import model_times  # noqa: PLC0415
    from megaplan.errors import MegaplanError  # noqa: PLC0415
    from megaplan.partition.choose import costs_of_pools  # noqa: PLC0415
    from megaplan.plan.canonical import dumps, normalise  # noqa: PLC0415

    job = load_to_split(spec, overrides or (), None)
    if job.spec.pools:
        raise MegaplanError([costs_of_pools()])
    document = costs_document(model_times(job.spec, job.inventory))
    write_new(target, dumps(normalise(document)), force=force)
    if target != STDOUT:
        output.write(f"wrote {target}: {len(document['layers'])} layers and both edges, in nanoseconds per microbatch on one rank\n")
    output.report(job.read_diagnostics)
    return 0
