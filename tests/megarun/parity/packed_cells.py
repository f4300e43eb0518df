"""Cells of the parity matrix with several documents in a row."""

from parity_cells import (
    CHOOSING,
    E2,
    EXPERTS,
    FEW_WORDS,
    LATENT,
    PACKED,
    RECOMPUTED,
    SELECTIVE,
    STATES,
    T2,
    T2V,
    TIED,
    UNBIASED,
    UNEVEN,
    V2,
    Cell,
)

PACKED_CELLS = [
    Cell("packed-1f1b-pp2", {"pp": 2}, spec=PACKED),
    Cell("packed-gpipe-pp4-uneven", {"pp": 4}, "gpipe", PACKED, spans=UNEVEN),
    Cell("packed-looped-bfs-pp2-vpp2", V2, "looped_bfs", PACKED),
    Cell("packed-interleaved-pp2-vpp2-recompute", V2, "interleaved_1f1b", PACKED | RECOMPUTED),
    Cell("packed-zero-bubble-pp2-vpp2", V2, "interleaved_zero_bubble", PACKED),
    Cell("packed-1f1b-pp2-indexer", {"pp": 2}, spec=PACKED | CHOOSING),
    Cell("packed-tp2-ep2-dp2-indexer", T2 | E2, spec=FEW_WORDS | CHOOSING),
    Cell("packed-zbv-pp2-latent", V2, "zbv", PACKED | LATENT, ci=True),
    Cell("packed-dualpipev-pp2-selective", V2, "dualpipev", PACKED | SELECTIVE),
    Cell("packed-dp2", {"dp_shard": 2}, spec=PACKED),
    Cell("packed-hsdp-2x2-states", {"dp_replicate": 2, "dp_shard": 2}, spec=PACKED | STATES | UNBIASED),
    Cell("packed-tp2-dp2", T2 | {"dp_shard": 2}, spec=FEW_WORDS),
    Cell("packed-1f1b-pp2-tp2-vocabulary", T2V | {"pp": 2}, spec=FEW_WORDS | TIED),
    Cell("packed-zbv-pp2-ep2", V2 | E2, "zbv", FEW_WORDS | EXPERTS),
    Cell("packed-tp2-ep2-dp2", T2 | E2, spec=FEW_WORDS | LATENT | UNBIASED),
]
