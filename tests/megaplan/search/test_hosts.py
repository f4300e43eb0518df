"""Searches of other frameworks: rows of an exhaustive search, and launches that have the rows' peaks and steps when they are imported."""

from pathlib import Path

import pytest

import megaplan
from megaplan.exploration.engine import SearchTask, explore
from megaplan.exploration.evaluate import Evaluator
from megaplan.exploration.space import Space
from megaplan.exploration.values import Exact
from megaplan.importers.torchtitan.spec import import_torchtitan
from megaplan.spec.models import Spec

DENSE = {
    "format": "megaplan.spec/1",
    "name": "dense",
    "model": {
        **{"pattern": "AD", "num_layers": 8, "hidden_size": 512, "vocab_size": 8192},
        "attention": {"kind": "gqa", "num_heads": 8, "num_kv_heads": 4, "head_dim": 64},
        "mlp": {"ffn_hidden_size": 1536, "activation": "swiglu"},
    },
    "schedule": {"num_microbatches": 8},
    "batch": {"micro_batch_size": 1, "seq_length": 1024},
    "optimizer": {"matrix": "adamw"},
    "sharding": {"reshard_after_forward": False},
    "host": {"name": "torchtitan"},
    "device": {"name": "h100-sxm"},
}


def _spec(*changes: str) -> Spec:
    return megaplan.load(DENSE, *changes).spec


@pytest.mark.parametrize("changes", [(), ("model.tie_embeddings=true",)])
def test_rows_of_torchtitan_are_those_of_all_its_layouts(changes: tuple[str, ...]) -> None:
    space = Space(_spec(*changes), 4, {}, ("recompute", "schedule"))
    own, peaks = Evaluator(space, -(1 << 50)), list[int]()
    stored = own.fits_on_no_mesh()
    for layout in space.layouts():
        for policy in space.policies(layout):
            exact = own.exact(layout, policy)
            assert isinstance(exact, Exact)
            peaks.append(exact.peak_bytes)
            spec = space.spec_of(layout, policy)
            assert own.floor_bytes(spec) <= exact.peak_bytes
            assert own.step_bound_ns(spec) <= exact.step_ns
            assert stored <= exact.peak_bytes - own.usable_bytes + own.headroom_bytes
    headroom = own.usable_bytes - sorted(peaks)[len(peaks) // 2]  # half of them fit
    best: dict[object, Exact] = {}
    limited = Evaluator(space, headroom)
    for layout in space.layouts():
        found = [exact for policy in space.policies(layout) if isinstance(exact := limited.exact(layout, policy), Exact)]
        if found:
            best[layout] = min(found, key=lambda one: one.order("time"))
    rows = explore(SearchTask(space, "time", headroom, 4), 1).rows
    assert rows == sorted(best.values(), key=lambda one: one.order("time"))[:4]
    assert all(not one.layout.dp_replicate > one.layout.dp_shard * one.layout.cp == 1 for one in rows)
    if changes:
        assert {layout.pp for layout in space.layouts()} == {1}, "torchtitan ties embedding and head on one stage alone"


@pytest.mark.parametrize("fix", [{}, {"mesh.pp": 2}, {"mesh.tp": 2}])
def test_a_launch_of_torchtitan_is_imported_with_the_rows_peak_and_step(fix: dict[str, int], tmp_path: Path) -> None:
    found = megaplan.search(DENSE, devices=8, fix=fix, top=3, processes=1, seconds=None)
    launches = [path for path in found.write(tmp_path) if path.endswith(".torchtitan.json")]
    assert len(launches) == len(found.rows) == 3
    for row, path in zip(found.rows, launches, strict=True):
        imported = import_torchtitan(Path(path).read_text(encoding="utf-8"), path)
        again = megaplan.estimate(imported.document)
        assert (again.peak_bytes, round((again.step_seconds or 0.0) * 1e9)) == (row.peak_bytes, row.exact.step_ns)
