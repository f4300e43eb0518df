"""Cells of layers that read keys and values of an earlier layer, or its choice of keys, in their stage and over its boundaries."""

from itertools import pairwise
from typing import Any

from choice_cells import choosing
from parity_cells import (
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
    TIED,
    V2,
    V4,
    Cell,
    pattern,
)
from stream_cells import TURNS, WHOLE, grouped

HEADS = {"kind": "gqa", "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "qk_norm": True}


def keys(letters: str, groups: dict[int, list[int]], layers: int = 8, **more: Any) -> dict[str, Any]:
    shared = [{"source": source, "layers": readers} for source, readers in groups.items()]
    return pattern(letters, layers, attention=HEADS | {"shared_keys": shared} | more)


def cut(*cuts: int, layers: int = 8) -> list[list[int]]:
    return [list(span) for span in pairwise((0, *cuts, layers))]


ONE = keys("AD", {0: [2, 4, 6]})
TWO = keys("AD", {0: [4], 2: [6]})
FAR = keys("AD", {0: [6]})
MIXED = keys("AMADA", {0: [2, 4], 5: [7]})
EXPERTS = keys("AE", {0: [2, 6]})
CHOSEN = pattern("AD", attention=choosing([0], [2, 6]))
CHOSEN_TWICE = pattern("AE", attention=choosing([0, 4], [2, 6]))
BARE = keys("AD", {0: [2, 6]}, qk_norm=False, nope_layers=[0, 2, 6])
ALL_RECOMPUTED = {"recompute": {"default": "full"}}
PAYLOAD_CELLS = [
    Cell("keys-alone-dp2-reshard", {"dp_shard": 2}, spec=TWO | RESHARD),
    Cell("keys-tp2", T2, spec=ONE, by_course=True),
    Cell("keys-cp2", C2, spec=MIXED, by_course=True),
    Cell("keys-1f1b-pp2", {"pp": 2}, spec=ONE, spans=cut(3), ci=True),
    Cell("keys-1f1b-pp2-even", {"pp": 2}, spec=MIXED, spans=cut(4)),
    Cell("keys-1f1b-pp4-passed-through", {"pp": 4}, spec=FAR, spans=cut(1, 3, 5)),
    Cell("keys-gpipe-pp2-full", {"pp": 2}, "gpipe", MIXED | RECOMPUTED, spans=cut(3)),
    Cell("keys-gpipe-pp4-two-groups", {"pp": 4}, "gpipe", TWO, spans=cut(2, 3, 5)),
    Cell("keys-interleaved-pp2-vpp2", V2, "interleaved_1f1b", TWO, spans=cut(1, 3, 5)),
    Cell("keys-interleaved-pp2-vpp2-tied", V2, "interleaved_1f1b", ONE | TIED, spans=cut(2, 4, 6), by_course=True),
    Cell("keys-looped-bfs-pp2-vpp2", V2, "looped_bfs", FAR, spans=cut(2, 3, 5)),
    Cell("keys-interleaved-zero-bubble-pp2-vpp2", V2, "interleaved_zero_bubble", TWO, spans=cut(1, 3, 6)),
    Cell("keys-zbv-pp2", V2, "zbv", ONE, spans=cut(1, 3, 5), ci=True),
    Cell("keys-zbv-pp2-selective-reshard", V2, "zbv", MIXED | SELECTIVE | RESHARD, spans=cut(1, 3, 6)),
    Cell("keys-zbv-pp2-no-norms", V2, "zbv", BARE, spans=cut(1, 3, 5)),
    Cell("keys-zbv-pp4", V4, "zbv", ONE, num_microbatches=8),
    Cell("keys-dualpipev-pp2-full", V2, "dualpipev", EXPERTS | RECOMPUTED_ATTENTION, spans=cut(1, 3, 5)),
    Cell("keys-dualpipe-pp2", {"pp": 2}, "dualpipe", TWO, spans=cut(3)),
    Cell("keys-turns-dualpipev-pp2-ep2", V2 | E2, "dualpipev", EXPERTS | TURNS, num_microbatches=8, by_course=True),
    Cell("keys-paired-1f1b-pp2-ep2", {"pp": 2} | E2, "paired_1f1b", EXPERTS | TURNS, spans=cut(3), num_microbatches=8, by_course=True),
    Cell("keys-dp2-pp2-reshard", {"dp_shard": 2, "pp": 2}, spec=TWO | RESHARD, spans=cut(3)),
    Cell("keys-ddp2-pp2", {"dp_replicate": 2, "pp": 2}, spec=ONE | {"sharding.mode": "ddp"}, spans=cut(5)),
    Cell("keys-wrap-stage-dp2-pp2", {"dp_shard": 2, "pp": 2}, spec=TWO | WHOLE, spans=cut(3), by_course=True),
    Cell("keys-tp2-pp2-vocab", T2V | {"pp": 2}, spec=TWO, spans=cut(3), by_course=True),
    Cell("keys-tp2-pp2-full", T2 | {"pp": 2}, spec=ONE | ALL_RECOMPUTED, spans=cut(1), by_course=True),
    Cell("keys-cp4-tp2-pp2", C4 | T2 | {"pp": 2}, spec=ONE | LONG, spans=cut(3), by_course=True),
    Cell("keys-cp2-pp2-window", C2 | {"pp": 2}, spec=keys("AD", {0: [2, 6]}, window_size=6), spans=cut(5), by_course=True),
    Cell("keys-packed-cp2-pp2", C2 | {"pp": 2}, spec=FEW_WORDS | TWO, spans=cut(3), by_course=True),
    Cell("keys-packed-pp2-kernels", {"pp": 2}, spec=PACKED | KERNELS | ONE, spans=cut(3)),
    Cell("keys-pp2-shared-norms", {"pp": 2}, spec=TWO | {"model.parallel_layers": [1, 3, 7]}, spans=cut(4)),
    Cell("keys-pp2-streams", {"pp": 2}, spec=TWO | {"model.streams": {"count": 2, "mixing": "independent"}}, spans=cut(3)),
    Cell("keys-pp4-earlier-values", {"pp": 4}, spec=TWO | grouped(3), spans=cut(1, 3, 5)),
    Cell("keys-pp2-values-of-keys", {"pp": 2}, spec=keys("AD", {0: [6]}, value_norm=True, values_from_keys=True), spans=cut(3)),
    Cell("choice-1f1b-pp2-cut", {"pp": 2}, spec=CHOSEN, spans=cut(3), ci=True),
    Cell("choice-1f1b-pp4-passed-through", {"pp": 4}, spec=pattern("AD", attention=choosing([0], [6])), spans=cut(1, 3, 5)),
    Cell("choice-interleaved-pp2-vpp2-cut", V2, "interleaved_1f1b", CHOSEN, spans=cut(1, 3, 5)),
    Cell("choice-zbv-pp2-cut-full", V2, "zbv", CHOSEN | ALL_RECOMPUTED, spans=cut(1, 3, 5)),
    Cell("choice-dualpipev-pp2-cut", V2, "dualpipev", CHOSEN_TWICE | RECOMPUTED_ATTENTION, spans=cut(1, 3, 5)),
    Cell("choice-tp2-dp2-pp2-cut", T2 | {"pp": 2, "dp_shard": 2}, spec=CHOSEN_TWICE | RESHARD, spans=cut(5), by_course=True),
    Cell("choice-cp2-pp2-cut", C2 | {"pp": 2}, spec=CHOSEN | SELECTIVE, spans=cut(3), by_course=True),
    Cell("choice-packed-pp2-cut", {"pp": 2}, spec=PACKED | CHOSEN, spans=cut(1)),
    Cell("choice-pp2-bf16-cut", {"pp": 2}, spec=CHOSEN | {"precision.params": "bf16"}, spans=cut(3)),
    Cell("keys-pp2-bf16", {"pp": 2}, spec=TWO | {"precision.params": "bf16"}, spans=cut(3)),
]  # fmt: skip
