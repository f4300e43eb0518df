"""Cells of layers that attend to the keys that an earlier layer chose."""

from typing import Any

from parity_cells import (
    C2,
    C4,
    E2,
    FEW_WORDS,
    PACKED,
    RECOMPUTED_ATTENTION,
    RESHARD,
    SELECTIVE,
    T2,
    V2,
    Cell,
    pattern,
)
from parity_model import MLA


def choosing(layers: list[int], shared: list[int], **settings: Any) -> dict[str, Any]:
    return {**MLA, "indexer": {"num_heads": 2, "head_dim": 6, "top_k": 5, "layers": layers, "shared_layers": shared}, **settings}


PAIRS = pattern("A", attention=choosing([0, 2, 4, 6], [1, 3, 5, 7]))
GROUPS = pattern("AE", attention=choosing([0, 4], [2, 6]))
THREE = pattern("AD", 6, attention=choosing([0], [2, 4]))
SINKS = pattern("AD", 6, attention=choosing([0], [2, 4], sinks=True))
WHOLE = {"recompute": {"default": "full"}}
CHOICE_CELLS = [
    Cell("choice-1f1b-pp2", {"pp": 2}, spec=GROUPS),
    Cell("choice-1f1b-pp2-recompute", {"pp": 2}, spec=GROUPS | RECOMPUTED_ATTENTION),
    Cell("choice-interleaved-pp2-vpp2", V2, "interleaved_1f1b", PAIRS),
    Cell("choice-zbv-pp2-selective-reshard", V2, "zbv", PAIRS | SELECTIVE | RESHARD),
    Cell("choice-zbv-pp2-full", V2, "zbv", PAIRS | WHOLE),
    Cell("choice-dp2-reshard", {"dp_shard": 2}, spec=THREE | RESHARD),
    Cell("choice-dp2-shared-norms", {"dp_shard": 2}, spec=THREE | {"model.parallel_layers": [1, 3, 5]}),
    Cell("choice-tp2", T2, spec=THREE),
    Cell("choice-tp2-dp2-pp2-recompute", T2 | {"pp": 2, "dp_shard": 2}, spec=GROUPS | RECOMPUTED_ATTENTION | RESHARD, by_course=True),
    Cell("choice-cp2", C2, spec=THREE, ci=True),
    Cell("choice-cp4-window", C4, spec=pattern("A", 3, attention=choosing([0], [1, 2], window_size=9))),
    Cell("choice-cp2-pp2-selective", C2 | {"pp": 2}, spec=GROUPS | SELECTIVE, by_course=True),
    Cell("choice-cp2-tp2-dp2-full", C2 | T2 | {"dp_shard": 2}, spec=THREE | WHOLE),
    Cell("choice-cp2-tp2-sinks", C2 | T2, spec=SINKS, ci=True),
    Cell("choice-pp2-sinks-selective", {"pp": 2}, spec=pattern("AE", attention=choosing([0, 4], [2, 6], sinks=True)) | SELECTIVE),
    Cell("choice-packed-cp4-dp2-sinks-full", C4 | {"dp_shard": 2}, spec=FEW_WORDS | SINKS | WHOLE | RESHARD),
    Cell("choice-packed-pp2", {"pp": 2}, spec=PACKED | GROUPS),
    Cell("choice-packed-cp2-ep2", C2 | {"ep": 2}, spec=FEW_WORDS | GROUPS),
    Cell("choice-packed-tp2-ep2-dp2", T2 | E2, spec=FEW_WORDS | GROUPS),
]
