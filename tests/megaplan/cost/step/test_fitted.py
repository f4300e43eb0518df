"""Combinations in the fit's measured steps, those that a step lacks, Muon's iterations, and the traffic of data ranks."""

import json
from typing import Any

import pytest

from megaplan.columns import Basis
from megaplan.cost.step.constants import intervals
from megaplan.cost.step.data import data_traffic, once_of
from megaplan.cost.step.fitted import FittedTuple, is_near, known_tuples, missing_parts
from megaplan.cost.step.muon import iteration_flops, muon_work
from megaplan.inventory.build import build_inventory
from megaplan.layout.step_time import PlannedTime, planned_time, step_to_time
from megaplan.spec.load import load_spec_text, spec_from_document

DENSE: dict[str, Any] = {
    "format": "megaplan.spec/1",
    "name": "dense",
    "model": {
        **{"pattern": "AD", "num_layers": 4, "hidden_size": 1024, "vocab_size": 32000, "mlp": {"ffn_hidden_size": 4096}},
        **{"attention": {"kind": "gqa", "num_heads": 8, "num_kv_heads": 8, "head_dim": 128}},
    },
    "mesh": {"dp_shard": 8},
    "batch": {"micro_batch_size": 1, "seq_length": 4096},
    "optimizer": {"matrix": "adamw"},
    "host": {"name": "megatron", "framework": "megatron-bridge", "release": "26.08"},
    "device": {"name": "h100-sxm"},
}


def timed(**sections: Any) -> PlannedTime:
    spec = spec_from_document(DENSE | sections)
    found = planned_time(spec, ((0, spec.model.num_layers),))
    assert isinstance(found, PlannedTime), found
    return found


def work_of(**sections: Any) -> Any:
    spec = spec_from_document(DENSE | sections)
    return step_to_time(spec, ((0, spec.model.num_layers),))


def test_every_combination_of_the_rows_is_fitted() -> None:
    assert len(known_tuples()) > 100
    assert all(missing_parts(each, known_tuples()) == () for each in known_tuples())


@pytest.mark.parametrize("part", FittedTuple._fields)
def test_a_part_that_no_row_has_is_named(part: str) -> None:
    for each in known_tuples():
        (missing,) = missing_parts(each._replace(**{part: "other"}), known_tuples())
        assert "other" in missing
        assert is_near(each._replace(**{part: "other"}), known_tuples()) == (part not in ("device", "dtype", "framework", "optimizer"))


def test_parts_that_were_fitted_apart_are_missing_together() -> None:
    """Every A100 row is dense, and MoE rows are of other devices."""
    (dense, *_) = [each for each in known_tuples() if each.device == "a100-80gb"]
    assert missing_parts(dense._replace(family="moe"), known_tuples()) == ("moe",)


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({"optimizer": {"matrix": "muon"}}, "muon"),
        ({"device": {"name": "h200"}}, "h200 in bf16"),
        ({"host": DENSE["host"] | {"release": None, "framework": "nemo"}, "device": {"name": "b300"}}, "nemo"),
    ],
)
def test_a_step_outside_the_fit_is_uncalibrated_and_says_why(changes: dict[str, Any], missing: str) -> None:
    found = timed(**changes)
    assert (found.calibration, found.basis) == ("uncalibrated", Basis.MODELLED)
    assert missing in found.missing
    document = found.as_document()
    assert document["missing"] == list(found.missing)


def test_a_fitted_step_is_inside_the_interval_of_its_family() -> None:
    found = timed()
    assert (found.calibration, found.basis, found.missing) == ("dense", Basis.FITTED, ())
    assert (found.low, found.high) == tuple(found.seconds * bound for bound in intervals()["dense"])


def test_one_iteration_multiplies_as_counted() -> None:
    """A matrix of 2 × 3: X Xᵀ 2·2·2·3, its square 2·2·2·2, and the product with X 2·2·2·3."""
    assert iteration_flops(2, 3) == iteration_flops(3, 2) == 24 + 16 + 24


def test_muon_iterates_every_matrix_of_the_layers() -> None:
    """Two blocks of q, k, v and o, and of an MLP whose gate and up projections are one matrix; the distributed optimizer divides them."""
    flops, count, elements = muon_work(work_of(optimizer={"matrix": "muon"}))
    square, joined, down = iteration_flops(1024, 1024), iteration_flops(8192, 1024), iteration_flops(1024, 4096)
    assert flops == 2 * (4 * square + joined + down) / 8
    assert (count, elements) == (2 * 6 / 8, 2 * (4 * 1024**2 + 3 * 1024 * 4096) / 8)
    assert muon_work(work_of()) == (0.0, 0.0, 0.0)


def test_tensor_ranks_iterate_their_own_parts() -> None:
    flops, _, elements = muon_work(work_of(optimizer={"matrix": "muon"}, mesh={"dp_shard": 4, "tp": 2, "vocab_parallel": True}))
    half, joined, down = iteration_flops(512, 1024), iteration_flops(4096, 1024), iteration_flops(1024, 2048)
    assert flops == 2 * (4 * half + joined + down) / 4
    assert elements == 2 * (4 * 1024**2 + 3 * 1024 * 4096) / 8


def test_muon_takes_longer_than_adamw_and_most_without_a_distributed_optimizer() -> None:
    muon, host = {"matrix": "muon"}, DENSE["host"] | {"distributed_optimizer": False}
    assert timed().seconds < timed(optimizer=muon).seconds < timed(optimizer=muon, host=host).seconds


def test_data_ranks_move_all_gradients_and_parameters_once() -> None:
    """Megatron reduces bf16 gradients and gathers bf16 parameters, over whatever tensor and pipeline ranks."""
    work = work_of()
    size = 2 * build_inventory(work.spec).parameters
    for mesh in ({"dp_shard": 8}, {"dp_shard": 4, "tp": 2, "vocab_parallel": True}):
        reduced, gathered = data_traffic(work_of(mesh=mesh))
        assert reduced == gathered == pytest.approx(size, rel=1e-3)
    assert data_traffic(work_of(mesh={"tp": 2, "vocab_parallel": True})) == (0, 0)
    assert once_of(work).dense.reduced == pytest.approx(size, rel=1e-3)


@pytest.mark.parametrize(("device", "warns"), [("gb200", False), ("h100-sxm", True)])
def test_experts_inside_a_domain_of_the_fabric_cross_no_node(device: str, warns: bool) -> None:
    """64 expert ranks are eight nodes of H100, and one NVLink domain of GB200."""
    model = {**DENSE["model"], "pattern": "AE", "moe": {"num_experts": 64, "top_k": 2, "ffn_hidden_size": 512}}
    del model["mlp"]
    document = DENSE | {"model": model, "mesh": {"dp_shard": 64, "ep": 64}, "device": {"name": device}}
    found = {item.code for item in load_spec_text(json.dumps(document), "spec.yaml").diagnostics}
    assert ("MP210" in found) == warns
