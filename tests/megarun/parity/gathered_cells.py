"""Cells of the parity matrix whose experts read tokens gathered from all ranks (`host.moe_dispatcher: allgather`)."""

from parity_cells import (
    BALANCED,
    C2,
    CHOOSES,
    E2,
    E4,
    EXPERTS,
    KERNELS,
    LIMITED,
    NULLS,
    RESHARD,
    SELECTIVE,
    T2,
    TOP_1,
    V2,
    Cell,
)
from slice_cells import BIASES, S2_E2

GATHERED = EXPERTS | {"host.moe_dispatcher": "allgather"}
NARROW = {"model.moe.latent_size": 16}
SHARED = {"model.moe.shared_ffn_hidden_size": 24}

GATHERED_CELLS = [
    Cell("gathered-ep2", E2, spec=GATHERED | SHARED, ci=True),
    Cell("gathered-ep4-latent-reshard", E4, spec=GATHERED | NARROW | RESHARD),
    Cell("gathered-ep4-kernels", E4, spec=GATHERED | KERNELS | BALANCED),
    Cell("gathered-ep4-pp2-selective", {"pp": 2} | E4, spec=GATHERED | SELECTIVE, num_microbatches=8),
    Cell("gathered-zbv-pp2-ep2", V2 | E2, "zbv", GATHERED | RESHARD),
    Cell("gathered-tp2-dp2-ep4", T2 | {"dp_shard": 2, "ep": 4}, spec=GATHERED | SHARED),
    Cell("gathered-cp2-ep2", C2 | {"ep": 2}, spec=GATHERED),
    Cell("gathered-etp2-ep2-bias", S2_E2, spec=GATHERED | BIASES, by_course=True),
    Cell("gathered-etp2-kernels", {"dp_shard": 2, "etp": 2}, spec=GATHERED | KERNELS),
    Cell("gathered-ep4-capacity", E4, spec=GATHERED | LIMITED, ci=True),
    Cell("gathered-etp2-ep2-capacity", S2_E2, spec=GATHERED | LIMITED),
    Cell("gathered-ep2-idle-experts", E2, spec=GATHERED | TOP_1, num_microbatches=2),
    Cell("gathered-ep2-expert-choice-kernels", E2, spec=GATHERED | CHOOSES | KERNELS),
    Cell("gathered-ep4-null", E4, spec=GATHERED | NULLS),
]
