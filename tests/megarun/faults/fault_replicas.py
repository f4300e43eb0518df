"""Faults of a device that computes wrongly: a bit of one rank's parameter flips, and the rank is named before a step with it is saved."""

import re

from fault_bench import Bench, Case, Outcome, first_line, newest_step
from fault_launch import START_LIMIT_SECONDS, layout_text

from megaplan.spec.models import Mesh

FLIPS_IN = 5
FLIPPING = """
import os, sys
rank, axis = sys.argv.pop(1), sys.argv.pop(1)
import torch
from torch.distributed.tensor import DTensor
from megarun.engine.trainer import Trainer
real = Trainer.update
def update(self, step):
    real(self, step)
    if step + 1 == %d and os.environ["RANK"] == rank:
        found = self._replicated[0][1] if axis == "tp" else next(self.stages[0].parameters())
        local = (found.to_local() if isinstance(found, DTensor) else found).detach()
        local.view(torch.int32).view(-1)[0] ^= 1
Trainer.update = update
from megarun.cli.main import run
from megarun.launch.failure import exit_process
exit_process(run())
"""


def flipped(bench: Bench, mesh: Mesh, rank: int, wanted: str) -> Outcome:
    """The lowest bit of one number: no loss shows it."""
    name = f"flipped-{layout_text(mesh)}".replace(" ", "-")
    out, said, program = (bench.folder / f"{name}{suffix}" for suffix in ("", ".txt", ".py"))
    program.write_text(FLIPPING % FLIPS_IN)
    axis = "tp" if mesh.tp > 1 else "dp_replicate"
    job = bench.launch(out, said, "--check-replicas", "3", mesh=mesh, program=[str(program), str(rank), axis])
    seconds = job.end(START_LIMIT_SECONDS)
    text = said.read_text()
    assert job.status != 0
    assert text.count("error[MP676]") == 1, text
    assert "after step 6:" in text  # the third step after is the sixth, which is also saved
    assert newest_step(out) == 4, text
    read = re.sub(r"\S+: rank", "…: rank", first_line(text, wanted).strip())
    _, lost = bench.resume(out, 4, mesh)
    assert lost == 2
    return Outcome(
        f"a bit of rank {rank}'s parameter flips in step {FLIPS_IN} (--check-replicas 3)",
        f"error[MP676]: {read}",
        lost,
        seconds,
        job.status,
    )


THREE, TENSOR, BOTH = Mesh(dp_replicate=3), Mesh(tp=2), Mesh(dp_replicate=2, dp_shard=2)
REPLICAS: dict[str, Case] = {
    "a bit flips, dp_replicate 3": lambda bench: flipped(bench, THREE, 2, "rank 2 (dp_replicate 2) differs from 2 others"),
    "a bit flips, tp 2": lambda bench: flipped(bench, TENSOR, 1, "rank 0 (tp 0), rank 1 (tp 1) differ from each other"),
    "a bit flips, dp_replicate 2 × dp_shard 2": lambda bench: flipped(bench, BOTH, 3, "differ from each other"),
}
