"""A stated encoder and its projection: bytes by hand, and properties of a stage's memory, work and time."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest

from megaplan import estimate
from megaplan.budget.values import RankBudget
from megaplan.columns import Column, Phase
from megaplan.cost.model import model_costs
from megaplan.cost.times import model_times
from megaplan.hosts.megarun.ledger import block_ledger
from megaplan.inventory.build import build_inventory
from megaplan.inventory.towers import tower_parameters
from megaplan.partition.choose import choose_cuts
from megaplan.spec.load import spec_from_document
from megaplan.spec.models import Spec

WIDTH, PATCHES, VALUES, LAYERS, INNER = 48, 32, 27, 3, 96
ENCODER: dict[str, Any] = {
    **{"num_layers": LAYERS, "hidden_size": WIDTH, "num_heads": 4, "head_dim": 12, "ffn_hidden_size": INNER},
    **{"patch_values": VALUES, "patches": PATCHES, "positions": PATCHES},
}
PROJECTION: dict[str, Any] = {"widths": [4 * WIDTH, 96, 64], "joined_patches": 4, "norm": "layernorm"}


def document(
    *, vision: bool | None = True, projector: bool = True, encoder: Mapping[str, Any] = ENCODER, **sections: Any
) -> dict[str, Any]:
    """A small model of text with an encoder; `vision` None is the text model alone."""
    attention, mlp = {"kind": "gqa", "num_heads": 4, "num_kv_heads": 4, "head_dim": 16}, {"ffn_hidden_size": 128}
    model: dict[str, Any] = {"pattern": "AD", "num_layers": 4, "hidden_size": 64, "vocab_size": 256, "attention": attention, "mlp": mlp}
    if vision is not None:
        parts = {"trained": vision, "encoder": dict(encoder)}, {"trained": projector, "projection": PROJECTION}
        model["towers"] = dict(zip(("vision", "projector"), parts, strict=True))
    found: dict[str, Any] = {"format": "megaplan.spec/1", "name": "small", "model": model, "mesh": {"dp_shard": 2}}
    return found | {"batch": {"micro_batch_size": 2, "seq_length": 64}, "host": {"kernels": "reference"}} | sections


def spec_of(**changes: Any) -> Spec:
    return spec_from_document(document(**changes))


def rank(**changes: Any) -> RankBudget:
    return estimate(document(**changes)).budget.ranks[0]


def test_parameters_by_hand() -> None:
    spec = spec_of()
    layer = 2 * 2 * WIDTH + 4 * (WIDTH * WIDTH + WIDTH) + 2 * WIDTH * INNER + INNER + WIDTH
    encoder = VALUES * WIDTH + WIDTH + PATCHES * WIDTH + LAYERS * layer + 2 * WIDTH
    projection = 2 * WIDTH + 4 * WIDTH * 96 + 96 + 96 * 64 + 64
    assert spec.model.towers is not None
    assert tower_parameters(spec.model.towers) == {"vision": encoder, "projector": projection}
    assert build_inventory(spec).parameters == build_inventory(spec_of(vision=None)).parameters + encoder + projection


def test_kept_bytes_of_a_layer_by_hand() -> None:
    """Attention keeps the norm's output, mean and deviation, q, k, v, its output and a number per head and query."""
    spec = spec_of(precision={"params": "bf16"})
    rows, inventory = 2 * PATCHES, build_inventory(spec)
    kept = {}
    for name in ("attention", "mlp"):
        block = inventory.block(f"vision.layers.0.{name}")
        kept[name] = sum(tensor.bytes for tensor in block_ledger(spec, f"vision.layers.0.{name}", block).saved)
    assert kept["attention"] == rows * (5 * WIDTH * 2 + 2 * 4 + 4 * 4)
    assert kept["mlp"] == rows * (WIDTH * 2 + 2 * 4 + 2 * INNER * 2)


def test_a_frozen_encoder_keeps_nothing_and_has_no_state() -> None:
    spec = spec_of(vision=False)
    inventory = build_inventory(spec)
    for name in ("vision.patches", "vision.layers.1.attention", "vision.layers.1.mlp", "vision.last_norm"):
        ledger = block_ledger(spec, name, inventory.block(name))
        assert ledger.saved == ()
        assert not [tensor for tensor in ledger.backward_live if tensor.bytes]
        assert ledger.forward_live
    projected = block_ledger(spec, "projector", inventory.block("projector"))
    assert projected.saved


@pytest.mark.parametrize("pp", [1, 2])
def test_what_is_trained_never_takes_fewer_bytes(pp: int) -> None:
    more = {"mesh": {"pp": pp, "dp_shard": 2}, "schedule": {"num_microbatches": 4}, "split": {"mode": "equal"}}
    text = rank(vision=None, **more)
    found = [rank(vision=vision, projector=projector, **more) for vision, projector in ((False, False), (False, True), (True, True))]
    for phase in Phase:
        sizes = [sum(each.cells[phase].values()) - each.cells[phase][Column.OVERHEAD] for each in (text, *found)]
        assert all(less <= most for less, most in pairwise(sizes))
    for column in (Column.OTHER_OPTIMIZER, Column.MATRIX_OPTIMIZER, Column.GRADIENTS):
        sizes = [each.cells[Phase.OPTIMIZER][column] for each in found]
        assert sizes == sorted(sizes)
        assert sizes[-1] > sizes[0]


def test_recompute_of_towers_keeps_less_and_computes_more() -> None:
    """Many images, so that saved tensors decide the peak."""
    batch = {"micro_batch_size": 8, "seq_length": 64, "images": 8}
    peaks = [rank(recompute={"towers": policy}, batch=batch).cells[Phase.FORWARD_BACKWARD] for policy in ("none", "selective", "full")]
    activations = [cells[Column.ACTIVATIONS] for cells in peaks]
    assert activations == sorted(activations, reverse=True)
    assert activations[-1] < activations[0]
    times = []
    for policy in ("none", "selective", "full"):
        spec = spec_of(recompute={"towers": policy}, batch=batch)
        times.append(model_times(spec, build_inventory(spec)).first.total_ns)
    assert times == sorted(set(times))


def test_flops_of_the_encoder_by_hand() -> None:
    """Products of all patches with all others of the image, and a backward twice as long, without the gradient of patches."""
    spec, plain = spec_of(), spec_of(vision=None)
    costs = [model_costs(each, build_inventory(each)) for each in (spec, plain)]
    linears = LAYERS * (4 * WIDTH * WIDTH + 2 * WIDTH * INNER)
    scores = LAYERS * 2 * PATCHES * WIDTH
    projected = (4 * WIDTH * 96 + 96 * 64) // 4
    forward = 2 * (VALUES * WIDTH + linears + scores + projected) * PATCHES
    assert costs[0].towers.forward_flops == -(-forward // 64)
    assert costs[0].towers.model_flops == -(-(3 * forward - 2 * VALUES * WIDTH * PATCHES) // 64)
    assert costs[1].towers.forward_flops == 0
    windowed = spec_of(encoder={**ENCODER, "window_patches": 8, "full_layers": [1]})
    cost = model_costs(windowed, build_inventory(windowed)).towers
    assert cost.forward_flops == -(-(forward - 2 * scores * PATCHES + 2 * (1 * PATCHES + 2 * 8) * 2 * WIDTH * PATCHES) // 64)


def test_cuts_give_a_first_stage_with_an_encoder_fewer_layers() -> None:
    heavy = {**ENCODER, "num_layers": 12, "patches": 256, "positions": 256}
    for objective in ("bottleneck", "step_time"):
        cuts = []
        for vision in (None, True):
            found = spec_of(
                vision=vision,
                encoder=heavy,
                mesh={"pp": 2},
                schedule={"num_microbatches": 4},
                split={"objective": objective},
                device={"launch_ns": 0},
            )
            cuts.append(choose_cuts(found, build_inventory(found)).spans[0][1])
        assert cuts[1] < cuts[0]
