"""Launch options of kernels that were measured on a device, in place of their defaults: files `tuned/<device>.json` of this package.

A kernel's default options follow from counts and hold on every device: warps, stages, and no limit of registers (`maxnreg`). `make gpu
ONLY=tune` times the candidates below on a device, and writes the options that are faster to a file. Warps may change the order of sums
inside a kernel, and therefore the last bits of its results; stages and registers do not. Everything that runs on one device uses one file,
so results stay repeatable there.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

FORMAT = "megakernels.tuned/1"
FOLDER = Path(__file__).parents[1] / "tuned"
Options = dict[str, int]


def _each(warps: tuple[int, ...], stages: tuple[int, ...] = ()) -> tuple[Options, ...]:
    if not stages:
        return tuple({"num_warps": each} for each in warps)
    return tuple({"num_warps": each, "num_stages": stage} for each in warps for stage in stages)


def _capped(*stages: int) -> tuple[Options, ...]:
    """Four warps with fewer registers a thread: three or four programs on a multiprocessor in place of two."""
    return tuple({"num_warps": 4, "num_stages": each, "maxnreg": most} for each in stages for most in (168, 128))


CANDIDATES: Mapping[str, tuple[Options, ...]] = {
    "attention_query_kernel": _each((4, 8), (2, 3)),
    "attention_key_kernel": _each((4, 8), (2, 3)),
    **dict.fromkeys(("mamba3_table_kernel", "mamba3_turn_kernel", "mamba3_angle_kernel"), _each((2, 4, 8))),
    **dict.fromkeys(("mamba3_phase_gradient_kernel", "mamba3_step_gradient_kernel"), _each((2, 4, 8))),
    **dict.fromkeys(("mamba3_state_kernel", "mamba3_state_gradient_kernel"), _each((4,), (1, 2, 3)) + _capped(1, 3)),
    **dict.fromkeys(("mamba3_output_kernel", "mamba3_pair_kernel", "mamba3_value_kernel"), _each((4,), (1, 3)) + _capped(1)),
    **dict.fromkeys(("m2rnn_recompute_kernel", "m2rnn_walk_kernel"), _each((1, 2, 4))),
    "m2rnn_gradient_kernel": (*_each((2, 4), (1, 2)), *_capped(1), {"num_warps": 4, "num_stages": 2, "maxnreg": 128}),
    "mamba3_group_kernel": (*_each((4, 8, 16)), {"num_warps": 8, "maxnreg": 128}, {"num_warps": 16, "maxnreg": 64}),
    **dict.fromkeys(("ssd_chunk_kernel", "ssd_state_kernel"), _each((4,), (1, 2, 3)) + _capped(1, 3)),
    **dict.fromkeys(("ssd_pair_kernel", "ssd_value_kernel"), _each((4,), (1, 2, 3)) + _capped(1, 3)),
    **dict.fromkeys(("ssd_output_kernel", "ssd_edge_kernel", "ssd_group_kernel"), _each((4,), (1, 2, 3)) + _capped(1)),
}
"""Options to measure, by kernel; a kernel without an entry runs with its defaults on every device."""


class Tuned(NamedTuple):
    """A file of measured options.

    Attributes:
        name: Name of the file without its ending: the device.
        about: Device, versions and date of the measurement.
        kernels: Compile-time constants under which options apply, with these options, by kernel.
    """

    name: str
    about: Mapping[str, Any]
    kernels: Mapping[str, tuple[tuple[frozenset[tuple[str, Any]], Options], ...]]


Choice = Callable[[str, frozenset[tuple[str, Any]], Options], Options | None]
"""Function of a kernel, its constants and its default options that gives other options, or None."""
_forced: list[Choice] = []


@contextmanager
def forced(choice: Choice) -> Iterator[None]:
    """Context in which launches have the options that `choice` returns for a kernel, its constants and its default; None leaves them."""
    _forced.append(choice)
    try:
        yield
    finally:
        _forced.remove(choice)


def launch_options(kernel: str, default: Mapping[str, int], constants: Mapping[str, Any], device: torch.device) -> Options:
    """Options of a launch: as measured on the device for these constants, else the default.

    Args:
        kernel: Name of the kernel's function.
        default: Warps and stages that follow from counts.
        constants: Compile-time constants of the launch.
        device: Device of the operands; on a CPU, where Triton's interpreter runs, options have no effect.
    """
    key = frozenset(constants.items())
    for choice in reversed(_forced):
        found = choice(kernel, key, dict(default))
        if found is not None:
            return {**default, **found}
    if device.type == "cpu":
        return dict(default)
    properties = torch.cuda.get_device_properties(device)
    measured = tuned(getattr(properties, "name", ""), (properties.major, properties.minor))
    return {**default, **measured_options(measured, kernel, key)}


def with_options(kernel: str, default: Mapping[str, int], constants: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Compile-time constants of a launch and its options; the arguments are those of `launch_options`."""
    return {**constants, **launch_options(kernel, default, constants, device)}


def measured_options(measured: Tuned | None, kernel: str, constants: frozenset[tuple[str, Any]]) -> Options:
    """Options of a file for a kernel with these constants; none if they were not measured, or the default is the fastest."""
    entries = () if measured is None else measured.kernels.get(kernel, ())
    return next((dict(options) for when, options in entries if when <= constants), {})


@cache
def tuned(name: str, capability: tuple[int, int]) -> Tuned | None:
    """The file of a device, by a word of its name; a device without its own file gets one of its compute capability."""
    found = [_read(path) for path in sorted(FOLDER.glob("*.json"))]
    words = re.split(r"[^a-z0-9]+", name.lower())
    own = next((each for each in found if each.name in words), None)
    return own or next((each for each in found if tuple(each.about["capability"]) == capability), None)


def _read(path: Path) -> Tuned:
    document = json.loads(path.read_text(encoding="utf-8"))
    if document["format"] != FORMAT:
        raise ValueError(f"{path} has the format {document['format']!r}, not {FORMAT!r}: write it again with `make gpu ONLY=tune`")
    kernels: dict[str, list[tuple[frozenset[tuple[str, Any]], Options]]] = {}
    for row in document["kernels"]:
        kernels.setdefault(row["kernel"], []).append((frozenset(row["when"].items()), dict(row["options"])))
    about = {key: value for key, value in document.items() if key not in ("format", "kernels")}
    return Tuned(path.stem, about, {kernel: tuple(rows) for kernel, rows in kernels.items()})
