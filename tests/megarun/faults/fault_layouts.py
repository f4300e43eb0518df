"""Faults of jobs of 1, 2 and 4 ranks in several layouts, on one node and on two, each a separate torchrun agent."""

import os
import random
import re
import signal
import time
from pathlib import Path

import fault_aim
from fault_bench import SPEC, STEPS, Bench, Case, Outcome, first_line, losses, newest_step, refused, resume_layout, wait_for_step
from fault_blame import blamed, ended
from fault_hangs import stopped_process
from fault_launch import ALONE, TWO_STAGES, Job, layout_text
from fault_trust import folder_not_shared, other_words

from megaplan.spec.models import Mesh

SHARDED, EXPERTS, TENSOR = Mesh(dp_shard=2), Mesh(dp_shard=2, ep=2), Mesh(tp=2)
FOUR, FOUR_TENSOR, FOUR_EXPERTS = Mesh(pp=2, dp_shard=2), Mesh(pp=2, tp=2), Mesh(dp_shard=4, ep=2)
PLACES = [*((mesh, 1) for mesh in (ALONE, SHARDED, EXPERTS, TENSOR, FOUR, FOUR_TENSOR, FOUR_EXPERTS)), (SHARDED, 2), (FOUR, 2)]
NODE_LIMIT_SECONDS = 180.0
"""Seconds until a job of two nodes has started again after it has lost one, on a loaded machine."""
CLOSE = 2e-6


def _started(bench: Bench, name: str, mesh: Mesh, nodes: int, *more: str) -> tuple[Path, Path, Job]:
    """The folder of a job, the file with its stderr, and the job."""
    stem = f"{name}-{layout_text(mesh)}-{nodes}".replace(" ", "-")
    out, said = bench.folder / stem, bench.folder / f"{stem}.txt"
    return out, said, bench.launch(out, said, *more, mesh=mesh, nodes=nodes)


def _lost(bench: Bench, out: Path, said: Path, mesh: Mesh, happened: str, seconds: float, status: int) -> Outcome:
    """Resume a job that was killed after its first save, in its own layout."""
    saved = newest_step(out)
    if saved == 0:
        row = refused(bench, happened + ", before the first save", bench.words(bench.one, out), "MP608")
        return Outcome(row.happened, row.said, max(losses(out)), seconds, status)
    resumed, lost = bench.resume(out, saved, resume_layout(mesh))
    return Outcome(happened, ended(said.read_text()) + first_line(resumed, "resumed from"), lost, seconds, status)


def rank_killed(bench: Bench, mesh: Mesh, nodes: int, seed: int) -> Outcome:
    """kill -9 of one rank at a random time."""
    draw = random.Random(f"{seed} {layout_text(mesh)} {nodes}")
    step, rank, delay = draw.randint(3, STEPS - 4), draw.randrange(mesh.world_size), draw.uniform(0, 0.2)
    out, said, job = _started(bench, f"killed-{seed}", mesh, nodes)
    wait_for_step(out, step, job)
    time.sleep(delay)
    if mesh == ALONE:
        job.send_signal(signal.SIGKILL)
    else:
        job.kill(rank)
    seconds = job.end()
    assert blamed(said.read_text()) <= {rank}, said.read_text()
    return _lost(bench, out, said, mesh, f"kill -9 of rank {rank} in step {step + 1} or later", seconds, job.status)


def node_killed(bench: Bench, mesh: Mesh, node: int) -> Outcome:
    """kill -9 of torchrun and the ranks of one node of two: the other one ends, too."""
    out, said, job = _started(bench, f"node-{node}", mesh, 2)
    wait_for_step(out, 5, job)
    job.kill_node(node)
    seconds = job.end()
    half = mesh.world_size // 2
    assert blamed(said.read_text()) <= set(range(node * half, (node + 1) * half)), said.read_text()
    where = "node 0, which has the store" if node == 0 else "node 1"
    return _lost(bench, out, said, mesh, f"kill -9 of all processes of {where}, in step 6 or later", seconds, job.status)


def signalled(bench: Bench, number: signal.Signals, mesh: Mesh, nodes: int, to: str) -> Outcome:
    """To the agent of the last node, to one rank, or to every rank as a scheduler does: all save and stop after the same step."""
    out, said, job = _started(bench, f"{number.name}-{to}", mesh, nodes)
    wait_for_step(out, 3, job)
    if to == "torchrun":
        job.send_signal(number, nodes - 1)
    elif mesh == ALONE:
        job.send_signal(number)
    else:
        ranks = job.ranks()
        for pid in ranks.values() if to == "every rank" else [ranks[mesh.world_size - 1]]:
            os.kill(pid, number)
    seconds = job.end()
    assert job.status != 0
    assert 0 < newest_step(out) == max(losses(out)) < STEPS, said.read_text()
    _, lost = bench.resume(out, newest_step(out), resume_layout(mesh))
    assert lost == 0
    whom = f"torchrun of node {nodes - 1}" if nodes > 1 and to == "torchrun" else to.replace("one rank", f"rank {mesh.world_size - 1}")
    return Outcome(f"{number.name} to {whom}", first_line(said.read_text(), "saved"), 0, seconds, job.status)


def disk_full(bench: Bench, mesh: Mesh, nodes: int) -> Outcome:
    """The second save of the last rank meets a full disk: all end, before the third save."""
    name = f"full-{layout_text(mesh)}-{nodes}".replace(" ", "-")
    out, said, counts = bench.folder / name, bench.folder / f"{name}.txt", bench.folder / f"{name}-updates"
    counts.mkdir()
    last = mesh.world_size - 1
    program = [str(Path(fault_aim.__file__)), "the writing of a save", fault_aim.full_disk.__name__, str(last), str(counts)]
    job = bench.launch(out, said, mesh=mesh, nodes=nodes, program=program)
    job.wait_for((counts / fault_aim.STRUCK).exists, "the second save")
    seconds = job.end()
    assert job.status != 0
    assert newest_step(out) == 2, said.read_text()
    read = first_line(said.read_text(), "error[MP645]")
    _, lost = bench.resume(out, 2, resume_layout(mesh))
    return Outcome(f"disk full for rank {last} during the second save", read, lost, seconds, job.status)


def node_lost(bench: Bench) -> Outcome:
    """Half of a job is killed: the other half takes the plan for one rank from --plans by itself, and ends as if nothing had happened."""
    half = bench.folder / "plans" / "half.json"
    half.parent.mkdir()
    microbatches = SPEC["schedule"]["num_microbatches"]
    bench.plan("plans/half", {"schedule": {**SPEC["schedule"], "num_microbatches": 2 * microbatches}})
    expected = bench.folder / "half-expected"
    assert bench.here(bench.words(half, expected))[0] == 0
    out, said = bench.folder / "node-lost", bench.folder / "node-lost.txt"
    job = bench.launch(out, said, "--plans", str(half.parent), "--start-timeout", "600", mesh=SHARDED, nodes=2, elastic=True)
    wait_for_step(out, 5, job)
    made = max(losses(out))
    job.kill_node(1)
    seconds = job.end(NODE_LIMIT_SECONDS)
    assert job.processes[0].poll() == 0, said.read_text()
    found, wanted = losses(out), losses(expected)
    assert found.keys() == wanted.keys()
    assert max(abs(found[step] - loss) for step, loss in wanted.items()) <= CLOSE * max(map(abs, wanted.values()))
    text = said.read_text()
    again = re.findall(r"(\d+) steps done", text)[-1]
    read = f"{first_line(text, '1 ranks')}; {first_line(text, 'resumed from')}"
    return Outcome("kill -9 of node 1 under --plans: node 0 continues to the last step", read, max(0, made - int(again)), seconds, 0)


def _at(name: str, mesh: Mesh, nodes: int) -> str:
    return f"{name}, {layout_text(mesh)}, {nodes} node{'s' * (nodes > 1)}"


LAYOUTS: dict[str, Case] = {
    **{_at("kill -9", m, n): (lambda bench, m=m, n=n: rank_killed(bench, m, n, 0)) for m, n in PLACES},
    _at("kill -9 again", FOUR, 1): lambda bench: rank_killed(bench, FOUR, 1, 1),
    _at("kill -9 again", FOUR, 2): lambda bench: rank_killed(bench, FOUR, 2, 1),
    **{
        _at(f"kill -9 of node {k}", m, 2): (lambda bench, m=m, k=k: node_killed(bench, m, k))
        for m, k in ((SHARDED, 1), (TWO_STAGES, 0), (FOUR, 0), (FOUR, 1))
    },
    "node lost, --plans": node_lost,
    **{
        _at(f"{s.name} to {to}", m, n): (lambda bench, s=s, m=m, n=n, to=to: signalled(bench, s, m, n, to))
        for s, m, n, to in (
            (signal.SIGTERM, FOUR, 1, "torchrun"),
            (signal.SIGTERM, SHARDED, 2, "torchrun"),
            (signal.SIGTERM, FOUR, 2, "torchrun"),
            (signal.SIGINT, FOUR_TENSOR, 1, "torchrun"),
            (signal.SIGUSR1, ALONE, 1, "every rank"),
            (signal.SIGUSR1, FOUR, 1, "every rank"),
            (signal.SIGUSR1, FOUR_EXPERTS, 1, "one rank"),
            (signal.SIGHUP, FOUR, 2, "every rank"),
        )
    },
    **{_at("disk full", m, n): (lambda bench, m=m, n=n: disk_full(bench, m, n)) for m, n in ((FOUR, 1), (SHARDED, 2))},
    **{
        _at(f"SIGSTOP of rank {r}", m, n): (lambda bench, m=m, n=n, r=r: stopped_process(bench, r, m, n))
        for m, n, r in ((FOUR, 1, 3), (FOUR_EXPERTS, 1, 1), (SHARDED, 2, 1), (FOUR, 2, 2))
    },
    **{
        _at(f"one rank with {what}", m, n): (lambda bench, what=what, m=m, n=n: other_words(bench, what, m, n))
        for what, m, n in (("seed", FOUR, 1), ("other tokens", SHARDED, 2), ("another torch", FOUR, 2))
    },
    _at("folder not shared", SHARDED, 2): lambda bench: folder_not_shared(bench, SHARDED, 2),
}
