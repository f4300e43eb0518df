"""Changes of a spec that may lower its peak; the global batch stays, and also the number of GPUs unless a factor changes it."""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import combinations
from math import gcd, prod
from typing import Any, NamedTuple

from megaplan.exploration.space import KINDS, SLOTS
from megaplan.families.checks import divisors
from megaplan.families.registry import FAMILIES
from megaplan.schedules.registry import SCHEDULES
from megaplan.spec.models import LatentAttention, Spec
from megaplan.spec.pattern import parse_pattern
from megaplan.wording import argument

AXES = ("pp", "cp", "tp", "dp_shard", "dp_replicate")
"""Axes whose product is the number of GPUs."""
EXPERT_AXES = ("dp_shard", "cp", "tp")
"""Axes whose ranks form expert groups."""
KEYS = (
    *(f"mesh.{name}" for name in ("pp", "vpp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "etp", "vocab_parallel", "context_exchange")),
    *("schedule.kind", "batch.micro_batch_size", "schedule.num_microbatches", "schedule.steps_per_update"),
    *("sharding.mode", "sharding.reshard_after_forward", "recompute.default", *(f"recompute.blocks.{letter}" for letter in FAMILIES)),
    *("host.recompute_num_layers", "host.recompute_modules", "host.distributed_optimizer", "host.kernels"),
    *("host.wgrad_fusion", "host.expandable_segments", "host.optimizer_offload", "host.activation_offload"),
)
"""Keys that a change may have, in the order of a hint."""
STRENGTH = ("none", "selective", "full")


class Edit(NamedTuple):
    """One decision of a change.

    Attributes:
        group: Group of the edit: two edits of a group are never combined, except those of "mesh" that move different factors.
        values: Keys and their values.
        factors: Axes of the mesh, and the factors of their degrees.
    """

    group: str
    values: tuple[tuple[str, Any], ...] = ()
    factors: tuple[tuple[str, Fraction], ...] = ()


def single_edits(spec: Spec) -> list[Edit]:
    """Every single edit that keeps the number of GPUs."""
    return [*moves(spec), *_policies(spec), *_batches(spec), *schedules(spec)]


def moves(spec: Spec) -> Iterator[Edit]:
    """Edits of the mesh: a factor moves from one axis to another, or the number of expert ranks changes."""
    mesh = spec.mesh
    for source in AXES:
        for factor in divisors(getattr(mesh, source))[1:]:
            for target in AXES:
                if target != source:
                    yield Edit("mesh", factors=((source, Fraction(1, factor)), (target, Fraction(factor))))
    if spec.model.moe is not None and "E" in _letters(spec):
        yield from (Edit("ep", (("mesh.ep", ep),)) for ep in divisors(spec.model.moe.num_experts) if ep != mesh.ep)
        yield from (Edit("etp", (("mesh.etp", etp),)) for etp in divisors(mesh.dp_shard * mesh.cp * mesh.tp) if etp != mesh.etp)


def growth(spec: Spec, factor: int) -> Iterator[Edit]:
    """Edits that add GPUs: a factor on one axis, or divided between two; if axes inside a stage grow, also the most expert ranks."""
    pairs = [(first, factor // first) for first in divisors(factor)]
    for index, one in enumerate(AXES):
        for other in AXES[index:]:
            for first, second in pairs:
                if (one == other and second == 1) or (one != other and 1 < first < factor):
                    factors = ((one, Fraction(first)),) if one == other else ((one, Fraction(first)), (other, Fraction(second)))
                    yield Edit("mesh", factors=factors)
                    if (ep := _expert_ranks(spec, factors)) != spec.mesh.ep:
                        yield Edit("mesh", (("mesh.ep", ep),), factors)


def _expert_ranks(spec: Spec, factors: Sequence[tuple[str, Fraction]]) -> int:
    """The largest expert-parallel degree that divides the experts, after the axes that form expert groups have grown."""
    if spec.model.moe is None or "E" not in _letters(spec):
        return spec.mesh.ep
    inside = prod(int(by) for axis, by in factors if axis in EXPERT_AXES)
    return spec.mesh.ep * gcd(inside, max(1, spec.model.moe.num_experts // spec.mesh.ep))


def changed(spec: Spec, edits: Sequence[Edit]) -> Spec | None:
    """The spec with some edits and their consequences; None if the global batch or a degree cannot be kept integral.

    The number of microbatches follows from the global batch. A mesh without a pipeline has no schedule, and vocabulary ranks are tensor
    ranks. The result may break rules.
    """
    values: dict[str, Any] = {}
    degrees = {axis: Fraction(getattr(spec.mesh, axis)) for axis in AXES}
    for edit in edits:
        values.update(edit.values)
        for axis, factor in edit.factors:
            degrees[axis] *= factor
    if any(degree.denominator != 1 for degree in degrees.values()):
        return None
    values.update({f"mesh.{axis}": int(degree) for axis, degree in degrees.items()})
    if values["mesh.pp"] == 1:
        values.update({"schedule.kind": "1f1b", "mesh.vpp": 1})
    if spec.host.kind.vocab_with_tp:
        values["mesh.vocab_parallel"] = values["mesh.tp"] > 1
    elif values["mesh.tp"] == 1:
        values["mesh.vocab_parallel"] = False
    if not _divide_batch(spec, values):
        return None
    return _with(spec, values)


def together(edits: Sequence[Edit], size: int) -> Iterator[tuple[Edit, ...]]:
    """Edits that can be combined."""
    for chosen in combinations(edits, size):
        groups = [edit.group for edit in chosen if not edit.factors]
        if len(set(groups)) == len(groups):
            yield chosen


def texts(before: Spec, after: Spec) -> tuple[str, ...]:
    """`KEY=VALUE` of everything that differs."""
    return tuple(f"{key}={argument(value_of(after, key))}" for key in KEYS if value_of(before, key) != value_of(after, key))


def value_of(spec: Spec, key: str) -> Any:
    """The value of a key of `KEYS`; for a letter, the policy of its layers if it differs from the default."""
    section, _, name = key.partition(".")
    if name.startswith("blocks."):
        return spec.recompute.blocks.get(name.removeprefix("blocks."))
    return getattr(getattr(spec, section), name)


def _divide_batch(spec: Spec, values: dict[str, Any]) -> bool:
    """Set the microbatches that give the global batch, with fewer sequences each if necessary; False if none do."""
    data = values["mesh.dp_shard"] * values["mesh.dp_replicate"]
    sequences, rest = divmod(spec.global_batch_size, data)
    size = values.get("batch.micro_batch_size", spec.batch.micro_batch_size)
    steps = values.get("schedule.steps_per_update", spec.schedule.steps_per_update)
    if rest:
        return False
    if sequences % size and "batch.micro_batch_size" not in values:
        size = max(divisor for divisor in divisors(sequences) if divisor <= size)
    if sequences % (size * steps) and "schedule.steps_per_update" not in values:
        steps = 1
    count, rest = divmod(sequences, size * steps)
    values.update({"batch.micro_batch_size": size, "schedule.steps_per_update": steps, "schedule.num_microbatches": count})
    return not rest


def _policies(spec: Spec) -> Iterator[Edit]:
    host, mesh = spec.host.kind, spec.mesh
    if spec.sharding.copies:
        yield Edit("shard", (("sharding.mode", "fsdp"),))
    if host.reshards and not spec.sharding.reshard_after_forward:
        yield Edit("reshard", (("sharding.reshard_after_forward", True),))
    if not host.vocab_with_tp and mesh.tp > 1 and not mesh.vocab_parallel:
        yield Edit("vocabulary", (("mesh.vocab_parallel", True),))
    if mesh.cp > 1 and not mesh.gathers_latents and isinstance(spec.model.attention, LatentAttention):
        yield Edit("latents", (("mesh.context_exchange", "latents"),))
    if spec.host.has_kernels and not spec.host.uses_triton:
        yield Edit("kernels", (("host.kernels", "triton"),))
    grows = spec.host.expandable_segments
    if "expandable_segments" in host.keys and not (host.expandable if grows is None else grows):
        yield Edit("allocator", (("host.expandable_segments", True),))
    yield from _state(spec)
    if "wgrad_fusion" in host.keys and spec.host.wgrad_fusion:
        yield Edit("fusion", (("host.wgrad_fusion", False),))  # without it, no gradients are made for the hooks
    yield from _recompute_modules(spec) if "recompute_modules" in host.keys else _recompute(spec)


def _state(spec: Spec) -> Iterator[Edit]:
    """Optimizer state on fewer devices, or in host memory."""
    host = spec.host.kind
    if "distributed_optimizer" in host.keys and not spec.host.distributed_optimizer:
        yield Edit("optimizer", (("host.distributed_optimizer", True),))
    if host.trained and spec.host.optimizer_offload != 1 and spec.host.graphs != "step":
        yield Edit("state", (("host.optimizer_offload", 1.0),))


def _recompute(spec: Spec) -> Iterator[Edit]:
    letters = [letter for letter in FAMILIES if letter in _letters(spec)]
    for policy in STRENGTH[1:]:
        weaker = [letter for letter in letters if STRENGTH.index(spec.recompute.of(letter)) < STRENGTH.index(policy)]
        allowed = {letter: "selective" if policy == "full" and FAMILIES[letter].full_refused is not None else policy for letter in letters}
        for letter in weaker if len(letters) > 1 else ():
            if allowed[letter] == policy:
                yield Edit(f"recompute.{letter}", ((f"recompute.blocks.{letter}", policy),))
        if weaker:
            own = {letter: name for letter, name in allowed.items() if name != policy or letter in spec.recompute.blocks}
            blocks = tuple((f"recompute.blocks.{letter}", name) for letter, name in own.items())
            yield Edit("recompute", (("recompute.default", policy), *blocks))


def _recompute_modules(spec: Spec) -> Iterator[Edit]:
    """Modules of selective recompute, and full recompute, which excludes them."""
    host, letters, attends = spec.host, _letters(spec), spec.recompute.of("A") == "selective"
    if host.recompute_num_layers is not None:
        return
    if "A" in letters and not attends:
        yield Edit("recompute", (("recompute.blocks.A", "selective"),))
    latent = isinstance(spec.model.attention, LatentAttention)
    has = {"layernorm": True, "mla_up_proj": latent, "mlp": "D" in letters, "moe_act": "E" in letters}
    names = [name for name, applies in has.items() if applies and name not in host.recompute_modules]
    for chosen in [*([name] for name in names), *([names] if len(names) > 1 else [])]:
        yield Edit("modules", (("host.recompute_modules", (*host.recompute_modules, *chosen)),))
    nothing: tuple[tuple[str, Any], ...] = (("host.recompute_modules", ()), ("recompute.blocks.A", "none")) if attends else ()
    if host.recompute_modules and not attends:
        nothing = (("host.recompute_modules", ()),)
    yield Edit("recompute", (("host.recompute_num_layers", 1), *nothing))


def _batches(spec: Spec) -> Iterator[Edit]:
    size, schedule = spec.batch.micro_batch_size, spec.schedule
    sequences = spec.global_batch_size // (spec.mesh.dp_shard * spec.mesh.dp_replicate)
    yield from (Edit("batch", (("batch.micro_batch_size", part),)) for part in reversed(divisors(sequences)) if part < size)
    if spec.host.kind.trained and spec.mesh.pp > 1:  # reduces receive buffers, and under gpipe the number of microbatches in flight
        for parts in divisors(schedule.num_microbatches)[1:]:
            yield Edit("steps", (("schedule.steps_per_update", schedule.steps_per_update * parts),))


def schedules(spec: Spec) -> Iterator[Edit]:
    """Every schedule that a search tries, with its numbers of slots, and the spec's own with others."""
    own = spec.schedule.kind, spec.mesh.vpp
    for kind in dict.fromkeys((*(spec.host.kind.schedules or KINDS), own[0])) if spec.mesh.pp > 1 else ():
        schedule = SCHEDULES[kind]
        for vpp in {"single": (1,), "mirror": (1,), "v": (2,), "loop": SLOTS}[schedule.placement]:
            if vpp >= schedule.least_vpp and (kind, vpp) != own:
                yield Edit("schedule", (("schedule.kind", kind), ("mesh.vpp", vpp)))


def _letters(spec: Spec) -> str:
    return parse_pattern(spec.model.pattern, spec.model.num_layers).layers


def _with(spec: Spec, values: dict[str, Any]) -> Spec:
    sections: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        if name.startswith("blocks."):
            blocks = sections.setdefault(section, {}).setdefault("blocks", dict(spec.recompute.blocks))
            blocks[name.removeprefix("blocks.")] = value
        elif getattr(getattr(spec, section), name) != value:
            sections.setdefault(section, {})[name] = value
    update: dict[str, Any] = {name: getattr(spec, name).model_copy(update=changes) for name, changes in sections.items()}
    if "host" in sections:  # defaults of its other keys may follow from it
        update["host"] = type(spec.host).model_validate(spec.host.model_dump(exclude_unset=True) | sections["host"])
    return spec.model_copy(update=update).with_own_resharding()
