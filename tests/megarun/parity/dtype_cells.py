"""Cells whose layers compute in several dtypes (`precision.families`), and those in fp16, whose losses are scaled."""

from parity_cells import BF16, E2, EXPERTS, GENTLE, RECOMPUTED, RESHARD, ROUTED, T2, V2, Cell, pattern

WIDE = BF16 | {"precision.families": {"M": "fp32", "E": "fp32"}}
NARROW = {"precision.families": {"A": "bf16", "D": "bf16"}}
FP16 = {"precision.params": "fp16"}
DTYPE_CELLS = [
    Cell("families-1f1b-pp2", {"pp": 2}, spec=WIDE, ci=True),
    Cell("families-zbv-pp2-narrow", V2, "zbv", NARROW),
    Cell("families-interleaved-pp2-recompute", V2, "interleaved_1f1b", WIDE | RECOMPUTED),
    Cell("families-dp2-reshard", {"dp_shard": 2}, spec=pattern("AMED", 4) | WIDE | RESHARD, by_course=True),
    Cell("families-ddp-narrow", {"dp_replicate": 2}, spec=NARROW | {"sharding.mode": "ddp"}, by_course=True),
    Cell("fp16-1f1b-pp2-router-losses", {"pp": 2}, spec=EXPERTS | ROUTED | FP16, ci=True),
    Cell("fp16-gpipe-pp2", {"pp": 2}, "gpipe", FP16),
    Cell("fp16-interleaved-pp2", V2, "interleaved_1f1b", FP16),
    Cell("fp16-looped-bfs-pp2", V2, "looped_bfs", FP16),
    Cell("fp16-zero-bubble-pp2", V2, "interleaved_zero_bubble", FP16),
    Cell("fp16-zbv-pp2", V2, "zbv", FP16),
    Cell("fp16-dualpipev-pp2", V2, "dualpipev", FP16),
    Cell("fp16-dp2", {"dp_shard": 2}, spec=pattern("AD", 4) | FP16, by_course=True),
    Cell("fp16-tp2-ep2", T2 | E2, spec=EXPERTS | FP16 | GENTLE, by_course=True),
]
