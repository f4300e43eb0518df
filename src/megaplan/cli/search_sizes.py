"""Searches on several numbers of devices, or on several devices, compared in one table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from megaplan.cli.search_text import billion_tokens, layout_text
from megaplan.cli.time_text import LAUNCHES
from megaplan.devices import named_device
from megaplan.diagnostics import refuse
from megaplan.terminal.output import StyledLine
from megaplan.terminal.table import table, wrap
from megaplan.units import format_gib, format_ns

if TYPE_CHECKING:
    from megaplan.api.search import Search
    from megaplan.errors import Diagnostic

FORMAT = "megaplan.searches/1"
MEGATRON = (
    "{name: megatron, model: MODEL, attention_mask: false, hidden_dropout: 0.0, attention_dropout: 0.0, moe_grouped_gemm: true, "
    "moe_dispatcher: alltoall}"
)
"""Settings of a launch of Megatron-Core for a model of another host: no dropout, no mask, experts in one GEMM, tokens by all-to-all."""


class Size(NamedTuple):
    """A number of devices and a device.

    Attributes:
        devices: Number of devices; None for the spec's.
        changes: The change of the spec that names the device.
        price: Price of a device hour; None if not given.
    """

    devices: int | None
    changes: tuple[str, ...]
    price: float | None


def sizes_of(devices: str | None, names: str | None, prices: str | None) -> list[Size]:
    """Every number of devices with every device, in the order given.

    Raises:
        MegaplanError: MP489: a text is neither a number nor a list of numbers; MP504, a device is unknown.
    """
    numbers = [_number(text) for text in devices.split(",")] if devices is not None else [None]
    known = [named_device(text, "--device ") for text in names.split(",")] if names is not None else [None]
    cost = _prices(prices)
    found = []
    for name in known:
        changes = () if name is None else (f"device.name={name}",)
        price = cost.get(name or "", cost.get(""))
        found += [Size(number, changes, price) for number in numbers]
    return found


def _number(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise refuse("MP489", f"--devices {text.strip()!r} is not a number of devices", "--devices 8", "--devices 32,64,128")
    return int(text)


def _prices(text: str | None) -> dict[str, float]:
    """Prices by device; the price under the empty name applies to all devices."""
    from pydantic import TypeAdapter  # noqa: PLC0415

    from megaplan.spec.run import Price  # noqa: PLC0415

    found, as_price = dict[str, float](), TypeAdapter(Price)
    for part in text.split(",") if text is not None else ():
        name, _, value = part.rpartition("=")
        try:
            found[named_device(name, "--price ") if name else ""] = as_price.validate_python(float(value))
        except ValueError:
            raise refuse(
                "MP489", f"--price {part.strip()!r} is not a price of a device hour", "--price 2.5", "--price h100=2.5,b200=4"
            ) from None
    return found


def batch_of_sizes(
    source: str, changes: Sequence[str], sizes: Sequence[Size], given: int | None
) -> tuple[int | None, tuple[Diagnostic, ...]]:
    """The global batch of every size; if a model's config does not state it, the batch for the most devices. Also the notes of reading.

    Raises:
        MegaplanError: Errors of `megaplan.load`; MP495, the batch is larger than a search takes.
    """
    from megaplan.api.batch import open_batch  # noqa: PLC0415
    from megaplan.api.load import load_to_split  # noqa: PLC0415

    job = load_to_split(source, (*changes, *sizes[0].changes), None)
    return open_batch(job, max(size.devices or job.spec.mesh.world_size for size in sizes), given)


def with_host(source: str, overrides: Sequence[str], host: str | None) -> tuple[str, ...]:
    """Changes, followed by those that move the spec to another host with the same model and global batch.

    The search decides mesh, schedule, recompute and cuts; changes of them only decide the global batch.

    Raises:
        MegaplanError: MP489, the host is unknown.
    """
    if host is None:
        return tuple(overrides)
    from megaplan.api.load import load_to_split  # noqa: PLC0415
    from megaplan.hosts.registry import HOSTS  # noqa: PLC0415

    if host not in HOSTS:
        raise refuse("MP489", f"--host {host}: hosts are {', '.join(HOSTS)}", *(f"--host {name}" for name in HOSTS))
    spec = load_to_split(source, overrides, None).spec
    if spec.host.kind is HOSTS[host]:
        return tuple(overrides)
    letters = spec.model.pattern
    model = "gpt" if set(letters[1::2]) <= set("DE") and set(letters[::2]) == {"A"} else "hybrid"
    section = MEGATRON.replace("MODEL", model) if host == "megatron" else f"{{name: {host}}}"
    count = spec.global_batch_size // spec.batch.micro_batch_size
    sections = {
        **{"host": section, "mesh": "{}", "recompute": "{}", "split": "{}", "sharding": "{reshard_after_forward: false}"},
        "schedule": f"{{kind: 1f1b, num_microbatches: {count}}}",
    }
    kept = [text for text in overrides if text.partition("=")[0].partition(".")[0].strip().lower() not in sections]
    return (*kept, *(f"{name}={value}" for name, value in sections.items()))


def sizes_lines(sizes: Sequence[Size], results: Sequence[Search]) -> Iterator[StyledLine]:
    """A row for each size: its best layout; then the commands."""
    priced = any(size.price is not None for size in sizes)
    head = ("device", "number", "step", "tok/s/dev", "MFU", "peak GiB", *(("an hour", "1B tokens") if priced else ()), "gap", "layout")
    yield results[0].job.spec.name + f", {results[0].job.spec.global_batch_size:,} sequences per step", "bold"
    yield "", ""
    rows = [_row(size, found, priced=priced) for size, found in zip(sizes, results, strict=True)]
    yield from ((line, "") for line in table([head, *rows], left=(0, len(head) - 1)))
    yield "gap: the most by which the layout's step can be longer than the best one of its size", ""
    yield from ((line, "bold") for line in wrap(_bases(results), indent="  "))
    yield "", ""
    for found in results:
        if found.rows:
            yield found.command(found.rows[0]), ""
        elif (fewest := found.fewest) is not None:
            name = found.job.spec.device.name
            text = f"nothing fits on {found.devices} x {name}: {fewest.devices:,} are enough, of the numbers tried"
            yield from ((line, "bold") for line in wrap(text, indent="  "))


def _bases(results: Sequence[Search]) -> str:
    """Note that steps are not comparable, if only some of the devices have measured constants."""
    from megaplan.cost.rates import rates_of  # noqa: PLC0415

    specs = {found.job.spec.device.name: found.job.spec for found in results}
    measured = [name for name, spec in specs.items() if spec.host.kind.trained and rates_of(spec).measured is not None]
    if not 0 < len(measured) < len(specs):
        return ""
    return f"each step of {', '.join(measured)} {LAUNCHES}, the steps of other devices do not: compare sizes, not these devices"


def _row(size: Size, found: Search, *, priced: bool) -> tuple[str, ...]:
    name, number = found.job.spec.device.name, f"{found.devices:,}"
    if not found.rows:
        return (name, number, "-", "-", "-", "-", *(("-", "-") if priced else ()), "-", "nothing fits")
    row = found.rows[0]
    price = size.price
    costs = ("-", "-") if price is None else (f"{found.devices * price:,.2f}", f"{billion_tokens(row, price):,.2f}")
    figures = f"{row.tokens_per_second_per_device:,.0f}", f"{100 * row.mfu:.1f}%", format_gib(row.peak_bytes, 1)
    gap = "-" if found.gap is None else f"{100 * found.gap:.1f}%"
    return (name, number, format_ns(row.exact.step_ns), *figures, *(costs if priced else ()), gap, " ".join(layout_text(row)))


def sizes_document(sizes: Sequence[Size], results: Sequence[Search]) -> dict[str, Any]:
    """The JSON document: one search a size."""
    found = [
        {"device": result.job.spec.device.name, "price_per_device_hour": size.price, **result.to_dict()}
        for size, result in zip(sizes, results, strict=True)
    ]
    return {"format": FORMAT, "searches": found}
