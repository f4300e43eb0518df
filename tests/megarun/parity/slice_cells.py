"""Cells of the parity matrix whose experts are cut by expert tensor parallelism, alone and with every other axis."""

from parity_cells import BALANCED, C2, EXPERTS, KERNELS, LIMITED, NULLS, RESHARD, SELECTIVE, T2, TWO_EXPERTS, V2, Cell

S2, S2_E2 = {"dp_shard": 2, "etp": 2}, {"dp_shard": 4, "ep": 2, "etp": 2}
BIASES = {"model.moe.bias": True}

SLICE_CELLS = [
    Cell("etp2", S2, spec=EXPERTS, ci=True),
    Cell("etp2-of-4-bias", {"dp_shard": 4, "etp": 2}, spec=EXPERTS | BIASES, by_course=True),
    Cell("etp2-ep2", S2_E2, spec=EXPERTS | BALANCED, ci=True),
    Cell("etp2-ep2-kernels-reshard", S2_E2, spec=EXPERTS | KERNELS | RESHARD),
    Cell("etp4-two-experts", {"dp_shard": 8, "etp": 4}, spec=EXPERTS | TWO_EXPERTS, num_microbatches=8),
    Cell("etp2-pp2", {"pp": 2} | S2, spec=EXPERTS | SELECTIVE),
    Cell("etp2-zbv-pp2-ep2-reshard", V2 | S2_E2, "zbv", EXPERTS | RESHARD),
    Cell("etp2-tp2", T2 | {"etp": 2}, spec=EXPERTS),
    Cell("etp2-tp2-dp2-ep2", T2 | {"dp_shard": 2, "ep": 2, "etp": 2}, spec=EXPERTS | BIASES, by_course=True),
    Cell("etp2-cp2-hsdp", C2 | {"dp_replicate": 2, "etp": 2}, spec=EXPERTS),
    Cell("etp2-ep2-null", S2_E2, spec=EXPERTS | NULLS),
    Cell("etp2-null-ddp", S2 | {"etp": 2}, spec=EXPERTS | NULLS | {"sharding.mode": "ddp"}),
    Cell("etp2-ep2-capacity", S2_E2, spec=EXPERTS | LIMITED),
]
