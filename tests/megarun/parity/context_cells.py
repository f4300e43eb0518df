"""Cells of context parallelism in addition to `parity_cells`: single families, packed rows, every schedule, features, all axes."""

from feature_cells import NGRAM, RELATIONS, STRUCTURE, WINDOWED
from parity_cells import (
    C2,
    C4,
    DENSE,
    E2,
    EXPERTS,
    FEW_WORDS,
    GENTLE,
    LATENT,
    LONG,
    RESHARD,
    ROUTED,
    SELECTIVE,
    STATES,
    T2,
    UNBIASED,
    V2,
    Cell,
    pattern,
)
from parity_model import INDEXED, KDA, MLA

C8, LATENTS = {"cp": 8}, {"context_exchange": "latents"}
CONTEXT_CELLS = [
    # single families without a carried state
    Cell("cp2-experts-alone", C2, spec=pattern("E", 2)),
    Cell("cp4-dense-alone", C4, spec=pattern("D", 2)),
    # carried states, with other axes
    Cell("cp4-mamba-pp2", C4 | {"pp": 2}, spec=pattern("M", 4) | LONG),
    Cell("cp2-recurrent-pp2-dp2", C2 | {"pp": 2, "dp_shard": 2}, spec=pattern("R", 4)),
    Cell("cp4-dp2-reshard", C4 | {"dp_shard": 2}, spec=LONG | RESHARD),
    Cell("cp2-pp2-steps2", C2 | {"pp": 2}, updates_after=2),
    # the schedules
    Cell("cp2-gpipe-pp2-ep2", C2 | {"pp": 2, "ep": 2}, "gpipe"),
    Cell("cp2-looped-bfs-pp2-vpp2", C2 | V2, "looped_bfs"),
    Cell("cp2-zero-bubble-pp2-vpp2-states", C2 | V2, "interleaved_zero_bubble", STATES | UNBIASED, by_course=True),
    Cell("cp2-dualpipev-pp2", C2 | V2, "dualpipev"),
    Cell("cp4-zbv-pp2-latent", C4 | V2, "zbv", LATENT | LONG),
    # latents gathered, and expanded by groups of heads
    Cell("cp2-latents", C2 | LATENTS, spec=pattern("A", 3, attention=MLA), ci=True),
    Cell(
        "cp4-dp2-latents-nope",
        C4 | {"dp_shard": 2} | LATENTS,
        spec=pattern("A", 3, attention={**MLA, "nope_layers": [1], "window_size": 6}),
    ),
    Cell("cp4-zbv-pp2-latents", C4 | V2 | LATENTS, "zbv", LATENT | LONG | RELATIONS),
    Cell("packed-cp2-tp2-latents-recompute", C2 | T2 | LATENTS, spec=FEW_WORDS | UNBIASED | LATENT | SELECTIVE),
    Cell(
        "cp8-latents-kda",
        C8 | LATENTS,
        spec=pattern("GA", 3, linear_attention=KDA, attention={**MLA, "nope_layers": [1]}) | {"batch.seq_length": 64},
    ),
    Cell("cp2-tp2-latents-sinks", C2 | T2 | LATENTS, spec=pattern("A", 3, attention={**MLA, "sinks": True})),
    Cell("packed-cp4-latents-sinks", C4 | LATENTS, spec=FEW_WORDS | LONG | pattern("A", 2, attention={**MLA, "sinks": True}) | RELATIONS),
    Cell("cp2-tp2-latents-indexed", C2 | T2 | LATENTS, spec=pattern("A", 3, attention=INDEXED)),
    # documents that end within a rank's piece, and between two
    Cell("packed-cp2-attention", C2, spec=FEW_WORDS | pattern("A", 2)),
    Cell("packed-cp2-mamba", C2, spec=FEW_WORDS | UNBIASED | pattern("M", 2)),
    Cell("packed-cp4-recurrent", C4, spec=FEW_WORDS | LONG | pattern("R", 2)),
    Cell("packed-cp4", C4, spec=FEW_WORDS | UNBIASED | LONG),
    Cell("packed-cp2-pp2-dp2", C2 | {"pp": 2, "dp_shard": 2}, spec=FEW_WORDS | UNBIASED),
    Cell("packed-cp2-tp2-latent", C2 | T2, spec=FEW_WORDS | UNBIASED | LATENT),
    # features and losses of the routers
    Cell("router-losses-cp2-dualpipev-ep2", C2 | V2 | {"ep": 2}, "dualpipev", EXPERTS | ROUTED),
    Cell("router-losses-cp2-tp2-dp2-ep4", C2 | T2 | {"dp_shard": 2, "ep": 4}, spec=EXPERTS | ROUTED),
    Cell("router-losses-packed-cp2-ep2-dp2", C2 | E2, spec=FEW_WORDS | EXPERTS | ROUTED),
    Cell("ngram-structure-cp4-packed", C4, spec=DENSE | FEW_WORDS | NGRAM | STRUCTURE),
    Cell("windows-cp4-tp2", C4 | T2, spec=DENSE | WINDOWED | LONG | GENTLE),
]
