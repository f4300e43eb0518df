"""The trace itself on trial: the same tracker on real tensors in real processes agrees with fake tensors to the byte.

Three differences have a name, and are described in docs/reference/trace.md. One of them is a race: gloo's own thread lets go of a buffer
sometimes a little later. That only ever adds, so every case is traced a few times and each phase's smallest peak is compared.
"""

import json
import pickle
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.distributed.pipelining import schedules
from trace_checks import BF16

from megaplan.columns import Phase
from megarun.trace.rank import trace_rank
from megarun.trace.values import RankTrace

pytestmark = [pytest.mark.runtime, pytest.mark.jobs]
PP2, DP2 = {"mesh.pp": 2, "schedule.num_microbatches": 4}, {"mesh.dp_shard": 2, "schedule.num_microbatches": 2}
CASES = {
    "pp2": PP2,
    "pp2-bf16": {**PP2, "precision": BF16},
    "pp2-tied": {**PP2, "model.tie_embeddings": True},
    "pp2-vpp2": {"mesh": {"pp": 2, "vpp": 2}, "schedule": {"kind": "interleaved_1f1b", "num_microbatches": 4}},
    "dp2": DP2,
    "dp2-recompute": {**DP2, "precision": BF16, "recompute": {"default": "selective", "blocks": {"A": "full"}}},
    "dp2-bf16": {**DP2, "precision": BF16},
    "dp2-reshard": {**DP2, "sharding.reshard_after_forward": True},
    "dp2-offload": {**DP2, "precision": BF16, "host.optimizer_offload": 0.6},
    "cp2": {"mesh.cp": 2, "precision": BF16},
    "hsdp2": {"mesh.dp_replicate": 2, "precision": BF16},
    "ep2": {"mesh": {"dp_shard": 2, "ep": 2}, "schedule.num_microbatches": 2, "precision": BF16},
    "ep2-skewed": {"mesh": {"dp_shard": 2, "ep": 2}, "schedule.num_microbatches": 2, "model.moe.routing_skew": 2.0},
}
IN_CI = ("pp2",)
CHOSEN = {"ep2": (0, 4), "ep2-skewed": (0, 2)}
"""Experts that real tokens choose in turn, so that routing is what the spec states: even, and all rows on the first rank."""
REPEATS = 3
BOUNDARY_BYTES = 2 * 24 * 32 * 4
MESH_LOOK_UP = ("aten.eq.Scalar", "aten.nonzero.default")


@pytest.fixture(scope="module")
def real(
    spec_with: Any,
    spans_of: Any,
    environment: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> dict[str, list[list[RankTrace]]]:
    """Traces of both ranks of every case that is asked for, from two gloo processes."""
    folder = tmp_path_factory.mktemp("real")
    asked = {item.callspec.params["name"] for item in request.session.items if item.path == request.path and hasattr(item, "callspec")}
    cases = []
    for name in (name for name in CASES if name in asked):
        spec = spec_with(CASES[name])
        cases.append({"name": name, "spec": spec, "spans": spans_of(spec), "repeats": REPEATS, "experts": CHOSEN.get(name)})
    (folder / "cases.json").write_text(json.dumps(cases))
    script = Path(__file__).with_name("real_worker.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    command += [str(folder / "cases.json"), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return {name: [pickle.loads((folder / f"{name}.{rank}.pickle").read_bytes()) for rank in range(2)] for name in asked}


def rows(trace: RankTrace, phase: Phase) -> Counter[tuple[Any, ...]]:
    return Counter({(row.column, row.kind, row.name, row.op, row.shape, row.dtype): row.nbytes for row in trace.rows[phase]})


class KeepingHandle:
    """A send's handle that keeps what it sent, as gloo's does and the fake group's does not."""

    def __init__(self, works: list[Any], tensors: list[Tensor]) -> None:
        self.works, self.tensors = works, tensors

    def wait(self) -> None:
        for work in self.works:
            work.wait()


@pytest.fixture
def handles_keep_what_they_send(monkeypatch: pytest.MonkeyPatch) -> None:
    start = schedules._batch_p2p

    def start_and_keep(operations: list[Any], desc: str | None = None) -> list[KeepingHandle]:
        return [KeepingHandle(start(operations, desc), [operation.tensor for operation in operations])] if operations else []

    monkeypatch.setattr(schedules, "_batch_p2p", start_and_keep)


@pytest.mark.usefixtures("handles_keep_what_they_send")
@pytest.mark.parametrize(
    ("name", "rank"),
    [
        pytest.param(name, rank, marks=() if name in IN_CI else pytest.mark.slow)
        for name in CASES
        for rank in range(1 if name == "ep2-skewed" else 2)
    ],
)
def test_fake_and_real_tensors_hold_the_same_bytes(real: Any, job_with: Any, name: str, rank: int) -> None:
    """Every phase, row by row, once the fake group's handles keep what they send; except for the mesh's own look-up on the host."""
    repeats: list[RankTrace] = real[name][rank]
    fake = trace_rank(job_with(CASES[name]), rank)
    assert fake.differences == ()
    assert () in [trace.differences for trace in repeats]
    for phase in Phase:
        found = min(repeats, key=lambda trace: trace.phases[phase])
        looked_up = {row: size for row, size in rows(found, phase).items() if row[3] in MESH_LOOK_UP and phase is Phase.INIT}
        assert found.phases[phase] - sum(looked_up.values()) == fake.phases[phase]
        assert rows(found, phase) - Counter(looked_up) == rows(fake, phase)


@pytest.mark.parametrize("name", ["pp2", pytest.param("pp2-vpp2", marks=pytest.mark.slow)])
def test_tensors_kept_by_handles_are_reported(real: Any, job_with: Any, name: str) -> None:
    """gloo holds more without that: one boundary under 1F1B, every boundary that was sent under the interleaved schedule."""
    fake = trace_rank(job_with(CASES[name]), 0)
    more = min(trace.phases[Phase.FORWARD_BACKWARD] for trace in real[name][0]) - fake.phases[Phase.FORWARD_BACKWARD]
    assert more == BOUNDARY_BYTES if name == "pp2" else more > 2 * BOUNDARY_BYTES
