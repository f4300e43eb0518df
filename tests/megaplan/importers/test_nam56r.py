"""NAM56R's published Mamba-2 runs on eight H200, as launches of Megatron-Core: their memory, and which did not fit.

Peaks are whole GiB of the change log of DatasunriseOU/cppmega at d57d1c1.
"""

from typing import Any

import pytest
from nam56r.launches import arguments, imported, is_launch
from nam56r.run import Found, page

import megaplan

RUN: dict[str, Any] = {
    **{"id": "run", "phase": "2026-04-10 CUDA graphs", "gpus": 8, "hidden": 3584, "layers": 52, "pattern": "AEMEAEMEAEMR"},
    **{"ssm": "mamba2-ssd", "attention": "gqa56/8", "mtp_depths": 0, "precision": "BF16", "seq": 4096, "tp": 1, "pp": 1, "ep": 1, "mbs": 4},
    **{"gbs": 32, "recompute": "none", "cuda_graph": "none", "moe_mode": "dropless", "note": "", "status": "ok", "iter_ms": 1014},
    "peak_gib_reported": 90,
}
GRAPHS = "te: attn mamba moe_router moe_preprocess"
OLD = {"phase": "2026-04-10 native Mamba-2", "recompute": "selective core_attn"}
FP8 = {"precision": "FP8 tensorwise", "cuda_graph": "te partial", "note": "mamba heads 64"}
MEASURED: list[tuple[dict[str, Any], int]] = [
    (OLD | {"tp": 2}, 52),
    (OLD, 88),
    ({}, 90),
    ({"cuda_graph": GRAPHS}, 90),
    ({"cuda_graph": GRAPHS, "mbs": 5, "gbs": 40}, 105),
    (FP8, 91),
    (FP8 | {"mbs": 5, "gbs": 40}, 104),
]


@pytest.mark.parametrize(("changes", "gib"), MEASURED, ids=str)
def test_a_peak_is_within_five_percent(changes: dict[str, Any], gib: int) -> None:
    found = megaplan.estimate(imported(RUN | changes))
    assert found.fits
    assert found.peak_bytes == pytest.approx(gib * 2**30, rel=0.05)


@pytest.mark.parametrize("changes", [{"tp": 2, "mbs": 16, "gbs": 128}, {"mbs": 8, "gbs": 64}], ids=str)
def test_what_ran_out_of_memory_does_not_fit(changes: dict[str, Any]) -> None:
    assert not megaplan.estimate(imported(RUN | OLD | changes)).fits


def test_a_launch_has_the_published_shapes() -> None:
    model = megaplan.load(imported(RUN)).spec.model
    letters = model.pattern * (52 // len(model.pattern))
    assert [letters.count(letter) for letter in "MEA"] == [17, 22, 13]
    assert (model.mamba.num_heads, model.mamba.state_dim, model.attention.head_dim) == (56, 64, 64)
    assert megaplan.load(imported(RUN | FP8)).spec.model.mamba.num_heads == 64
    full = arguments(RUN | FP8 | {"cuda_graph": "te full moe", "moe_mode": "drop-and-pad capacity 1.5"})
    assert (full["cuda_graph_scope"], full["moe_expert_capacity_factor"]) == ("attn mamba moe", 1.5)
    assert not is_launch(RUN | {"ssm": "mamba3-mimo"})
    assert not is_launch(RUN | {"mtp_depths": 1})


def test_the_page_counts_both_ways() -> None:
    lost = RUN | {"id": "lost", "status": "oom", "iter_ms": None, "peak_gib_reported": None}
    text = page([Found(RUN, 99 << 30, True, 0.507), Found(lost, 200 << 30, False, 1.0)], 3)
    assert "2 runs on eight H200" in text
    assert "Mean error 10.0 %, worst +10.0 %. Runs that ended out of memory: 1; 1 of them\ndo not fit" in text
    assert "Median error\n50.0 %, bias -50.0 %; 0 of 1" in text
    assert "| run | BF16 | none | dropless | 1 | 4 | 32 | 90 | 99.0 | +10.0 |" in text
