"""Tables of the findings of `run.py`."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from gpu.groups import part_of_group

Line = dict[str, Any]
GIB = 2**30


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> Iterator[str]:
    """A table whose first `left` columns are text."""
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * left}{'--:|' * (len(head) - left)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""


def device_table(lines: Sequence[Line]) -> Iterator[str]:
    """Versions, bytes and rates."""
    facts = {key: value for line in lines if line["kind"] == "facts" for key, value in line.items() if key not in ("job", "kind")}
    yield "## Device"
    yield ""
    yield from markdown(("fact", "value"), [(key, _plain(value)) for key, value in facts.items()], left=2)


def checks_table(lines: Sequence[Line]) -> Iterator[str]:
    """Largest error of every operation over its sizes, with what is wrong by size."""
    cases: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        if line["kind"] == "checks" and "case" in line:
            cases[line["case"]].append(line)
    rows = []
    for name, found in cases.items():
        sized = [line for line in found if "num_tokens" in line]
        wrong = [f"{line['num_tokens']} {line['dtype']}: {_wrong(line)}" for line in sized if not line.get("right")]
        errors = [line["error"] for line in sized if line.get("dtype") == "bfloat16" and isinstance(line.get("error"), float)]
        rows.append((name, str(len(sized)), f"{max(errors):.1e}" if errors else "", _cell("; ".join(wrong)) or "right, same bits"))
    yield "## Kernels against fp64"
    yield ""
    yield from markdown(("operation", "sizes", "largest bf16 error", "result"), sorted(rows))
    tests = [line for line in lines if "test" in line]
    failed = [line for line in tests if line["outcome"] == "failed"]
    if tests:
        yield f"Kernel checks on the device: {sum(line['outcome'] == 'passed' for line in tests)} passed, {len(failed)} failed, " + (
            f"{sum(line['outcome'] == 'skipped' for line in tests)} skipped."
        )
        yield ""
        yield from (f"- `{line['test']}`: {_cell(line['failure'])}" for line in failed)
        if failed:
            yield ""
    for line in lines:
        if "largest_relative_difference" in line:
            yield f"Demo, {line['steps']} fp32 steps: losses differ from the CPU's by at most {line['largest_relative_difference']:.1e}."
            yield ""


def _wrong(line: Line) -> str:
    if "failure" in line:
        return str(line["failure"])
    parts = [f"error {line['error']}"] if not (line["bitwise"] and line["finite"]) or not line["right"] else []
    return ", ".join(parts + ["other bits the second time"] * (not line["bitwise"]) + ["not finite"] * (not line["finite"]))


def kernel_times(lines: Sequence[Line]) -> list[Line]:
    """One row for an operation by a library: wall time and kernel times joined, with ratios to the device's own limits."""
    limit = {key: line[key] for line in lines for key in ("copy_gb_s", "matmul_bf16_8192_tflop_s") if key in line}
    rows: dict[tuple[str, str], Line] = {}
    for line in lines:
        if line["kind"] == "times":
            rows.setdefault((line["case"], line["kernels"]), {}).update(line)
    for row in rows.values():
        unit = "bytes" if row.get("bound") == "copy" else "flops"
        rate = limit.get("copy_gb_s", 0) if unit == "bytes" else 1000 * limit.get("matmul_bf16_8192_tflop_s", 0)
        total = sum(row.get(f"{phase}_flops", 0) for phase in ("forward", "backward") if f"{phase}_ns" in row)
        if "forward_ns" in row and unit == "flops":
            row["tflop_s"] = round(total / (row["forward_ns"] + row.get("backward_ns", 0)) / 1000, 1)
        for phase in ("forward", "backward"):
            if row.get(f"{phase}_ns") and rate:
                row[f"{phase}_of_{row['bound'] if unit == 'bytes' else 'matmul'}"] = round(
                    row[f"{phase}_{unit}"] / row[f"{phase}_ns"] / rate, 3
                )
    return [{key: value for key, value in row.items() if key not in ("job", "kind", "part")} for row in rows.values()]


def times_table(lines: Sequence[Line]) -> Iterator[str]:
    """Kernel times, ours and others'."""
    rows = []
    for row in kernel_times(lines):
        kind = "copy" if row.get("bound") == "copy" else "matmul"
        shares = [row.get(f"{phase}_of_{kind}") for phase in ("forward", "backward")]
        times = [f"{row[f'{phase}_ns'] / 1e3:,.0f}" if f"{phase}_ns" in row else "" for phase in ("forward", "backward")]
        wall = f"{row['wall_ns'] / 1e3:,.0f}" if "wall_ns" in row else _cell(row.get("failure", ""))
        rows.append((row["case"], row["kernels"], *times, wall, *("" if share is None else f"{share:.0%}" for share in shares)))
    yield "## Operations, µs"
    yield ""
    yield from markdown(("operation", "by", "forward", "backward", "wall, both", "forward of limit", "backward of limit"), rows, left=2)


def train_tables(lines: Sequence[Line], floors: dict[str, dict[str, float]]) -> Iterator[str]:
    """Steps, and each profiled step by part with its counted floor.

    Args:
        lines: Lines of results.
        floors: Counted milliseconds of each run by part; of runs that were counted.
    """
    runs = [line for line in lines if line["kind"] == "train" and "step_s" in line]
    rows = []
    for run in runs:
        peaks = [phase["allocated"] for phase in run["phases"].values() if phase["allocated"] is not None]
        estimate = max(phase["allocated"] for phase in run["estimate"].values())
        error = f"{estimate / max(peaks) - 1:+.2%}" if peaks else ""
        mfu = "" if run["mfu"] is None else f"{run['mfu']:.1%}"
        peak = f"{max(peaks) / GIB:.2f}" if peaks else ""
        rows.append((run["job"].partition("/")[2], f"{run['step_s'] * 1e3:,.0f}", f"{run['tok_s']:,.0f}", mfu, peak, error))
    yield "## Training"
    yield ""
    yield from markdown(("run", "step ms", "tokens/s", "MFU", "allocated GiB", "estimate"), rows)
    for line in lines:
        if line["kind"] == "train" and "gpu" in line:
            yield from _parts(line, floors.get(line["run"], {}))


def _parts(line: Line, floor: dict[str, float]) -> Iterator[str]:
    gpu, parts = line["gpu"], defaultdict(float)
    for group, _, milliseconds in gpu["by_group"]:
        parts[part_of_group(group)] += milliseconds
    yield f"### {line['job'].partition('/')[2]}: busy {gpu['busy_ms']:,.0f} ms, {gpu['kernels']:,} kernels"
    yield ""
    names = sorted(parts.keys() | floor.keys(), key=lambda name: -parts.get(name, 0.0))
    rows = [(name, f"{parts.get(name, 0.0):,.1f}", f"{floor[name]:,.1f}" if name in floor else "") for name in names]
    yield from markdown(("part", "measured ms", "counted floor ms"), rows)


def memory_table(lines: Sequence[Line]) -> Iterator[str]:
    """Every plan's largest phase under both allocators."""
    rows = []
    for line in lines:
        if line["kind"] != "memory" or "phases" not in line:
            continue
        cells = []
        for key in ("allocated", "reserved"):
            measured = [phase[key] for phase in line["phases"].values() if phase[key] is not None]
            estimate = max(phase[key] for phase in line["estimate"].values())
            cells += [f"{max(measured) / GIB:.2f}", f"{estimate / max(measured) - 1:+.2%}"] if measured else ["", ""]
        rows.append((line["run"], "expandable" if line["expandable_segments"] else "default", *cells))
    yield "## Memory"
    yield ""
    yield from markdown(("plan", "allocator", "allocated GiB", "estimate", "reserved GiB", "estimate"), rows, left=2)


def failures_table(ends: Sequence[Line]) -> Iterator[str]:
    """Jobs that did not end well, or did not run."""
    rows = [(line["job"], line["status"], _cell(line.get("failure", ""))) for line in ends if line["status"] != "done"]
    if rows:
        yield "## Not done"
        yield ""
        yield from markdown(("job", "status", "reason"), rows, left=3)


def _plain(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else _cell(str(value))


def _cell(text: str) -> str:
    return " ".join(str(text).split()).replace("|", "\\|")[:300]
