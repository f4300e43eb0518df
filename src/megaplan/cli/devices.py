"""`megaplan devices`: the devices of the data file, and every figure of a device with its basis and source."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from megaplan.cli.options import AsJson
from megaplan.terminal import output
from megaplan.terminal.output import StyledLine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from megaplan.devices import Device, Figure

FORMAT = "megaplan.device-list/1"


def devices(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="A device, to list its figures; default: a table of all.")] = None,
    *,
    as_json: AsJson = False,
) -> int:
    """List the devices that a spec can name, or the figures of one device with basis and source."""
    from megaplan.devices import canonical_name, device_names, load_device  # noqa: PLC0415

    found = [load_device(known) for known in (device_names() if name is None else [canonical_name(name)])]
    if as_json:
        output.write_json({"format": FORMAT, "devices": [_document(device) for device in found]})
    else:
        output.write_styled(_table(found) if name is None else _figures(found[0]))
    return 0


def figures_of(device: Device) -> Iterator[tuple[str, Figure, str]]:
    """(key as in a spec, figure, unit) of every figure that the data file has for a device."""
    yield "capacity", device.capacity, "bytes"
    yield from ((f"reserve.{item}", figure, "bytes") for item, figure in device.reserve)
    yield "gemm_workspace", device.gemm_workspace, "bytes"
    yield from ((f"peak_flops.{dtype}", figure, "FLOP/s") for dtype, figure in device.peak_flops.items())
    yield "memory_bytes_per_second", device.memory_bandwidth, "bytes/s"
    yield "node_bytes_per_second", device.node_bandwidth, "bytes/s"
    yield "network_bytes_per_second", device.network_bandwidth, "bytes/s"
    yield "host_bytes_per_second", device.host_bandwidth, "bytes/s"
    yield "domain", device.domain, "devices"
    if device.power is not None:
        yield "power_watts", device.power, "W"
    yield "num_sms", device.num_sms, "multiprocessors"
    yield from ((f"efficiency_percent.{part}", figure, "%") for part, figure in device.efficiency.items())
    yield "launch_ns", device.launch, "ns"
    yield "collective_latency_ns", device.collective_latency, "ns"
    yield "recurrence_step_ns", device.recurrence_step, "ns"


def reached(device: Device) -> Iterator[tuple[str, float, float, bool]]:
    """(dtype, share of its peak, spread of its logarithm, whether fitted to measured steps) of large products under load."""
    from megaplan.cost.step.constants import constants  # noqa: PLC0415
    from megaplan.cost.step.names import product_names  # noqa: PLC0415
    from megaplan.cost.step.predict import reached_share  # noqa: PLC0415
    from megaplan.cost.step.workload import Machine  # noqa: PLC0415

    peaks = {dtype: float(figure.value) for dtype, figure in device.peak_flops.items()}
    machine = Machine(device.name, device.generation, device.num_sms.value, peaks, 1.0, 1.0, 1.0, device.domain.value)
    needs = {"bf16": "bf16", "fp8": "fp8", "mxfp8": "fp8", "nvfp4": "fp4", "int8": "int8"}
    known = [dtype for dtype, peak in needs.items() if peak in peaks and constants().keys() >= set(product_names(machine, dtype))]
    yield from ((dtype, *reached_share(machine, dtype)) for dtype in known)


def _document(device: Device) -> dict[str, Any]:
    figures = {
        key: {"value": figure.value, "unit": unit, "basis": str(figure.basis), "source": figure.source}
        for key, figure, unit in figures_of(device)
    }
    shares = {
        dtype: {"value": share, "spread": spread, "basis": "fitted" if measured else "modelled"}
        for dtype, share, spread, measured in reached(device)
    }
    return {"name": device.name, "generation": device.generation, "note": device.note, "figures": figures, "reached": shares}


def _table(found: list[Device]) -> Iterator[StyledLine]:
    from megaplan.terminal.table import table  # noqa: PLC0415

    rows = [["device", "GiB", "usable", "bf16", "fp8", "fp4", "memory", "link", "domain", "adapter"]]
    for device in found:
        usable = device.capacity.value - sum(figure.value for _, figure in device.reserve)
        rows.append(
            [
                device.name,
                f"{device.capacity.value / 2**30:.2f}",
                f"{usable / 2**30:.2f}",
                *(_teraflops(device, dtype) for dtype in ("bf16", "fp8", "fp4")),
                f"{device.memory_bandwidth.value / 10**9:,.0f}",
                f"{device.node_bandwidth.value / 10**9:,.0f}",
                str(device.domain.value),
                f"{device.network_bandwidth.value / 10**9:g}",
            ]
        )
    yield from ((line, "bold" if not number else "") for number, line in enumerate(table(rows, gap=1)))
    yield "", ""
    yield "dense TFLOP/s; memory, link and adapter in GB/s, one direction", ""
    notes = {device.note for device in found if device.note}
    for note in sorted(notes):
        yield f"{note}: {', '.join(device.name for device in found if device.note == note)}", ""


def _teraflops(device: Device, dtype: str) -> str:
    return f"{device.peak_flops[dtype].value / 10**12:,.0f}" if dtype in device.peak_flops else "-"


def _figures(device: Device) -> Iterator[StyledLine]:
    from megaplan.terminal.table import wrap  # noqa: PLC0415

    yield f"{device.name}: {device.generation}" + (f", {device.note}" if device.note else ""), "bold"
    for key, figure, unit in figures_of(device):
        yield f"{key}: {figure.value:,} {unit}, {figure.basis}", ""
        yield from ((line, "") for line in wrap(f"  {figure.source}", indent="  "))
    for dtype, share, spread, measured in reached(device):
        basis = "fitted" if measured else "modelled"
        yield f"reached.{dtype}: {share:.3f} of the peak, {basis}, ± {100 * spread:.0f} %", ""
    yield "  reached: large matrix products under training load, used for the step time", ""
