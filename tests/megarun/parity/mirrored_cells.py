"""Cells of the parity matrix with two copies of the model, in which microbatches run in opposite directions: `schedule.kind: dualpipe`."""

from parity_cells import ADAMW, BF16, C2, DENSE, E2, EXPERTS, PACKED, RECOMPUTED, RESHARD, ROUTED, STATES, T2, T2V, TIED, UNEVEN, Cell

P2, P4, TWO = {"pp": 2}, {"pp": 4}, {"dp_shard": 2}

MIRRORED_CELLS = [
    Cell("dualpipe-pp2", P2, "dualpipe", ci=True),
    Cell("dualpipe-pp4", P4, "dualpipe", num_microbatches=8, ci=True),
    Cell("dualpipe-pp4-uneven", P4, "dualpipe", num_microbatches=10, spans=UNEVEN),
    Cell("dualpipe-pp2-two-steps", P2, "dualpipe", num_microbatches=8, updates_after=2),
    Cell("dualpipe-pp2-recompute", P2, "dualpipe", RECOMPUTED),
    Cell("dualpipe-pp2-experts-tied", P2, "dualpipe", EXPERTS | TIED),
    Cell("dualpipe-pp2-states", P2, "dualpipe", STATES),
    Cell("dualpipe-pp2-packed", P2, "dualpipe", PACKED),
    Cell("dualpipe-pp2-bf16", P2, "dualpipe", BF16 | DENSE | ADAMW, by_course=True),
    Cell("dualpipe-pp2-dp2-reshard", P2 | TWO, "dualpipe", RESHARD, num_microbatches=8),
    Cell("dualpipe-pp2-dp2-ddp", P2 | TWO, "dualpipe", {"sharding.mode": "ddp"}, num_microbatches=8),
    Cell("dualpipe-pp2-hsdp", P2 | {"dp_replicate": 2}, "dualpipe", num_microbatches=8),
    Cell("dualpipe-pp2-ep2", P2 | E2, "dualpipe", EXPERTS | ROUTED, num_microbatches=8),
    Cell("dualpipe-pp2-tp2", P2 | T2, "dualpipe"),
    Cell("dualpipe-pp2-tp2-vocabulary", P2 | T2V, "dualpipe", TIED),
    Cell("dualpipe-pp2-cp2", P2 | C2, "dualpipe", DENSE),
]
