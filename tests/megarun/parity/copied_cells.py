"""Cells of the parity matrix in which every data rank has whole parameters, gradients and optimizer state: `sharding.mode: ddp`."""

from typing import Any

from parity_cells import BF16, DENSE, E2, E4, EXPERTS, PACKED, RECOMPUTED, RESHARD, ROUTED, T2, T2V, TIED, V2, Cell
from parity_model import MLA

DDP = {"sharding.mode": "ddp"}
BUCKETS = DDP | {"precision.reduce": "bf16"}
Axes, Keys = dict[str, int], dict[str, Any]
TWO, COPIES, BOTH = {"dp_shard": 2}, {"dp_replicate": 2}, {"dp_replicate": 2, "dp_shard": 2}


def _bucketed(name: str, mesh: Axes, spec: Keys, schedule: str = "1f1b", num_microbatches: int = 4, *, ci: bool = False) -> Cell:
    """A cell whose gradients are cast to bf16 for their sum: each addend and each sum is rounded by 2⁻⁹ of itself at most."""
    ranks = mesh.get("dp_replicate", 1) * mesh.get("dp_shard", 1)
    return Cell(name, mesh, schedule, BUCKETS | spec, num_microbatches, tolerance=ranks * 2.0**-8, by_course=True, ci=ci)


COPIED_CELLS = [
    Cell("ddp-dp2", COPIES, spec=DDP, ci=True),
    Cell("ddp-shard2-bf16", TWO, spec=DDP | BF16 | DENSE, by_course=True),
    Cell("ddp-2x2-recompute-reshard", BOTH, spec=DDP | RECOMPUTED | RESHARD),
    Cell("ddp-packed-tied", COPIES, spec=DDP | PACKED | TIED),
    Cell("ddp-1f1b-pp2-dp2", {"pp": 2, **COPIES}, spec=DDP | ROUTED, ci=True),
    Cell("ddp-gpipe-pp2-dp2-two-steps", {"pp": 2, **TWO}, "gpipe", DDP | TIED, num_microbatches=8, updates_after=2),
    Cell("ddp-interleaved-pp2-vpp2-dp2", V2 | TWO, "interleaved_1f1b", DDP),
    Cell("ddp-zbv-pp2-2x2", V2 | BOTH, "zbv", DDP, num_microbatches=8),
    Cell("ddp-ep2", E2, spec=DDP, ci=True),
    Cell("ddp-ep4-2x4", {"dp_replicate": 2, **E4}, spec=DDP | EXPERTS, num_microbatches=8),
    Cell("ddp-tp2-ep2-dp2", T2 | E2, spec=DDP | RECOMPUTED),
    Cell("ddp-cp2-dp2", {"cp": 2, **COPIES}, spec=DDP),
    Cell("ddp-cp2-ep2-dp2", {"cp": 2, **E2}, spec=DDP),
    Cell("ddp-tp2-dp2-vocabulary", T2V | COPIES, spec=DDP | {"model.attention": MLA}),
    _bucketed("ddp-buckets-dp2", TWO, DENSE, ci=True),
    _bucketed("ddp-buckets-2x2-ep2-wrap-2", {"dp_replicate": 2, **E2}, EXPERTS | {"sharding.wrap": 2}),
    _bucketed("ddp-buckets-1f1b-pp2-dp2", {"pp": 2, **COPIES}, BF16 | DENSE),
    _bucketed("ddp-buckets-zbv-pp2-2x2", V2 | BOTH, DENSE, "zbv", 8),
]
