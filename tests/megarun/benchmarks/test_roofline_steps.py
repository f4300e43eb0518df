"""The roofline's prices of work and collectives, and the floor of a step."""

import sys
from pathlib import Path

import pytest

from megaplan.cost.model import model_costs
from megaplan.inventory.build import build_inventory
from megaplan.layout.build import build_layout
from megaplan.partition.choose import choose_cuts
from megaplan.spec.load import load_spec_text
from megarun.job.job import Job

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))  # rooflines

pytest.importorskip("triton")
from rooflines.price import Prices
from rooflines.step import roofline
from rooflines.work import Action, Event, Kernel, Transfer, Work

pytestmark = pytest.mark.runtime
SPEC = """
format: megaplan.spec/1
name: small
model: {pattern: D, num_layers: 4, hidden_size: 64, vocab_size: 96, mlp: {ffn_hidden_size: 128}}
mesh: {pp: 2}
schedule: {kind: 1f1b, num_microbatches: 4}
batch: {micro_batch_size: 1, seq_length: 32}
host: {kernels: triton}
device: {name: h200, launch_ns: 3000}
"""


def small_job(*overrides: str) -> Job:
    spec = load_spec_text(SPEC, "small.yaml", overrides).spec
    inventory = build_inventory(spec)
    return Job(spec, inventory, build_layout(spec, inventory, choose_cuts(spec, inventory).spans))


def test_an_operation_takes_as_long_as_what_limits_it() -> None:
    prices = Prices(small_job().spec)
    second = {"bytes": 4_800_000_000_000, "bf16": 989_000_000_000_000, "tf32": 494_500_000_000_000, "steps": 2_000_000}
    assert prices.work(Work("bound by memory", (Kernel("a", second["bytes"], {"bf16": second["bf16"] // 2}),))) == 1.0
    assert prices.work(Work("bound by products", (Kernel("a", second["bytes"] // 2, {"bf16": second["bf16"]}),))) == 1.0
    assert prices.work(Work("bound by stated products", (Kernel("a", 1),), {"tf32": second["tf32"]})) == 1.0
    assert prices.work(Work("bound by its chain", (Kernel("a", second["bytes"] // 2),), steps=second["steps"])) == 1.0
    assert (
        prices.work(Work("bound by what it reads again", (Kernel("a", second["bytes"] // 2),), repeated_bytes=second["bytes"] // 2)) == 1.0
    )
    tiny = Work("bound by launches", (Kernel("a", 1),) * 10)
    assert prices.work(tiny) == pytest.approx(30e-6, rel=1e-12)
    assert prices.launching(tiny) == pytest.approx(30e-6 - 10 / second["bytes"], rel=1e-9)


def test_a_collective_takes_its_latency_and_its_part_of_the_payload() -> None:
    prices = Prices(small_job().spec)
    gathered = Transfer("c10d._allgather_base_", "gather", 450_000_000_000, 4, 1, overlapped=True)
    assert prices.transfer(gathered) == pytest.approx(0.75 + 15e-6, rel=1e-9)
    assert prices.transfer(Transfer("c10d.allreduce_", "reduce", 450_000_000_000, 4, 1, overlapped=False)) == pytest.approx(
        1.5 + 15e-6, rel=1e-9
    )
    assert prices.transfer(Transfer("c10d.send", "send", 1 << 30, 2, 1, overlapped=False)) == 0


def test_a_step_is_the_schedule_of_its_microbatches_and_what_runs_once() -> None:
    """The first and the last microbatch may do more; those that were not counted are as the one between."""
    forward, backward, once = (
        Work(name, (Kernel(name, n * 4_800_000_000),)) for name, n in (("forward", 10), ("backward", 20), ("once", 7))
    )
    events = {}
    for rank in range(2):
        found = []
        for microbatch in range(3):
            found.append(Event(Action(rank, "F", microbatch), "microbatches", "D", forward))
            found.append(Event(Action(rank, "B", microbatch), "microbatches", "D", backward))
        found.append(Event(Action(rank, "B", 2), "microbatches", "stage", once))  # the last one reduces
        events[rank] = tuple(found)
    job = small_job("device.collective_latency_ns=0", "device.node_bytes_per_second=1000000000000000")
    found = roofline(job, events)
    assert found.floor.seconds == pytest.approx((4 + 1) * 30e-3 + 7e-3, abs=1e-8)  # a message is a nanosecond
    assert found.floor.busy == pytest.approx(4 * 30e-3 + 7e-3, rel=1e-9)
    assert sum(row.seconds for row in found.rows) == pytest.approx(2 * found.floor.busy, rel=1e-9)
    assert {row.op: row.launches for row in found.rows} == {"forward": 8, "backward": 8, "once": 2}
    assert found.launches == 4
    flops = model_costs(job.spec, job.inventory).model_flops * 4 * 32
    assert found.mfu == pytest.approx(flops / (found.floor.seconds * 2 * 989e12), rel=1e-12)


def test_overlapped_collectives_are_exposed_where_they_are_longer() -> None:
    gather = Transfer("c10d._allgather_base_", "gather", 450_000_000_000, 4, 1, overlapped=True)
    done = Work("forward", (Kernel("forward", 4_800_000_000),))
    events = {0: (Event(Action(0, "B", 0), "microbatches", "D", done), Event(None, "microbatches", "stage", gather))}
    found = roofline(small_job("mesh.pp=1", "schedule.num_microbatches=1"), events)
    assert found.floor.exposed == pytest.approx(0.75 + 15e-6 - 1e-3, rel=1e-9)
    assert found.floor.seconds == pytest.approx(found.floor.busy + found.floor.exposed, rel=1e-12)
