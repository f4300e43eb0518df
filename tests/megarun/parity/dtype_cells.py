"""Cells whose layers compute in several dtypes (`precision.families`), and those in fp16, whose losses are scaled."""

from parity_cells import BF16, E2, EXPERTS, GENTLE, OTHER, RECOMPUTED, RESHARD, ROUTED, T2, V2, Cell, pattern

WIDE = BF16 | {"precision.families": {"M": "fp32", "E": "fp32"}}
NARROW = {"precision.families": {"A": "bf16", "D": "bf16"}}
FP16 = {"precision.params": "fp16"}
SHARED = pattern("AD", 8) | {"model.parallel_layers": [1, 3, 5, 7]}
THREE = pattern("MAD", 6) | {"model.parallel_layers": [1, 2, 4, 5]}
OF_MLP, OF_ATTENTION = (BF16 | {"precision.families": {letter: "fp32"}} for letter in "DA")
LOW = {"precision.recipe": {"name": "fp8_rowwise"}}
PACKING = {"precision.recipe": {"name": "fp8_current", "param_gather": True}, "sharding.reshard_after_forward": True}
DTYPE_CELLS = [
    Cell("families-1f1b-pp2", {"pp": 2}, spec=WIDE, ci=True),
    Cell("families-zbv-pp2-narrow", V2, "zbv", NARROW),
    Cell("families-interleaved-pp2-recompute", V2, "interleaved_1f1b", WIDE | RECOMPUTED),
    Cell("families-dp2-reshard", {"dp_shard": 2}, spec=pattern("AMED", 4) | WIDE | RESHARD, by_course=True),
    Cell("families-ddp-narrow", {"dp_replicate": 2}, spec=NARROW | {"sharding.mode": "ddp"}, by_course=True),
    Cell("families-shared-norm-pp2-full", {"pp": 2}, spec=SHARED | OF_MLP | RECOMPUTED),
    Cell("families-shared-norm-zbv-pp2", V2, "zbv", SHARED | OF_ATTENTION),
    Cell("families-shared-norm-of-three-pp2", {"pp": 2}, spec=THREE | OF_ATTENTION, spans=[[0, 3], [3, 6]]),
    Cell("families-recipe-pp2", {"pp": 2}, spec=pattern("AMDR", 4) | WIDE | LOW, ci=True),
    Cell("families-recipe-zbv-pp2-shared-norm-narrow", V2, "zbv", SHARED | {"precision.families": {"D": "bf16"}} | LOW),
    Cell("families-recipe-dp2-packed", {"dp_shard": 2}, spec=pattern("AD", 4) | OF_MLP | PACKING, tolerance=OTHER),
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
