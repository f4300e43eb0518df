"""Cells of the parity matrix with FSDP2's controls: parts kept between forward and backward, gathers further ahead, units."""

from parity_cells import BF16, DENSE, RECOMPUTED, RESHARD, T2, V2, Cell

PARTS = RESHARD | {"sharding.reshard_size": 2}
AHEAD = RESHARD | {"sharding.prefetch": 2}
FOUR = {"dp_shard": 4}
STAGES = {"sharding.wrap": "stage"}
PAIRS, TRIPLES = {"sharding.wrap": 2}, {"sharding.wrap": 3}

CONTROLS_CELLS = [
    Cell("parts-2-of-4", FOUR, spec=PARTS, ci=True),
    Cell("parts-2-of-4-bf16-recompute", FOUR, spec=PARTS | BF16 | DENSE | RECOMPUTED, by_course=True),
    Cell("parts-tp2-pp2", {"pp": 2, **FOUR} | T2, spec=PARTS, num_microbatches=8),
    Cell("parts-ahead-ep2-of-8", {"dp_shard": 8, "ep": 2}, spec=PARTS | AHEAD, num_microbatches=8),
    Cell("parts-zbv-pp2", V2 | FOUR, "zbv", PARTS, num_microbatches=4),
    Cell("stages-2", {"dp_shard": 2}, spec=STAGES, ci=True),
    Cell("stages-tp2-pp2", {"pp": 2, "dp_shard": 2} | T2, spec=STAGES | DENSE, num_microbatches=4),
    Cell("stages-pp2-bf16", {"pp": 2, "dp_shard": 2}, spec=STAGES | DENSE | BF16, num_microbatches=4),
    Cell("stages-whole-pp2-bf16", {"pp": 2}, spec=STAGES | DENSE | BF16, num_microbatches=4),
    Cell("stages-hsdp-recompute", {"dp_replicate": 2, "dp_shard": 3}, spec=STAGES | DENSE | RECOMPUTED, num_microbatches=12),
    Cell("units-2-of-2", {"dp_shard": 2}, spec=PAIRS, ci=True),
    Cell("units-3-tp2-pp2", {"pp": 2, "dp_shard": 2} | T2, spec=TRIPLES),
    Cell("units-2-pp2-bf16", {"pp": 2, "dp_shard": 2}, spec=PAIRS | DENSE | BF16 | RESHARD),
    Cell("units-3-hsdp-recompute", {"dp_replicate": 2, "dp_shard": 3}, spec=TRIPLES | DENSE | RECOMPUTED, num_microbatches=12),
    Cell("units-2-parts-ahead-ep2-of-8", {"dp_shard": 8, "ep": 2}, spec=PAIRS | PARTS | AHEAD, num_microbatches=8),
    Cell("units-2-zbv-pp2", V2 | {"dp_shard": 2}, "zbv", PAIRS | DENSE),
    Cell("units-3-ddp", {"dp_shard": 2}, spec=TRIPLES | {"sharding.mode": "ddp"}, ci=True),
    Cell("units-3-whole-pp2-bf16", {"pp": 2}, spec=TRIPLES | DENSE | BF16),
    Cell("ahead-2-ep2", {**FOUR, "ep": 2}, spec=AHEAD, ci=True),
    Cell("ahead-2-pp2", {"pp": 2, "dp_shard": 2}, spec=AHEAD, num_microbatches=4),
]
