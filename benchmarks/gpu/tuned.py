"""Launch options that a device prefers, from measured kernels: the file `kernels/megakernels/tuned/<device>.json` that launches read.

    python benchmarks/gpu/tuned.py benchmarks/results/h200-2026-11-27.json benchmarks/results/h200-2026-11-27c.json
    python benchmarks/gpu/tuned.py runs/gpu                                     from a run of `make gpu ONLY=tune`

The first writes the package's file from committed results; a kernel that a later file timed with the same constants counts there alone.

A row of a kernel has its compile-time constants, the time of its launches with its default options, and that with others. Rows of several
cases with equal constants count together. Options are adopted if they make these launches at least 4 % and 10 µs faster: timings of
kernels without a loop, which stages do not change, differ by about as much.
"""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("src", "kernels", "benchmarks")]

from gpu.results import lines_of, of_done_jobs  # noqa: E402

from megakernels._common.tuning import CANDIDATES, FOLDER, FORMAT  # noqa: E402

LEAST_GAIN = 0.04
"""Least gain of options that are adopted, as a share of the time with the default's."""
LEAST_GAIN_US = 10.0
"""Least gain in microseconds of one call of all cases."""
ABOUT = ("device", "capability", "torch", "triton", "driver", "date", "commit")
CHANGED = ("mamba3_state_kernel", "mamba3_state_gradient_kernel")
"""Kernels that have other programs since the committed results: they run with their defaults until they are timed again."""
UNMEASURED = {"ssd_edge_kernel": ("QUERIES", False)}
"""Forms of a kernel whose options are fixed, because of a defect of the compiler."""


class Choice(NamedTuple):
    """Options for one kernel under some constants.

    Attributes:
        kernel: Name of its function.
        when: Compile-time constants of its launches.
        options: Warps, and stages and the limit of registers where they count.
        before_us: Microseconds of its launches in all cases, with the default options.
        after_us: The same with these options.
        cases: The cases that were measured.
    """

    kernel: str
    when: Mapping[str, Any]
    options: Mapping[str, int]
    before_us: float
    after_us: float
    cases: tuple[str, ...]


def rows_of(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Device, versions and date, and the measured rows: of a committed file of results, or of the folder of a run."""
    if path.is_file():
        document = json.loads(path.read_text(encoding="utf-8"))
        return document | {"capability": document.get("capability", [9, 0])}, document["variants"]
    lines = list(lines_of([path]))
    about: dict[str, Any] = {"date": next((line["call"][:10] for line in lines if "call" in line), "")}
    for line in lines:
        about |= {key: line[key] for key in ABOUT if key in line}
    return about, [line for line in of_done_jobs(lines) if "others" in line]


def choices(rows: Iterable[Mapping[str, Any]]) -> Iterator[Choice]:
    """The options to adopt. A candidate whose results were wrong, or not the same twice, is none."""
    groups: dict[tuple[str, frozenset[tuple[str, Any]]], list[Mapping[str, Any]]] = {}
    for row in rows:
        form = UNMEASURED.get(row["kernel"])
        if row["kernel"] in CANDIDATES and row["kernel"] not in CHANGED and (form is None or form not in row["constants"].items()):
            groups.setdefault((row["kernel"], frozenset(row["constants"].items())), []).append(row)
    for (kernel, _), group in groups.items():
        tried = [{_options(each): float(each["us"]) for each in row["others"] if each.get("right", True)} for row in group]
        shared = {key for key in tried[0] if all(key in each for each in tried) and _is_candidate(kernel, dict(key))}
        before = sum(float(row["us"]) for row in group)
        if not shared:
            continue
        best = min(sorted(shared), key=lambda key: sum(each[key] for each in tried))
        after = sum(each[best] for each in tried)
        if after <= min((1 - LEAST_GAIN) * before, before - LEAST_GAIN_US):
            cases = tuple(dict.fromkeys(str(row["case"]) for row in group))
            yield Choice(kernel, dict(sorted(group[0]["constants"].items())), dict(best), round(before, 1), round(after, 1), cases)


def _options(row: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
    stages = () if row.get("stages") is None else (("num_stages", int(row["stages"])),)
    registers = () if row.get("registers") is None else (("maxnreg", int(row["registers"])),)
    return (("num_warps", int(row["warps"])), *stages, *registers)


def _is_candidate(kernel: str, options: Mapping[str, int]) -> bool:
    """True if the kernel's list has these options."""
    return any(options.items() == each.items() for each in CANDIDATES[kernel])


def document_of(about: Mapping[str, Any], rows: Iterable[Mapping[str, Any]], source: str) -> dict[str, Any]:
    """The file's document."""
    found: dict[str, Any] = {"format": FORMAT} | {key: about[key] for key in ABOUT if key in about} | {"results": source}
    found["kernels"] = [
        {
            "kernel": each.kernel,
            "when": dict(each.when),
            "options": dict(each.options),
            "us": [each.before_us, each.after_us],
            "cases": list(each.cases),
        }
        for each in choices(rows)
    ]
    return found


def text_of(document: Mapping[str, Any]) -> str:
    """The file, a line for each kernel."""
    head = "".join(f"  {json.dumps(key)}: {json.dumps(value)},\n" for key, value in document.items() if key != "kernels")
    lines = ",\n".join(f"    {json.dumps(row)}" for row in document["kernels"])
    return f'{{\n{head}  "kernels": [\n{lines}\n  ]\n}}\n'


def name_of(device: str) -> str:
    """The file's name of a device: the last word of `NVIDIA H200`."""
    return device.rsplit(maxsplit=1)[-1].lower()


def latest(files: Sequence[Sequence[Mapping[str, Any]]]) -> list[Mapping[str, Any]]:
    """The rows of several files without those of kernels that a later file has with the same constants."""
    found: list[Mapping[str, Any]] = []
    for rows in files:
        timed = {(row["kernel"], frozenset(row["constants"].items())) for row in rows}
        found = [row for row in found if (row["kernel"], frozenset(row["constants"].items())) not in timed] + list(rows)
    return found


def write(paths: Sequence[Path], folder: Path = FOLDER) -> Path:
    """Write the file of the device that was measured.

    Args:
        paths: Results, the latest last.
        folder: Folder for the file; that of the package.
    """
    read = [rows_of(path) for path in paths]
    about = read[-1][0]
    names = [str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) and path.is_file() else path.name for path in paths]
    target = folder / f"{name_of(str(about['device']))}.json"
    folder.mkdir(parents=True, exist_ok=True)
    target.write_text(text_of(document_of(about, latest([rows for _, rows in read]), ", ".join(names))), encoding="utf-8")
    return target


if __name__ == "__main__":
    print(write([Path(each).resolve() for each in sys.argv[1:]]))
