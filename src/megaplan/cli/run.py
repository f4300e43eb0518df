"""`megaplan run`: a whole training run, from its tokens to days, cost, checkpoints and goodput."""

from typing import Annotated

import typer

from megaplan.cli.options import AsJson, CostsFile, DeviceFile, Overrides, SpecOrPlan
from megaplan.terminal import output

DOES_NOT_FIT = 1


def _key(name: str, metavar: str, text: str) -> typer.models.OptionInfo:
    found: typer.models.OptionInfo = typer.Option(f"--{name}", metavar=metavar, help=text)
    return found


def run(
    subject: SpecOrPlan,
    *,
    tokens: Annotated[str | None, _key("tokens", "N", "Tokens of the run: 2T, 300B; by default training.steps.")] = None,
    mtbf: Annotated[str | None, _key("mtbf", "TIME", "Mean time between interruptions of one device: 30000h.")] = None,
    price: Annotated[str | None, _key("price", "N", "Price of a device for an hour.")] = None,
    power: Annotated[str | None, _key("power", "POWER", "Power of one device: 0.7kW; by default that of its board.")] = None,
    pue: Annotated[str | None, _key("pue", "N", "Power of the data centre divided by that of the devices (PUE).")] = None,
    carbon: Annotated[str | None, _key("carbon", "N", "Kilograms of CO2 equivalent per kilowatt-hour.")] = None,
    step: Annotated[str | None, _key("step", "TIME", "A measured step, instead of the modelled one: 1.5s.")] = None,
    storage: Annotated[str | None, _key("storage", "CLASS", "Storage of the checkpoints: local, parallel or s3.")] = None,
    node_bandwidth: Annotated[str | None, _key("node-bandwidth", "RATE", "Bandwidth between one node and the storage: 5GB/s.")] = None,
    total_bandwidth: Annotated[str | None, _key("total-bandwidth", "RATE", "Rate of the whole storage.")] = None,
    save: Annotated[
        str | None,
        _key(
            "save",
            "HOW",
            "async: training waits for the copy to host memory; sync: it waits for the write; memory: two nodes keep copies in memory.",
        ),
    ] = None,
    interval: Annotated[str | None, _key("interval", "TIME", "Time between saves; by default the interval with the best goodput.")] = None,
    detection: Annotated[str | None, _key("detection", "TIME", "Time from an interruption to the end of the job.")] = None,
    restart: Annotated[str | None, _key("restart", "TIME", "Time to start the processes and connect them.")] = None,
    replacement: Annotated[
        str | None, _key("replacement", "TIME", "Time to replace a broken node and start, if there is no spare.")
    ] = None,
    repair: Annotated[str | None, _key("repair", "TIME", "Time to repair a broken node, which is then a spare.")] = None,
    spares: Annotated[str | None, _key("spares", "N", "Spare nodes.")] = None,
    hangs: Annotated[str | None, _key("hangs", "SHARE", "Share of interruptions that are hangs.")] = None,
    eval_every: Annotated[str | None, _key("eval-every", "STEPS", "Steps between two evaluations.")] = None,
    eval_tokens: Annotated[str | None, _key("eval-tokens", "N", "Tokens of an evaluation; by default those of a step.")] = None,
    ramp_tokens: Annotated[str | None, _key("ramp-tokens", "N", "Tokens over which the batch grows to its full size.")] = None,
    ramp_from: Annotated[
        str | None, _key("ramp-from", "N", "Tokens in the first step's batch; by default one microbatch per data rank.")
    ] = None,
    sustained: Annotated[
        str | None, _key("sustained", "SHARE", "Mean step rate of the run, relative to the rate of the planned step.")
    ] = None,
    figures: Annotated[bool, typer.Option("--figures", help="Print every figure with its basis and source.")] = False,
    costs: CostsFile = None,
    device_file: DeviceFile = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> int:
    """Estimate a whole run: days, cost, energy, checkpoints, the best interval of saves, and goodput. Exits 1 if a rank does not fit."""
    from megaplan.api.run import run as run_of  # noqa: PLC0415  (a help text needs no model)

    given = {
        "tokens": tokens, "mtbf": mtbf, "price": price, "power": power, "pue": pue, "carbon": carbon, "step": step, "storage": storage,
        "node_bandwidth": node_bandwidth, "total_bandwidth": total_bandwidth, "save": save, "interval": interval, "detection": detection,
        "restart": restart, "replacement": replacement, "repair": repair, "spares": spares, "hangs": hangs,
        "eval_every": eval_every, "eval_tokens": eval_tokens, "ramp_tokens": ramp_tokens, "ramp_from": ramp_from, "sustained": sustained,
    }  # fmt: skip
    named = [f"run.{key}={value}" for key, value in given.items() if value is not None]
    found = run_of(subject, *(overrides or ()), *named, costs=costs, device_file=device_file)
    if as_json:
        output.write_json(found.to_dict())
    else:
        from megaplan.cli.run_text import figure_lines, run_lines  # noqa: PLC0415

        output.write_styled(run_lines(found))
        if figures:
            output.write_styled(figure_lines(found.figures))
    return 0 if found.fits else DOES_NOT_FIT
