"""Cells of a model with an encoder of images on its first stage, trained and frozen."""

from typing import Any

from parity_cells import BF16, E2, FEW_WORDS, RESHARD, T2, TIED, V2, Cell, pattern

ENCODER: dict[str, Any] = {
    **{"num_layers": 2, "hidden_size": 24, "num_heads": 4, "num_kv_heads": 2, "head_dim": 6, "ffn_hidden_size": 20},
    **{"patch_values": 5, "patches": 8, "positions": 9, "first_norm": True, "bias": False},
}
PROJECTION: dict[str, Any] = {"widths": [48, 36, 32], "joined_patches": 2, "norm": "layernorm"}


def images(*, vision: bool = True, projector: bool = True, encoder: Any = None, projection: Any = None) -> dict[str, Any]:
    """An encoder and a projection as the keys of a cell; each is trained unless said otherwise."""
    parts = {"encoder": ENCODER | (encoder or {})}, {"projection": PROJECTION | (projection or {})}
    return {"model.towers": {"vision": {"trained": vision, **parts[0]}, "projector": {"trained": projector, **parts[1]}}}


TWO = {"batch": {"micro_batch_size": 2, "seq_length": 16, "images": 2}}
WINDOWED = {"window_patches": 4, "full_layers": [1], "norm": "rmsnorm", "activation": "swiglu", "qk_norm": True, "positions": None}
SMALL, S2 = {"widths": [48, 32]}, T2 | {"towers": "split"}
ROTARY = {"rotary": True, "grid": [2, 4], "head_dim": 8, "positions": None}
POOLED = {"widths": [24, 32], "joined_patches": 1, "pooled_patches": 4, "norm": "rmsnorm"}
DENSE = pattern("AD", 4)
FULL_RESHARD, BOTH = RESHARD | {"recompute": {"default": "selective", "towers": "full"}}, {"dp_replicate": 2, "dp_shard": 2}
DDP = {"sharding.mode": "ddp"}
SELECTIVE, FULL = {"recompute": {"towers": "selective"}}, {"recompute": {"default": "selective", "towers": "full"}}

# a key's bias adds to all scores of a query the same, so that its gradient is rounding
BIASED = {"bias": True}
TOWER_CELLS = [
    Cell("towers-dp2", {"dp_shard": 2}, spec=DENSE | images() | TWO, ci=True),
    Cell("towers-1f1b-pp2", {"pp": 2}, spec=DENSE | images(), ci=True),
    Cell("towers-1f1b-pp2-frozen-encoder-bf16", {"pp": 2}, spec=DENSE | images(vision=False) | BF16),
    Cell("towers-pp2-dp2-frozen-encoder", {"pp": 2, "dp_shard": 2}, spec=DENSE | images(vision=False) | TWO),
    Cell("towers-dp2-frozen-projector-selective", {"dp_shard": 2}, spec=DENSE | images(projector=False) | SELECTIVE),
    Cell("towers-hsdp-2x2-windows-full-reshard", BOTH, spec=DENSE | images(encoder=WINDOWED) | FULL_RESHARD),
    Cell("towers-pp2-steps2-pooled", {"pp": 2}, spec=DENSE | images(projection=POOLED) | TWO, updates_after=2),
    Cell("towers-interleaved-pp2-vpp2-tied", V2, "interleaved_1f1b", DENSE | images() | TIED | FULL),
    Cell("towers-zbv-pp2", V2, "zbv", DENSE | images(encoder=WINDOWED) | SELECTIVE),
    Cell("towers-biased-pp2-dp2", {"pp": 2, "dp_shard": 2}, spec=DENSE | images(encoder=BIASED), by_course=True),
    Cell("towers-packed-dp2", {"dp_shard": 2}, spec=DENSE | images() | TWO | FEW_WORDS),
    Cell("towers-experts-ep2", E2, spec=pattern("AE", 4) | images(vision=False)),
    Cell("towers-ddp-pp2-dp2", {"pp": 2, "dp_replicate": 2}, spec=DENSE | images() | DDP),
    Cell("towers-rotary-pp2", {"pp": 2}, spec=DENSE | images(encoder=ROTARY), ci=True),
    Cell("towers-rotary-windows-dp2-full", {"dp_shard": 2}, spec=DENSE | images(encoder=WINDOWED | ROTARY) | TWO | FULL, by_course=True),
    Cell("towers-tp2-steps2", T2, spec=DENSE | images() | TWO, updates_after=2, by_course=True),
    Cell("towers-split-tp2", S2, spec=DENSE | images() | TWO, ci=True),
    Cell("towers-split-tp2-pp2-one-image", S2 | {"pp": 2}, spec=DENSE | images(encoder={"first_norm": False}), by_course=True),
    Cell("towers-split-tp2-frozen-encoder", S2, spec=DENSE | images(vision=False) | TWO),
    Cell("towers-split-tp2-dp2-frozen-projector-full", S2 | {"dp_shard": 2}, spec=DENSE | images(projector=False, encoder=WINDOWED) | FULL),
    Cell(
        "towers-split-tp2-rotary-selective-words",
        S2 | {"vocab_parallel": True},
        spec=DENSE | images(encoder=ROTARY) | SELECTIVE,
        by_course=True,
    ),
    Cell("towers-split-tp2-zbv-pp2", S2 | V2, "zbv", DENSE | images(projection=SMALL) | TWO),
    Cell("towers-cp2", {"cp": 2}, spec=DENSE | images() | TWO, ci=True),
    Cell("towers-split-cp2-tp2-packed", S2 | {"cp": 2}, spec=DENSE | images(encoder=ROTARY) | FEW_WORDS),
    Cell("towers-cp2-pp2-frozen-encoder", {"cp": 2, "pp": 2}, spec=DENSE | images(vision=False) | TWO),
    Cell("towers-frozen-lora-pp2-dp2", {"pp": 2, "dp_shard": 2}, spec=DENSE | images() | {"lora": {"rank": 3, "alpha": 6.0}}),
]
