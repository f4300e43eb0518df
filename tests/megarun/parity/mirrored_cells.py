"""Cells of the parity matrix of schedules that torch does not have: `dualpipe`, with two copies of the model, and `paired_1f1b`."""

from feature_cells import MTP_TOO, NGRAM, RELATIONS, SIDES
from lora_cells import LORA
from parity_cells import (
    ADAMW,
    BALANCED,
    BF16,
    C2,
    DENSE,
    E2,
    EXPERTS,
    KERNELS,
    LIMITED,
    PACKED,
    RECOMPUTED,
    RESHARD,
    ROUTED,
    STATES,
    T2,
    T2V,
    TIED,
    UNEVEN,
    V2,
    Cell,
    pattern,
)
from tower_cells import TWO as TWO_IMAGES
from tower_cells import images

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
    Cell("dualpipe-pp2-mtp-sides-packed", P2, "dualpipe", DENSE | SIDES | MTP_TOO | PACKED, by_course=True),
    Cell("dualpipe-pp2-ngram-relations-tied", P2, "dualpipe", DENSE | NGRAM | RELATIONS | TIED, by_course=True),
    Cell("dualpipe-pp2-capacity", P2, "dualpipe", EXPERTS | LIMITED | BALANCED),
    Cell("dualpipe-pp2-kernels", P2, "dualpipe", DENSE | KERNELS),
    Cell("dualpipe-pp2-lora", P2, "dualpipe", pattern("AD", 4) | LORA),
    Cell("dualpipe-pp2-towers", P2, "dualpipe", pattern("AD", 4) | images() | TWO_IMAGES, by_course=True),
    Cell("paired-pp2", P2, "paired_1f1b", ci=True),
    Cell("paired-pp4-uneven", P4, "paired_1f1b", num_microbatches=6, spans=UNEVEN),
    Cell("paired-pp2-vpp2-two-steps", V2, "paired_1f1b", num_microbatches=8, updates_after=2),
    Cell("paired-pp2-cp2", P2 | C2, "paired_1f1b", DENSE),
    Cell("paired-pp2-vpp2-tp2-experts-tied", V2 | T2, "paired_1f1b", EXPERTS | TIED),
    Cell("paired-pp2-mtp-packed", P2, "paired_1f1b", DENSE | MTP_TOO | PACKED, by_course=True),
]
