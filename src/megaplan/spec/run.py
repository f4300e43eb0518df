"""The section `run`: a whole training run, for `megaplan run`; outside the plan's digest. Values may be texts with units."""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from megaplan.scalars import OptionsSection
from megaplan.units import parse_bandwidth, parse_count, parse_kilowatts, parse_seconds

HOUR = 3600.0
LONGEST_SECONDS = 1e9
SHORTEST_SECONDS = 1e-6
MOST_SPARES = 10_000


def _read(value: Any, parse: Callable[[str], float]) -> Any:
    """The number of a text with a unit; other values are checked unchanged."""
    if not isinstance(value, str):
        return int(value) if parse in (parse_count, parse_bandwidth) and isinstance(value, float) and value.is_integer() else value
    try:
        return parse(value)
    except ValueError as error:
        raise PydanticCustomError("quantity", "{reason}", {"reason": str(error)}) from None


def _as_hours(text: str) -> float:
    return parse_seconds(text, HOUR) / HOUR


def written(kind: str, unit: str, example: str) -> Any:
    """The JSON Schema of a number in `unit`, or a text with a unit."""
    return WithJsonSchema({"anyOf": [{"type": kind, "exclusiveMinimum": 0}, {"type": "string"}], "examples": [example], "$comment": unit})


def quantity(parse: Callable[[str], float]) -> Any:
    """The validator that reads a text with a unit by `parse`."""
    return BeforeValidator(partial(_read, parse=parse))


Tokens = Annotated[int, quantity(parse_count), Field(gt=0, le=10**18, strict=True), written("integer", "tokens", "2T")]
Hours = Annotated[float, quantity(_as_hours), Field(gt=0, le=1e9, allow_inf_nan=False, strict=True), written("number", "h", "30000h")]
Seconds = Annotated[
    float,
    quantity(parse_seconds),
    Field(ge=SHORTEST_SECONDS, le=LONGEST_SECONDS, allow_inf_nan=False, strict=True),
    written("number", "s", "30min"),
]
Kilowatts = Annotated[
    float, quantity(parse_kilowatts), Field(gt=0, le=100, allow_inf_nan=False, strict=True), written("number", "kW", "0.7kW")
]
BytesPerSecond = Annotated[int, quantity(parse_bandwidth), Field(gt=0, le=10**16, strict=True), written("integer", "B/s", "10GB/s")]
StorageClass = Literal["local", "parallel", "s3"]
Price = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False, strict=True)]
Overhead = Annotated[float, Field(ge=1, le=10, allow_inf_nan=False, strict=True)]
Intensity = Annotated[float, Field(ge=0, le=10, allow_inf_nan=False, strict=True)]
SpareCount = Annotated[int, Field(ge=0, le=MOST_SPARES, strict=True)]
Rate = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False, strict=True)]
StepCount = Annotated[int, Field(ge=1, le=10**12, strict=True)]
HangShare = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False, strict=True)]


class Run(OptionsSection):
    """A whole training run. Keys that are not given have the value of a published or measured figure, which `megaplan run` names.

    Attributes:
        tokens: Tokens of the run; null for training.steps.
        mtbf: Mean time between interruptions of one device, in hours.
        price: Price of a device for an hour; null to state no cost.
        power: Power of one device in kilowatts; null for the device's board power.
        pue: Power usage effectiveness: power of the data centre over that of the devices.
        carbon: Carbon dioxide in kilograms for a kilowatt-hour.
        step: Measured seconds of a step; null for the modelled step.
        storage: Storage of the checkpoints: disks of each node, a parallel file system, or an object store.
        node_bandwidth: Bytes per second that one node writes to the storage and reads from it.
        total_bandwidth: Bytes per second of the storage in total.
        save: Training waits for the copy to host memory, or for the complete write; `memory` keeps every step's state in two nodes.
        interval: Seconds between saves; null for the interval with the best goodput.
        detection: Seconds from an interruption until the job has ended.
        restart: Seconds to start the processes and connect them.
        replacement: Seconds until the scheduler has replaced a broken node.
        repair: Seconds until a broken node is a spare again.
        spares: Spare nodes that replace broken ones.
        hangs: Share of interruptions that are hangs, which a time limit detects.
        eval_every: Steps between two evaluations, which training waits for; null for none.
        eval_tokens: Tokens of an evaluation; null for a step's.
        ramp_tokens: Tokens over which the batch grows to its size; null for none.
        ramp_from: Tokens of the first step's batch; null for one microbatch of each rank.
        sustained: Mean rate of the run's steps relative to the single step; null: as fitted; 1 if `step` is a long run's mean.
    """

    options: ClassVar[frozenset[str]] = frozenset({
        "tokens", "mtbf", "price", "power", "pue", "carbon", "step", "storage", "node_bandwidth", "total_bandwidth", "save", "interval",
        "detection", "restart", "replacement", "repair", "spares", "hangs",
        "eval_every", "eval_tokens", "ramp_tokens", "ramp_from", "sustained",
    })  # fmt: skip

    tokens: Tokens | None = None
    mtbf: Hours | None = None
    price: Price | None = None
    power: Kilowatts | None = None
    pue: Overhead | None = None
    carbon: Intensity | None = None
    step: Seconds | None = None
    storage: StorageClass = "parallel"
    node_bandwidth: BytesPerSecond | None = None
    total_bandwidth: BytesPerSecond | None = None
    save: Literal["async", "sync", "memory"] = "async"
    interval: Seconds | None = None
    detection: Seconds | None = None
    restart: Seconds | None = None
    replacement: Seconds | None = None
    repair: Seconds | None = None
    spares: SpareCount = 0
    hangs: HangShare | None = None
    eval_every: StepCount | None = None
    eval_tokens: Tokens | None = None
    ramp_tokens: Tokens | None = None
    ramp_from: Tokens | None = None
    sustained: Rate | None = None
