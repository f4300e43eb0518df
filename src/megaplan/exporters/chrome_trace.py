"""A step as a trace in Chrome's Trace Event Format, which Perfetto and chrome://tracing open.

The format is that of the document "Trace Event Format" of the Catapult project: a process for each pp rank, a thread for each of its
chunks, an event `X` for each action, and a counter `C` for the memory. Times are microseconds.
"""

import json
from collections.abc import Iterator
from typing import Any

from megaplan.exporters.values import Source
from megaplan.exporters.viewers import ReplayedStep, replayed_step
from megaplan.schedules import ACTION_NAMES


def chrome_trace(source: Source) -> str:
    """The trace of one optimizer step as JSON.

    Raises:
        MegaplanError: MP481, the schedule has too many actions.
    """
    step = replayed_step(source)
    about = {"plan": source.spec.name, "times": "modelled from the device's peak rates", "memory": "bytes of torch's allocator, reserved"}
    document = {"displayTimeUnit": "ms", "otherData": about, "traceEvents": list(_events(step))}
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")) + "\n"


def _events(step: ReplayedStep) -> Iterator[dict[str, Any]]:
    for rank, (timed, levels) in enumerate(zip(step.timeline.ranks, step.levels, strict=True)):
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"pp {rank}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
        for chunk in sorted({step.chunks[part.slot] for item in timed for part in item.action.parts}):
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": chunk, "args": {"name": f"chunk {chunk}"}}
        for item in timed:
            for part in item.action.parts:
                yield {
                    "ph": "X",
                    "name": f"{part.kind}{part.microbatch}",
                    "cat": ACTION_NAMES[part.kind],
                    "pid": rank,
                    "tid": step.chunks[part.slot],
                    "ts": item.start / 1000,
                    "dur": (item.stop - item.start) / 1000,
                    "args": {"action": ACTION_NAMES[part.kind], "slot": part.slot, "microbatch": part.microbatch},
                }
        for time, size in dict(levels).items():
            yield {"ph": "C", "name": "memory", "pid": rank, "ts": time / 1000, "args": {"bytes": size}}
