"""No single edit that fits at less modelled cost than a printed hint is absent: brute force over all single edits."""

import random
import shlex
from typing import Any

import pytest
from without_room import without_room

import megaplan
from megaplan.advice.advise import MOST
from megaplan.advice.changes import changed, single_edits, texts
from megaplan.budget.fit import DOES_NOT_FIT
from megaplan.errors import Severity
from megaplan.spec.rules import check_rules

DENSE_32B = {
    "format": "megaplan.spec/1",
    "name": "fsdp",
    "model": {
        **{"pattern": "AD", "num_layers": 128, "hidden_size": 5120, "vocab_size": 151936, "tie_embeddings": False},
        "attention": {"kind": "gqa", "num_heads": 64, "num_kv_heads": 8, "head_dim": 128, "qk_norm": True},
        "mlp": {"ffn_hidden_size": 25600},
    },
    "mesh": {"dp_shard": 8},
    "sharding": {"reshard_after_forward": False},
    "batch": {"micro_batch_size": 1, "seq_length": 4096},
    "optimizer": {"matrix": "adamw"},
    "device": {"name": "h200"},
}


def hints_of(found: Any) -> list[tuple[str, ...]]:
    """Options of the printed changes."""
    (item,) = [item for item in found.diagnostics if item.code == DOES_NOT_FIT]
    hints = [hint for hint in item.hints if hint.startswith("--set ") and "leaves" in hint]
    return [tuple(word for word in shlex.split(hint, comments=True) if word != "--set") for hint in hints]


def test_what_costs_nothing_comes_first() -> None:
    first = hints_of(megaplan.estimate(DENSE_32B))[0]
    assert first == ("sharding.reshard_after_forward=true",)
    after = megaplan.estimate(DENSE_32B, *first)
    assert after.fits


def _draw(seed: int) -> dict[str, Any]:
    """A small model on up to 1,024 ranks, on a device that holds less than it needs."""
    draw = random.Random(seed)
    letters = draw.choice(("AD", "AE", "AMD"))
    model: dict[str, Any] = {"pattern": letters, "num_layers": len(letters) * draw.choice((4, 8)), "hidden_size": 512, "vocab_size": 32768}
    model["attention"] = {"kind": "gqa", "num_heads": 8, "num_kv_heads": 4, "head_dim": 64}
    sections = {
        "D": {"mlp": {"ffn_hidden_size": 2048}},
        "E": {"moe": {"num_experts": 16, "top_k": 2, "ffn_hidden_size": 512}},
        "M": {"mamba": {"kind": "mamba2", "head_dim": 32, "state_dim": 32, "num_groups": 4}},
    }
    for letter in letters[1:]:
        model |= sections[letter]
    mesh = {"pp": draw.choice((1, 1, 2)), "tp": draw.choice((1, 2)), "dp_shard": draw.choice((4, 16, 256)), "ep": 1}
    document = {
        **{"format": "megaplan.spec/1", "name": f"drawn-{seed}", "model": model, "mesh": mesh},
        "sharding": {"reshard_after_forward": draw.choice((True, False))},
        "schedule": {"num_microbatches": draw.choice((2, 4))},
        "batch": {"micro_batch_size": draw.choice((2, 4, 6)), "seq_length": draw.choice((1024, 4096))},
        "optimizer": {"matrix": "adamw"},
    }
    return without_room(document, draw.choice((0.97, 0.9, 0.75)))


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 40))])
def test_no_cheaper_single_edit_is_absent(seed: int) -> None:
    document = _draw(seed)
    before = megaplan.estimate(document)
    assert not before.fits
    spec = before.job.spec
    fitting: dict[tuple[str, ...], float] = {}
    for edit in single_edits(spec):
        after = changed(spec, [edit])
        if after is None or not (change := texts(spec, after)) or any(item.severity is Severity.ERROR for item in check_rules(after)):
            continue
        found = megaplan.estimate(document, *change)
        assert found.job.spec.mesh.world_size == spec.mesh.world_size
        if found.fits:
            fitting[change] = found.step_seconds or 0.0
    printed = hints_of(before)
    if not fitting:
        return
    assert len(printed) == min(MOST, len(fitting)) or len(printed) == MOST
    steps = [megaplan.estimate(document, *change).step_seconds or 0.0 for change in printed]
    assert all(megaplan.estimate(document, *change).fits for change in printed)
    assert steps == sorted(steps)
    absent = [step for change, step in fitting.items() if change not in printed]
    assert not absent or min(absent) >= steps[-1] * (1 - 1e-9)
