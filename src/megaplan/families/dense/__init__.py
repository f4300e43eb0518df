"""D blocks: the dense MLP."""

from __future__ import annotations

from megaplan.families.dense.composition import dense_work
from megaplan.families.dense.program import dense_program, dense_selective
from megaplan.families.dense.section import Mlp
from megaplan.families.dense.tensors import dense_tensors
from megaplan.families.family import Family


def _sharded(mlp: Mlp, _hidden_size: int) -> dict[str, int]:
    return {"mlp.ffn_hidden_size": mlp.ffn_hidden_size}


DENSE = Family(
    letter="D",
    title="dense MLP",
    section="mlp",
    tensors=dense_tensors,
    program=dense_program,
    work=dense_work,
    selective=dense_selective,
    sharded=_sharded,
    last_own="norm.weight",
)
