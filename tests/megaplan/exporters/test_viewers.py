"""Exports for viewers: actions and memory of the replayed step, in the formats that Perfetto and torch's memory viewer read."""

import json
import pickle
import pickletools
from pathlib import Path

import pytest

from megaplan import load
from megaplan.budget.peaks import build_budget
from megaplan.cli.main import run
from megaplan.columns import Phase
from megaplan.exporters.chrome_trace import chrome_trace
from megaplan.exporters.memory_snapshot import memory_snapshot
from megaplan.exporters.values import Source
from megaplan.exporters.viewers import replayed_step

ROOT = Path(__file__).parents[3]
READ_BY_THE_VIEWER = frozenset(
    [
        "APPENDS",
        "BINGET",
        "BININT",
        "BININT1",
        "BININT2",
        "EMPTY_DICT",
        "EMPTY_LIST",
        "FRAME",
        "LONG1",
        "LONG_BINGET",
        "MARK",
        "MEMOIZE",
        "PROTO",
        "SETITEMS",
        "SHORT_BINUNICODE",
        "STOP",
        "TUPLE2",
        "APPEND",
        "NEWFALSE",
        "BINPUT",
        "BINUNICODE",
        "EMPTY_TUPLE",
        "NEWTRUE",
        "NONE",
        "BINFLOAT",
        "TUPLE",
        "TUPLE1",
        "TUPLE3",
    ]
)
"""Opcodes of torch/utils/viz/MemoryViz.js, `unpickle`."""


def source_of(kind: str) -> Source:
    vpp = 1 if kind == "1f1b" else 2
    job = load(str(ROOT / "plans/tiny-hybrid-pp2.yaml"), f"schedule.kind={kind}", f"mesh.vpp={vpp}", "schedule.num_microbatches=6")
    return Source(job.spec, job.inventory, job.layout)


@pytest.fixture(params=["1f1b", "zbv", "dualpipev", "interleaved_1f1b"])
def source(request) -> Source:
    return source_of(request.param)


def test_the_trace_has_every_action_and_the_memory(source):
    step, document = replayed_step(source), json.loads(chrome_trace(source))
    shown = [event for event in document["traceEvents"] if event["ph"] == "X"]
    expected = {
        (rank, f"{part.kind}{part.microbatch}", part.slot, item.start, item.stop)
        for rank, timed in enumerate(step.timeline.ranks)
        for item in timed
        for part in item.action.parts
    }
    found = {(e["pid"], e["name"], e["args"]["slot"], round(e["ts"] * 1000), round((e["ts"] + e["dur"]) * 1000)) for e in shown}
    assert found == expected
    counters = [event for event in document["traceEvents"] if event["ph"] == "C"]
    for rank, levels in enumerate(step.levels):
        assert max(e["args"]["bytes"] for e in counters if e["pid"] == rank) == max(size for _, size in levels)


def test_the_snapshot_reaches_the_peak_and_returns(source):
    raw = memory_snapshot(source)
    assert {opcode.name for opcode, _, _ in pickletools.genops(raw)} <= READ_BY_THE_VIEWER
    snapshot = pickle.loads(raw)
    budget = build_budget(source.spec, source.inventory, source.layout)
    for device, events in enumerate(snapshot["device_traces"]):
        (segment,) = [each for each in snapshot["segments"] if each["device"] == device]
        assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]
        assert segment["total_size"] == segment["active_size"] + segment["blocks"][-1]["size"]
        held = peak = segment["active_size"]
        live: dict[int, int] = {}
        for event in events:
            if event["action"] == "alloc":
                start, stop = event["addr"], event["addr"] + event["size"]
                assert segment["address"] + segment["active_size"] <= start < stop <= segment["address"] + segment["total_size"]
                assert all(stop <= other or other + size <= start for other, size in live.items())
                live[start] = event["size"]
                held += event["size"]
            elif event["action"] == "free_completed":
                assert live.pop(event["addr"]) == event["size"]
                held -= event["size"]
            peak = max(peak, held)
        peaks = [rank.phases[Phase.FORWARD_BACKWARD] for rank in budget.ranks if rank.coordinate["pp"] == device]
        assert peak == max(peaks)
        assert live == {}


def test_the_command_writes_both(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = str(ROOT / "plans/tiny-hybrid-pp2.yaml")
    assert run(["export", plan, "--to", "chrome-trace", "-o", "step.json"]) == 0
    assert json.loads(Path("step.json").read_text())["traceEvents"]
    assert run(["export", plan, "--to", "memory-snapshot", "-o", "step.pickle"]) == 0
    assert len(pickle.loads(Path("step.pickle").read_bytes())["device_traces"]) == 2
    assert run(["export", plan, "--to", "memory-snapshot"]) == 2
    assert "-o snapshot.pickle" in capsys.readouterr().err
    assert run(["export", plan, "--to", "chrome-trace", "--set", "schedule.num_microbatches=60000"]) == 2
    assert "MP481" in capsys.readouterr().err


def test_torchs_own_viewer_reads_the_snapshot_and_keeps_devices_apart(source):
    viewer = pytest.importorskip("torch.cuda._memory_viz")
    snapshot = pickle.loads(memory_snapshot(source))
    text = viewer.trace(snapshot)
    assert "seg_" not in text  # nothing of a device is in the bytes that another one holds at the end
    assert text.count("free completed") == sum(
        event["action"] == "free_completed" for events in snapshot["device_traces"] for event in events
    )
    assert f"segments: {len(snapshot['segments'])}" in viewer.segsum(snapshot)
    assert "<script" in viewer.trace_plot(snapshot)
