"""Starts that do not fit, drawn at random: the first hint is the cheapest single edit of the house's list and of one that is written here.

Dense models, experts and hybrids on 8 to 1,024 ranks of the three hosts. The list here has every value of every key of a spec that changes
neither the model, its batch, its numbers nor the framework's version; degrees move by a factor between two axes, and the number of
microbatches follows from the batch.
"""

import random
import re
import shlex
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from without_room import without_room

import megaplan
from megaplan.advice.advise import MOST
from megaplan.advice.changes import changed, single_edits, texts
from megaplan.budget.fit import DOES_NOT_FIT
from megaplan.errors import MegaplanError
from megaplan.schedules.registry import SCHEDULES
from megaplan.spec.models import Spec
from megaplan.units import format_bytes

HOSTS = ("megarun", "megatron", "torchtitan")
STARTS = 20
POLICIES = ("none", "selective", "full")
OF_HOST: dict[str, dict[str, tuple[str, ...]]] = {
    "megarun": {"kernels": ("reference", "triton"), "expandable_segments": ("true", "false"), "cuda_graphs": ("none", "microbatch")},
    "megatron": {
        "expandable_segments": ("true", "false"),
        "distributed_optimizer": ("true", "false"),
        "recompute_modules": ("[]", "[layernorm]", "[mlp]", "[moe_act]", "[moe]", "[layernorm, mlp]", "[layernorm, moe_act]"),
        "recompute_num_layers": ("null", "1", "2", "4"),
        "sequence_parallel": ("true", "false"),
        "microbatch_group_size": ("null", "2", "4"),
        "moe_permute_fusion": ("true", "false"),
        "wgrad_fusion": ("true", "false"),
        "cuda_graphs": ("none",),
    },
    "torchtitan": {"checkpoint_every": ("1", "2", "4"), "async_tensor_parallel": ("true", "false")},
}
"""Keys of each host, and their values."""


class Fit(NamedTuple):
    """A single edit that fits.

    Attributes:
        change: The options of the edit.
        step: The modelled step in nanoseconds.
        peak: The largest peak in bytes.
    """

    change: tuple[str, ...]
    step: int
    peak: int


def independent(spec: Spec) -> Iterator[tuple[str, ...]]:
    """Single edits from the keys of a spec alone."""
    mesh, kind = spec.mesh, spec.host.kind
    letters = sorted(set(spec.model.pattern))
    if kind.reshards:
        yield from ((f"sharding.reshard_after_forward={value}",) for value in ("true", "false"))
        yield from ((f"sharding.mode={value}",) for value in ("fsdp", "ddp"))
    yield from ((f"recompute.default={value}",) for value in POLICIES)
    yield from ((f"recompute.blocks.{letter}={value}",) for letter in letters for value in POLICIES)
    for key, values in OF_HOST[kind.name].items():
        yield from ((f"host.{key}={value}",) for value in values)
    if not kind.vocab_with_tp:
        yield from ((f"mesh.vocab_parallel={value}",) for value in ("true", "false"))
    for name in ("ep", "etp"):
        yield from ((f"mesh.{name}={degree}",) for degree in (1, 2, 4, 8, 16))
    for name in kind.schedules or SCHEDULES:
        if mesh.pp > 1:
            yield from ((f"schedule.kind={name}", f"mesh.vpp={vpp}") for vpp in (1, 2, 3, 4))
    sequences = spec.global_batch_size // mesh.data_ranks
    for micro in range(1, spec.batch.micro_batch_size):
        if sequences % micro == 0:
            yield f"batch.micro_batch_size={micro}", f"schedule.num_microbatches={sequences // micro}"
    yield from _moves(spec)


def _moves(spec: Spec) -> Iterator[tuple[str, ...]]:
    axes = ("pp", "cp", "tp", "dp_shard", "dp_replicate")
    for source in axes:
        for target in axes:
            factor = 2
            while source != target and getattr(spec.mesh, source) % factor == 0:
                degrees = {axis: getattr(spec.mesh, axis) for axis in axes}
                degrees[source] //= factor
                degrees[target] *= factor
                factor *= 2
                data, size = degrees["dp_shard"] * degrees["dp_replicate"], spec.batch.micro_batch_size
                if spec.global_batch_size % (data * size):
                    continue
                found = [f"mesh.{axis}={degree}" for axis, degree in degrees.items() if degree != getattr(spec.mesh, axis)]
                found.append(f"schedule.num_microbatches={spec.global_batch_size // (data * size)}")
                if degrees["tp"] == 1 or spec.host.kind.vocab_with_tp:
                    found.append(f"mesh.vocab_parallel={str(degrees['tp'] > 1).lower()}")
                yield (*found, *(("schedule.kind=1f1b", "mesh.vpp=1") if degrees["pp"] == 1 else ()))


def start(seed: int) -> dict[str, Any]:
    """A job on a device with less memory than it needs, by a given share; hosts alternate."""
    draw = random.Random(seed)
    host = HOSTS[seed % len(HOSTS)]
    letters = "AD" if host == "torchtitan" else draw.choice(("AD", "AE", "AMD" if host == "megarun" else "MAD"))
    model: dict[str, Any] = {
        **{"pattern": letters, "num_layers": len(letters) * draw.choice((4, 8)), "hidden_size": 1024, "vocab_size": 32768},
        "attention": {"kind": "gqa", "num_heads": 16, "num_kv_heads": 8, "head_dim": 64},
    }
    sections = {
        "D": {"mlp": {"ffn_hidden_size": 4096, "activation": "swiglu"}},
        "E": {"moe": {"num_experts": 16, "top_k": 2, "ffn_hidden_size": 1024}},
        "M": {"mamba": {"kind": "mamba2", "head_dim": 64, "state_dim": 64, "num_groups": 8, "chunk_size": 128}},
    }
    for letter in letters.replace("A", ""):
        model |= sections[letter]
    world = draw.choice((8, 16, 64, 256, 1024))
    pp, tp = draw.choice((1, 1, 2)), draw.choice((1, 2))
    mesh = {"pp": pp, "tp": tp, "dp_shard": world // (pp * tp), "vocab_parallel": tp > 1 and host != "megarun"}
    document = {
        **{"format": "megaplan.spec/1", "name": f"start-{seed}", "model": model, "mesh": mesh},
        "schedule": {"num_microbatches": draw.choice((2, 4))},
        "batch": {"micro_batch_size": draw.choice((2, 4)), "seq_length": draw.choice((2048, 4096))},
        "precision": {"params": "bf16", **dict.fromkeys(("grads", "master", "moments", "reduce"), "fp32")},
        "optimizer": {"matrix": "adamw"},
        "sharding": {"reshard_after_forward": host != "megatron" and draw.choice((True, False))},
        "host": {"name": host},
    }
    if host == "megatron":
        document["host"] |= {"hidden_dropout": 0.0, "attention_dropout": 0.0, "attention_mask": False}
    return without_room(document, draw.choice((0.97, 0.9, 0.75)))


def tried(document: dict[str, Any], change: tuple[str, ...]) -> Fit | None:
    """The edit as a command takes it; None if it is refused or does not fit."""
    try:
        found = megaplan.estimate(document, *change)
    except MegaplanError:
        return None
    return Fit(change, round((found.step_seconds or 0.0) * 1e9), found.peak_bytes) if found.fits else None


def brute_force(document: dict[str, Any]) -> list[Fit]:
    """All single edits that fit, of both lists, fastest first."""
    before = megaplan.estimate(document)
    spec = before.job.spec
    house = {texts(spec, after) for edit in single_edits(spec) if (after := changed(spec, [edit])) is not None}
    found = [fit for change in sorted({*house, *independent(spec)}) if change and (fit := tried(document, change)) is not None]
    assert all(megaplan.load(document, *fit.change).spec.global_batch_size == spec.global_batch_size for fit in found)
    return sorted(found, key=lambda fit: fit.step)


def hints_of(document: dict[str, Any]) -> list[str]:
    (said,) = [item for item in megaplan.estimate(document).diagnostics if item.code == DOES_NOT_FIT]
    return [hint for hint in said.hints if hint.startswith("--set ")]


@pytest.mark.parametrize("seed", [4, 12, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(STARTS) if seed not in (4, 12))])
def test_the_first_hint_is_the_cheapest_single_edit_and_prints_what_it_promises(seed: int) -> None:
    document = start(seed)
    cheapest, hints = brute_force(document), hints_of(document)
    before = megaplan.estimate(document)
    world, step = before.job.spec.mesh.world_size, before.step_seconds or 0.0
    assert not any(re.search(r"\d{5,} (bytes|B)\b", hint) for hint in hints)
    for hint in hints:
        change = tuple(word for word in shlex.split(hint, comments=True) if word != "--set")
        after = megaplan.estimate(document, *change)
        assert f"peak {format_bytes(after.peak_bytes)}, " in hint
        assert ("leaves" in hint) == after.fits
        assert f"modelled step {round(100 * ((after.step_seconds or 0.0) / step - 1)):+d} %" in hint
        assert (f"GPUs instead of {world:,}" in hint) == (after.job.spec.mesh.world_size > world)
        assert after.job.spec.mesh.world_size >= world
    steps = [fit.step for hint in hints if (fit := tried(document, tuple(w for w in shlex.split(hint, comments=True) if w != "--set")))]
    if not cheapest:
        return
    assert steps, "a single edit fits"
    assert steps == sorted(steps)
    assert steps[0] <= cheapest[0].step, cheapest[0]
    others = [fit for fit in cheapest if fit.step < steps[-1] and fit.step not in steps]
    assert not others, others[0]
    assert len(steps) == MOST or len(steps) == len({fit.step for fit in cheapest}) or len(steps) <= len(cheapest)
