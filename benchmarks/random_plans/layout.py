"""The degrees, the schedule, the batch and the cuts of a random plan."""

from dataclasses import dataclass, replace
from itertools import pairwise
from math import lcm
from typing import Any

from megaplan.partition.values import equal_cuts
from random_plans.choices import Draw, Size, divisors

MAX_WORLD_SIZE = 256
SINGLE, LOOP, V_SHAPED = ("gpipe", "1f1b"), ("interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble"), ("zbv", "dualpipev")
IN_ROUNDS = ("interleaved_1f1b", "interleaved_zero_bubble")


@dataclass(frozen=True, slots=True)
class Degrees:
    """Parallel layout of a drawn plan.

    Attributes:
        mesh: Degrees by axis, without ep and etp, which need experts to shard.
        kind: Kind of schedule.
        num_microbatches: Number of microbatches of a schedule step.
        steps: Schedule steps of an update.
        num_layers: Number of the model's layers.
        vocab_parallel: True if embedding and head are sharded over the vocabulary.
    """

    mesh: dict[str, int]
    kind: str
    num_microbatches: int
    steps: int
    num_layers: int
    vocab_parallel: bool

    @property
    def slots(self) -> int:
        """Stage slots."""
        return self.mesh["pp"] * self.mesh["vpp"]


def draw_degrees(draw: Draw, size: Size, mirrors: Draw | None, *, megatron: bool) -> Degrees:
    """Degrees that the schedule can run on; layers times microbatches, which is what a trace takes time for, stay few.

    `mirrors` draws pairs in place of some kinds of 1F1B, and two copies of the model in opposite directions for some even numbers of ranks.
    """
    most, small = size.work, size.few_ranks
    mesh = {
        "pp": draw.weighted({1: 4, 2: 4} if small else {1: 6, 2: 5, 3: 2, 4: 3, 5: 1, 6: 1}),
        "vpp": 1,
        "dp_replicate": draw.weighted({1: 6, 2: 2, 3: 1}),
        "dp_shard": draw.weighted({1: 4, 2: 3, 3: 2} if small else {1: 6, 2: 4, 3: 2, 4: 2, 5: 1, 7: 1, 8: 2, 16: 0.3, 32: 0.2}),
        "cp": draw.weighted({1: 8, 2: 2} if small else {1: 10, 2: 3, 3: 0.7, 4: 1}),
        "tp": draw.weighted({1: 5, 2: 3} if small else {1: 6, 2: 3, 3: 1, 4: 1.5, 8: 0.4}),
    }
    while _world(mesh) > MAX_WORLD_SIZE:
        mesh[draw.choice(["dp_replicate", "dp_shard", "cp", "tp"])] = 1
    if mesh["pp"] * mesh["dp_shard"] > 16:  # uneven shards differ between these ranks, and each distinct rank is traced
        mesh["dp_shard"] = draw.choice([1, 2, 3])
    pp, kind = mesh["pp"], "1f1b"
    if pp > 1:
        kinds = ("1f1b", "interleaved_1f1b") if megatron else (*SINGLE, *LOOP, *V_SHAPED)
        kind = draw.choice(kinds)
        if kind in V_SHAPED:
            mesh["vpp"] = 2
        elif kind in LOOP:
            mesh["vpp"] = draw.weighted({2: 4, 3: 1} | ({1: 2} if kind == "interleaved_zero_bubble" else {}))
    slots = pp * mesh["vpp"]
    least = {"1f1b": pp, "dualpipev": 2 * pp}.get(kind, 1)
    count = least + draw.weighted({0: 3, 1: 2, 2: 1, 3: 1})
    if kind in IN_ROUNDS:
        rounds = max(1, count // pp)
        count = pp * rounds if count % rounds or megatron else count
    steps = 1 if megatron else draw.weighted({1: 6, 2: 1, 3: 0.5})
    num_layers = draw.wide(max(2, slots), max(2, slots, min(24, most // (count * steps))))
    found = Degrees(mesh, kind, count, steps, num_layers, mesh["tp"] > 1 and (megatron or draw.chance(0.5)))
    return _mirrored(mirrors, found) if mirrors is not None and not megatron else found


MIRRORED_SHARE, PAIRED_SHARE = 0.2, 0.25


def _mirrored(draw: Draw, degrees: Degrees) -> Degrees:
    pp = degrees.mesh["pp"]
    if degrees.kind in ("1f1b", "interleaved_1f1b") and pp > 1 and draw.chance(PAIRED_SHARE):
        return replace(degrees, kind="paired_1f1b")
    if pp % 2 or not draw.chance(MIRRORED_SHARE):
        return degrees
    count = 2 * pp + 2 * draw.weighted({0: 3, 1: 2, 2: 1})
    return replace(degrees, mesh={**degrees.mesh, "vpp": 1}, kind="dualpipe", num_microbatches=count)


def _world(mesh: dict[str, int]) -> int:
    return mesh["pp"] * mesh["dp_replicate"] * mesh["dp_shard"] * mesh["cp"] * mesh["tp"]


def mesh_section(draw: Draw, degrees: Degrees, *, experts: bool, slices: bool) -> dict[str, Any]:
    """`mesh`, with expert degrees where there are experts, and with `slices` some that cut them."""
    mesh: dict[str, Any] = dict(degrees.mesh)
    lent = mesh["dp_shard"] * mesh["cp"] * mesh["tp"]
    if experts and lent > 1:
        mesh["ep"] = draw.choice([degree for degree in divisors(lent) if degree <= 16])
        if slices and draw.chance(0.3):
            mesh["etp"] = draw.choice(divisors(lent // mesh["ep"]))
    if degrees.vocab_parallel:
        mesh["vocab_parallel"] = True
    return {key: value for key, value in mesh.items() if value is True or value != 1 or draw.chance(0.1)}


def batch_section(draw: Draw, degrees: Degrees, size: Size) -> dict[str, int]:
    """Few and many tokens; what context ranks and tensor ranks divide."""
    cp, tp = degrees.mesh["cp"], degrees.mesh["tp"]
    unit = lcm(2 * cp if cp > 1 else 1, cp * tp)
    seq_length = draw.multiple(unit, 16 * cp, size.seq_length)
    return {"micro_batch_size": draw.wide(1, max(1, min(8, 8192 // seq_length))), "seq_length": seq_length}


def random_cuts(draw: Draw, num_layers: int, slots: int) -> list[int]:
    """The cuts of a partition without an empty slot."""
    return sorted(draw.sample(range(1, num_layers), slots - 1))


def split_section(draw: Draw, num_layers: int, slots: int, cuts: list[int], *, bars: bool, pairs: bool) -> dict[str, Any]:
    """`split`, such that the partition `cuts` is legal, and equal cuts where they are asked for.

    Args:
        draw: The stream.
        num_layers: Number of the model's layers.
        slots: Stage slots.
        cuts: A partition that all constraints allow.
        bars: True if the pattern has `|` at these cuts, which is a manual split.
        pairs: True if layers go in pairs, so that no other cut will do.
    """
    mode = "manual" if bars or (pairs and slots > 1) else draw.weighted({"equal": 2, "weighted": 4, "manual": 2})
    split: dict[str, Any] = {"mode": mode} if not bars or draw.chance(0.5) else {}
    if mode == "equal":
        cuts = list(equal_cuts(num_layers, slots))
    bounds = [0, *cuts, num_layers]
    if mode == "manual":
        split["reason"] = draw.choice(["drawn at random", "keeps the last stage short"])
        draw.maybe(split, 0.3, protects=lambda: ["tied embeddings", "one E layer a stage"][: draw.randint(1, 2)])
        if not bars:
            split["spans"] = [list(span) for span in pairwise(bounds)]
    if mode == "weighted":
        draw.maybe(split, 0.3, objective=lambda: draw.choice(["bottleneck", "step_time"]))
    if slots > 1 and draw.chance(0.4):
        others = [cut for cut in range(1, num_layers) if cut not in cuts]
        for name, allowed in (("pin", cuts), ("forbid", others)):
            if chosen := draw.some(allowed, 0.4):
                split[name] = chosen
        spans = [span for span in pairwise(bounds) if span[1] - span[0] > 1]
        if spans and draw.chance(0.5):
            start, stop = draw.choice(spans)
            split["together"] = [[draw.randint(start, stop - 2), stop]]
    return split
