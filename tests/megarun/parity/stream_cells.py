"""Cells of other residual paths, with more at a stage boundary: several streams (hyper-connections), or values of earlier layers.

Streams begin as copies of one, and queries of attention residuals at zero, so that gradients of their differences are small differences of
large sums: where ranks sum, every step is compared with the change that one unit in the last place of the parameters makes.
"""

from typing import Any

from parity_cells import (
    BF16,
    C2,
    C4,
    E2,
    FEW_WORDS,
    KERNELS,
    LONG,
    PACKED,
    RECOMPUTED,
    RECOMPUTED_ATTENTION,
    RESHARD,
    SELECTIVE,
    T2,
    T2V,
    T4,
    TIED,
    UNEVEN,
    V2,
    V4,
    Cell,
    pattern,
)
from parity_model import INDEXED, KDA

MIXED: dict[str, Any] = {"model.streams": {"count": 4, "mixing": "constrained"}}
SEPARATE: dict[str, Any] = {"model.streams": {"count": 3, "mixing": "independent", "post_scale": 1.3}}
ALL = MIXED | pattern("AMEDR")
STREAM_CELLS = [
    Cell("streams-1f1b-pp2", {"pp": 2}, spec=ALL),
    Cell("streams-separate-1f1b-pp4-uneven", {"pp": 4}, spec=SEPARATE | pattern("AD"), spans=UNEVEN),
    Cell("streams-gpipe-pp2-full", {"pp": 2}, "gpipe", ALL | RECOMPUTED),
    Cell("streams-interleaved-pp2-vpp2-tied", V2, "interleaved_1f1b", MIXED | TIED | pattern("AD"), ci=True, by_course=True),
    Cell("streams-looped-bfs-pp2-vpp2", V2, "looped_bfs", SEPARATE | pattern("AD")),
    Cell("streams-interleaved-zero-bubble-pp2-vpp2", V2, "interleaved_zero_bubble", MIXED | pattern("AD")),
    Cell("streams-zbv-pp2-selective-reshard", V2, "zbv", MIXED | pattern("AMEDR") | SELECTIVE | RESHARD),
    Cell("streams-zbv-pp4", V4, "zbv", SEPARATE | pattern("AD"), num_microbatches=8),
    Cell("streams-dualpipev-pp2-full", V2, "dualpipev", MIXED | pattern("AE") | RECOMPUTED_ATTENTION),
    Cell("streams-dp2-reshard", {"dp_shard": 2}, spec=ALL | RESHARD, by_course=True),
    Cell("streams-dp2-replicated", {"dp_replicate": 2}, spec=SEPARATE | pattern("AE"), by_course=True),
    Cell("streams-ep2-tp2-dp2", T2 | E2, spec=ALL, ci=True, by_course=True),
    Cell("streams-tp2-vocab", T2V, spec=SEPARATE | pattern("AMED"), by_course=True),
    Cell("streams-tp4-pp2-full", T4 | {"pp": 2}, spec=MIXED | pattern("D") | RECOMPUTED, by_course=True),
    Cell("streams-cp2-scaled-norms", C2, spec=ALL | {"model.norm_placement": "both", "model.mlp.output_multiplier": 0.5}, by_course=True),
    Cell("streams-cp4-tp2-pp2", C4 | T2 | {"pp": 2}, spec=MIXED | LONG | pattern("AD"), by_course=True),
    Cell("streams-indexer-pp2-selective", {"pp": 2}, spec=SEPARATE | pattern("AE", attention=INDEXED) | SELECTIVE),
    Cell("streams-kda-packed-cp2-pp2", C2 | {"pp": 2}, spec=FEW_WORDS | MIXED | pattern("AG", linear_attention=KDA), by_course=True),
    Cell("streams-packed-pp2-head", {"pp": 2}, spec=PACKED | MIXED | KERNELS | pattern("AD")),
]  # fmt: skip

WHOLE = {"sharding.wrap": "stage"}
TURNS = {"host.moe_overlap": True}
WIDE, NARROW = BF16 | {"precision.families": {"M": "fp32", "E": "fp32"}}, {"precision.families": {"A": "bf16", "D": "bf16"}}
SCALED: dict[str, Any] = {"model.norm_placement": "both", "model.mlp.output_multiplier": 0.5}


def grouped(layers: int) -> dict[str, Any]:
    return {"model.attention_residuals": {"group_layers": layers}}


DEPTH_CELLS = [
    Cell("depth-1f1b-pp2", {"pp": 2}, spec=grouped(2) | pattern("AMEDR"), ci=True),
    Cell("depth-1f1b-pp4-uneven-each", {"pp": 4}, spec=grouped(1) | pattern("AD"), spans=UNEVEN),
    Cell("depth-gpipe-pp2-full", {"pp": 2}, "gpipe", grouped(3) | pattern("AMEDR") | RECOMPUTED),
    Cell("depth-interleaved-pp2-vpp2-tied", V2, "interleaved_1f1b", grouped(2) | TIED | pattern("AD")),
    Cell("depth-looped-bfs-pp2-vpp2", V2, "looped_bfs", grouped(5) | pattern("AD")),
    Cell("depth-interleaved-zero-bubble-pp2-vpp2", V2, "interleaved_zero_bubble", grouped(2) | pattern("AD")),
    Cell("depth-zbv-pp2-selective-reshard", V2, "zbv", grouped(3) | pattern("AMEDR") | SELECTIVE | RESHARD),
    Cell("depth-zbv-pp4", V4, "zbv", grouped(2) | pattern("AD"), num_microbatches=8),
    Cell("depth-dualpipev-pp2-full", V2, "dualpipev", grouped(2) | pattern("AE") | RECOMPUTED_ATTENTION),
    Cell("depth-dualpipe-pp2", {"pp": 2}, "dualpipe", grouped(2) | pattern("AD")),
    Cell("depth-families-pp2", {"pp": 2}, spec=grouped(2) | pattern("AMEDR") | WIDE, ci=True),
    Cell("depth-families-zbv-pp2-full", V2, "zbv", grouped(3) | pattern("AD") | NARROW | RECOMPUTED),
    Cell("depth-families-dp2-reshard", {"dp_shard": 2}, spec=grouped(1) | pattern("AMED", 4) | WIDE | RESHARD, by_course=True),
    Cell("depth-dp2-reshard", {"dp_shard": 2}, spec=grouped(2) | pattern("AMEDR") | RESHARD),
    Cell("depth-ddp2-pp2", {"dp_replicate": 2, "pp": 2}, spec=grouped(2) | pattern("AE") | {"sharding.mode": "ddp"}),
    Cell("depth-wrap-stage-dp2-pp2", {"dp_shard": 2, "pp": 2}, spec=grouped(2) | pattern("AD") | WHOLE, by_course=True),
    Cell("depth-ep2-tp2-dp2", T2 | E2, spec=grouped(3) | pattern("AMEDR"), ci=True),
    Cell("depth-tp2-vocab", T2V, spec=grouped(1) | pattern("AMED"), by_course=True),
    Cell("depth-tp4-pp2-full", T4 | {"pp": 2}, spec=grouped(2) | pattern("D") | RECOMPUTED, by_course=True),
    Cell("depth-cp2-scaled-norms", C2, spec=grouped(2) | pattern("AMEDR") | SCALED, by_course=True),
    Cell("depth-cp4-tp2-pp2", C4 | T2 | {"pp": 2}, spec=grouped(2) | LONG | pattern("AD")),
    Cell("depth-indexer-pp2-selective", {"pp": 2}, spec=grouped(2) | pattern("AE", attention=INDEXED) | SELECTIVE),
    Cell("depth-kda-packed-cp2-pp2", C2 | {"pp": 2}, spec=FEW_WORDS | grouped(2) | pattern("AG", linear_attention=KDA)),
    Cell("depth-packed-pp2-head", {"pp": 2}, spec=PACKED | grouped(2) | KERNELS | pattern("AD")),
    Cell("depth-turns-dualpipev-pp2-ep2", V2 | E2, "dualpipev", grouped(2) | pattern("AE") | TURNS, num_microbatches=8, by_course=True),
]  # fmt: skip
