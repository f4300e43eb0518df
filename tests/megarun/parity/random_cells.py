"""Random layouts of random small models as cells, from a seed."""

import sys
from itertools import count
from math import prod
from pathlib import Path
from typing import Any

from parity_cells import RANK_AXES, Cell

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from random_plans.choices import TINY, Scope
from random_plans.draw import draw

from megaplan.errors import MegaplanError
from megaplan.plan.make import make_plan
from megaplan.spec.load import spec_from_document
from megaplan.spec.models import Spec
from megaplan.spec.not_built_yet import megarun_refuses

MOST_PROCESSES = 8
FP32 = dict.fromkeys(("params", "grads", "master", "moments", "reduce"), "fp32")
OWN = ("host", "sharding", "recompute")
"""Sections of a layout, which one process's record does not depend on."""


def random_cell(seed: int) -> Cell:
    """The first legal cell of a seed's stream that runs on 2 to 8 processes and has no gradient that is zero analytically."""
    for attempt in count():
        document = draw(1000 * seed + attempt, Scope.RUNTIME, TINY)
        world = prod(document["mesh"].get(axis, 1) for axis in RANK_AXES)
        if 2 <= world <= MOST_PROCESSES:
            try:
                spec = spec_from_document(document)
            except MegaplanError:  # libraries of another device, for one
                continue
            if any(found.code == "MP790" for found in megarun_refuses(spec)):
                continue
            return _cell(f"random-{seed}", document, spec)
    raise AssertionError


def _cell(name: str, document: dict[str, Any], loaded: Spec) -> Cell:
    """The document in fp32, at a rate at which three steps change parameters by much."""
    plan = make_plan(loaded)  # bars of the pattern are cuts too
    mesh, schedule, model = document["mesh"], document["schedule"], document["model"]
    model = _with_gradients(model, divides_rows=mesh.get("cp", 1) * mesh.get("tp", 1) > 1)
    spec: dict[str, Any] = {
        "model": model,
        "batch": document["batch"],
        "precision": FP32,
        "optimizer": {**document.get("optimizer", {}), "newton_schulz_dtype": "fp32"},
        "training": {"steps": 10, "learning_rate": 1.0e-2},
        **{section: document[section] for section in ("data",) if section in document},
        **{f"{section}.{key}": value for section in OWN for key, value in document.get(section, {}).items()},
    }
    if model.get("tie_embeddings"):
        spec["model.tie_embeddings"] = True  # by these two a cell knows that embeddings have a second copy
    if "mtp" in model.get("features", {}):
        spec["model.features.mtp"] = model["features"]["mtp"]
    steps = schedule.get("steps_per_update", 1)
    data_ranks = mesh.get("dp_replicate", 1) * mesh.get("dp_shard", 1)
    count = schedule["num_microbatches"] * steps * data_ranks
    return Cell(name, mesh, schedule["kind"], spec, count, steps, [list(span) for span in plan.spans])


def _with_gradients(model: dict[str, Any], *, divides_rows: bool) -> dict[str, Any]:
    """The model without what makes a gradient zero analytically, of which only rounding would be compared.

    The cell's own spans cut it, so its pattern has no bars.
    A token that sees one key has the weight 1 whatever its query is, and so has a token with one expert whose weights are made to sum to 1.
    """
    model["pattern"] = model["pattern"].upper().replace("|", "")
    attention, moe = model.get("attention", {}), model.get("moe", {})
    if attention.get("window_size", 2) < 2:
        attention["window_size"] = 2
    if attention.get("indexer", {}).get("top_k", 2) < 2:
        attention["indexer"]["top_k"] = 2
    if moe.get("top_k") == 1:
        moe["normalize_top_k"] = False
    if moe.keys() & {"capacity_factor", "expert_choice"} and divides_rows:  # else every rank drops other rows
        moe["capacity_factor"] = moe["num_experts"] / moe["top_k"]
    structure = model.get("features", {}).get("structure")
    if structure is not None:
        structure["num_categories"] = max(7, structure["num_categories"])  # as many codes as the rows of the cells have
    relations = model.get("features", {}).get("relation_bias")
    if relations is not None:
        relations["num_relations"] = max(7, relations["num_relations"])
    return model
