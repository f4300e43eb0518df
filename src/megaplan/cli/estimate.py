"""`megaplan estimate`: the memory of every rank, worst first."""

from typing import Annotated

import typer

from megaplan.cli.options import (
    AsJson,
    CostsFile,
    DeviceFile,
    DeviceName,
    Fetch,
    GlobalBatch,
    Gpus,
    Overrides,
    SeqLength,
    SpecOrPlan,
)
from megaplan.terminal import output

DOES_NOT_FIT = 1


def estimate(
    subject: SpecOrPlan,
    *,
    gpus: Gpus = None,
    device: DeviceName = None,
    global_batch: GlobalBatch = None,
    seq: SeqLength = None,
    fetch: Fetch = False,
    rank: Annotated[int | None, typer.Option("--rank", metavar="N", help="Show only the ranks that share rank N's budget.")] = None,
    all_ranks: Annotated[bool, typer.Option("--all-ranks", help="Show every distinct rank.")] = False,
    advice: Annotated[bool, typer.Option("--advice", help="Show changes that make the step faster on the same number of GPUs.")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Print the formulas and the tensors of each number.")] = False,
    compare: Annotated[
        list[str] | None,
        typer.Option("--compare", metavar="KEY=VALUE", help="Compare with the estimate for this changed value; repeatable."),
    ] = None,
    costs: CostsFile = None,
    device_file: DeviceFile = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> int:
    """Estimate the memory of every rank by column, and the time of a step. Exits 0 if all ranks fit, 1 if one does not.

    megaplan estimate config.json --gpus 64 --device h100 --global-batch 512 --seq 4096

    megaplan estimate Qwen/Qwen3-8B --gpus 8 --fetch

    megaplan estimate spec.yaml --set mesh.tp=8
    """
    from megaplan.api.estimate import estimate as estimated  # noqa: PLC0415  (a help text needs no model)
    from megaplan.api.size import JobSize  # noqa: PLC0415
    from megaplan.cli.size import sized_job  # noqa: PLC0415
    from megaplan.diagnostics import refuse  # noqa: PLC0415
    from megaplan.spec.settings import find_settings  # noqa: PLC0415

    size = JobSize(gpus, device, global_batch, seq)
    settings = find_settings()
    job = sized_job(subject, overrides or (), size, settings, costs=costs, device_file=device_file, fetch=fetch)
    world_size = job.spec.mesh.world_size
    if rank is not None and not 0 <= rank < world_size:
        raise refuse("MP485", f"--rank {rank}, but the ranks are 0 to {world_size - 1}", f"--rank {max(0, min(rank, world_size - 1))}")
    found = estimated(job)
    ranks = found.ranks if rank is None else (found.of_rank(rank),)
    compared = estimated(job, *compare) if compare else None
    if as_json:
        from megaplan.api.estimate_json import estimate_document  # noqa: PLC0415

        document = estimate_document(found, ranks)
        if compared is not None:
            from megaplan.cli.compare import compare_document  # noqa: PLC0415

            document["compared"] = compare_document(compared, compare or ())
        if advice:
            document |= found.faster.to_dict()
        output.write_json(document)
    else:
        from megaplan.cli.estimate_text import estimate_lines  # noqa: PLC0415

        output.write_styled(estimate_lines(found, ranks, all_ranks=all_ranks, price=settings.price))
        if compared is not None:
            from megaplan.cli.compare import compare_lines  # noqa: PLC0415

            output.write_styled([("", ""), *((line, "") for line in compare_lines(found, compared, compare or ()))])
        if advice:
            from megaplan.cli.advice_text import advice_lines  # noqa: PLC0415

            output.write_styled([("", ""), *((line, "") for line in advice_lines(found))])
        if explain:
            from megaplan.cli.explain_text import explain_lines  # noqa: PLC0415

            output.write_styled(explain_lines(job, ranks[0], found.step_time))
        output.report(found.diagnostics)
    return 0 if found.fits else DOES_NOT_FIT
