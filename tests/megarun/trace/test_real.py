"""The trace itself on trial: the same tracker on real tensors in real processes agrees with fake tensors to the byte.

Three differences have a name, and are described in docs/reference/trace.md. One of them is a race: gloo's own thread lets go of a buffer
now and then a moment later. That only ever adds, so every case is traced a few times and each phase's smallest peak is compared.
"""

import json
import pickle
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megaplan.columns import Phase
from megarun.trace.rank import trace_rank
from megarun.trace.values import RankTrace

pytestmark = pytest.mark.runtime
BF16 = {"params": "bf16", "grads": "fp32", "master": "fp32", "moments": "fp32", "reduce": "fp32"}
PP2, DP2 = {"mesh.pp": 2, "schedule.num_microbatches": 4}, {"mesh.dp_shard": 2, "schedule.num_microbatches": 2}
CASES = {
    "pp2": PP2,
    "pp2-bf16": {**PP2, "precision": BF16},
    "pp2-tied": {**PP2, "model.tie_embeddings": True},
    "dp2": DP2,
    "dp2-bf16": {**DP2, "precision": BF16},
    "dp2-reshard": {**DP2, "sharding.reshard_after_forward": True},
    "hsdp2": {"mesh.dp_replicate": 2, "precision": BF16},
}
REPEATS = 3
BOUNDARY_ELEMENTS = 2 * 24 * 32


@pytest.fixture(scope="module")
def real(spec_with: Any, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[RankTrace]]]:
    """Traces of both ranks of every case, from two gloo processes."""
    folder = tmp_path_factory.mktemp("real")
    cases = []
    for name, overrides in CASES.items():
        spec = spec_with(overrides)
        cases.append({"name": name, "spec": spec, "repeats": REPEATS})
        cases[-1]["spans"] = [[0, 2], [2, 5]] if "mesh.pp" in overrides else [[0, 5]]
    (folder / "cases.json").write_text(json.dumps(cases))
    script = Path(__file__).with_name("real_worker.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    command += [str(folder / "cases.json"), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return {name: [pickle.loads((folder / f"{name}.{rank}.pickle").read_bytes()) for rank in range(2)] for name in CASES}


def rows(trace: RankTrace, phase: Phase) -> Counter[tuple[Any, ...]]:
    return Counter({(row.column, row.kind, row.name, row.op, row.shape, row.dtype): row.nbytes for row in trace.rows[phase]})


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rank", [0, 1])
def test_fake_and_real_tensors_hold_the_same_bytes(real: Any, job_with: Any, name: str, rank: int) -> None:
    """Every phase, row by row: only what gloo's send holds on to, and the mesh's own look-up on the host, come on top."""
    repeats: list[RankTrace] = real[name][rank]
    fake = trace_rank(job_with(CASES[name]), rank)
    assert fake.differences == ()
    assert () in [trace.differences for trace in repeats]
    for phase in Phase:
        found = min(repeats, key=lambda trace: trace.phases[phase])
        more = rows(found, phase) - rows(fake, phase)
        assert rows(fake, phase) - rows(found, phase) == Counter()
        if phase is Phase.INIT:
            more = Counter({row: size for row, size in more.items() if row[3] not in ("aten.eq.Scalar", "aten.nonzero.default")})
        if name.startswith("pp2") and rank == 0 and phase in (Phase.FIRST_FORWARD_BACKWARD, Phase.FORWARD_BACKWARD):
            assert sum(more.values()) == BOUNDARY_ELEMENTS * (2 if "bf16" in name else 4)
            assert {row[4] for row in more} == {(2, 24, 32)}
        else:
            assert more == Counter()
