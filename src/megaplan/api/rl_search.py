"""`megaplan.rl_search`: placements, pools, meshes and engine degrees of a post-training plan on a number of GPUs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from time import perf_counter
from typing import Any, NamedTuple

from megaplan.api.load import LoadedJob, Source, load, override_texts
from megaplan.errors import MegaplanError
from megaplan.post_training.estimate import rl_estimate
from megaplan.post_training.job import section_of, training_job
from megaplan.post_training.values import RlEstimate
from megaplan.results import Result, Row
from megaplan.spec.post_training import PostTraining
from megaplan.units import format_figure

FORMAT = "megaplan.rl-search/1"
SECONDS = 20.0
EIGHTHS = range(1, 8)
"""Parts of the devices, in eighths, that split plans give to the rollout."""
KEPT = 3
"""Meshes of a training pool, and degrees of an engine on a pool, that are combined."""
MOST_TENSOR = 8
TRAINING_ALONE = (
    "post_training.placement=split",
    "post_training.staleness=0",
    *(f"post_training.rollout.{key}" for key in ("gpus=null", "tp=1", "pp=1", "ep=null")),
)
"""Changes with which any training pool has a rollout that its rules accept."""
TRAINING_SHARE = 0.6
"""Share of the time limit for meshes; the rest is for engines and combinations."""


@dataclass(frozen=True)
class RlRow:
    """A plan of a search.

    Attributes:
        iteration_seconds: Seconds of an iteration.
        low: Lower end of its 80 % interval.
        high: Upper end.
        placement: colocated or split.
        training_devices: Devices that train.
        rollout_devices: Devices that generate.
        peak_bytes: The largest phase of a device.
        host_peak_bytes: The largest phase of a node's host memory.
        idle_shares: Share of the iteration in which each pool waits.
        layout: Degrees of training and engine, for readers.
        changes: `KEY=VALUE` texts that make the plan of the spec.
    """

    iteration_seconds: float
    low: float
    high: float
    placement: str
    training_devices: int
    rollout_devices: int
    peak_bytes: int
    host_peak_bytes: int
    idle_shares: tuple[float, ...]
    layout: tuple[str, ...]
    changes: tuple[str, ...]


@dataclass(frozen=True, repr=False)
class RlSearch(Result):
    """Plans on a number of devices, the shortest iteration first.

    Attributes:
        format: Format of the JSON document.
        source: Name of the spec's source.
        name: Name of the spec.
        device: Device.
        num_devices: Devices of every plan.
        num_plans: Combinations of placement, mesh and engine.
        num_evaluated: Plans that were fully estimated: the ones with the fastest meshes and engines of each pool.
        stopped: True if the time limit ended the search.
        rows: Plans that fit.
    """

    format: str
    source: str
    name: str
    device: str
    num_devices: int
    num_plans: int
    num_evaluated: int
    stopped: bool
    rows: tuple[RlRow, ...]

    def _summary(self) -> Sequence[str]:
        tried = f"{self.num_evaluated:,} of {self.num_plans:,} plans estimated{', ended by the time limit' if self.stopped else ''}"
        best = "nothing fits"
        if self.rows:
            best = f"best: iteration {format_figure(self.rows[0].iteration_seconds)} s, {self.rows[0].placement}"
        return (f"{self.name}: {self.num_devices:,} x {self.device}", best, tried)

    def _rows(self) -> Sequence[Row]:
        return [
            {
                "iteration_seconds": each.iteration_seconds,
                "placement": each.placement,
                "training_devices": each.training_devices,
                "rollout_devices": each.rollout_devices,
                "peak_bytes": each.peak_bytes,
                "layout": ", ".join(each.layout),
            }
            for each in self.rows
        ]


class _Pool(NamedTuple):
    """Devices of a placement."""

    placement: str
    training: int
    rollout: int


class _Clock:
    """Measures the remaining time."""

    def __init__(self, seconds: float) -> None:
        self.begin, self.seconds, self.stopped = perf_counter(), seconds, False

    def has(self, share: float) -> bool:
        """True before this share of the limit."""
        left = perf_counter() - self.begin < share * self.seconds
        self.stopped |= not left
        return left


def rl_search(
    source: Source, /, *changes: str, gpus: int | None = None, top: int = 8, seconds: float = SECONDS, **overrides: Any
) -> RlSearch:
    """Search placements, sizes of the pools, meshes of training and degrees of the engine for the shortest iteration.

    Colocated plans use all devices for both; split plans give one to seven eighths to the rollout, with the spec's `staleness`. The batch,
    the sequence length, the schedule's kind without virtual stages, and the engine's other settings stay.

    Args:
        source: A spec with the section `post_training`.
        *changes: `KEY=VALUE` texts.
        gpus: Devices of every plan; by default the spec's number.
        top: Rows.
        seconds: Time limit.
        **overrides: Changes with two underscores for the dot.

    Raises:
        MegaplanError: Every error of the source and the changes; MP851, there is no section `post_training`.

    Examples:
        >>> import megaplan
        >>> found = megaplan.rl_search("plans/llama-3.1-8b-rl.yaml", gpus=8, top=3)
        >>> [row.iteration_seconds for row in found.rows] == sorted(row.iteration_seconds for row in found.rows)
        True
    """
    job = load(source, *changes, *override_texts(overrides))
    plan = section_of(job.spec)
    number, clock = gpus or _all_devices(plan, job.spec.mesh.world_size), _Clock(seconds)
    pools = _pools(number, plan.staleness)
    meshes = {size: _meshes(job, size, clock) for size in dict.fromkeys(pool.training for pool in pools)}
    engines = {pool: _engines(pool) for pool in pools}
    num_plans = sum(len(_mesh_texts(job, pool.training)) * len(engines[pool]) for pool in pools)
    rows, num_evaluated = [], 0
    tried = (
        (pool, mesh, engine)
        for rank in range(KEPT)
        for pool in pools
        for mesh in meshes[pool.training][rank : rank + 1]
        for engine in engines[pool]
    )
    for pool, mesh, engine in tried:
        if not clock.has(1.0):
            break
        texts = (*mesh, *_pool_texts(pool), *engine)
        try:
            candidate = load(job, *texts)
            found = rl_estimate(candidate.spec, candidate.inventory, candidate.spans)
        except MegaplanError:
            continue
        num_evaluated += 1
        if found.fits:
            rows.append(_row(found, pool, candidate, (*job.changes, *texts)))
    rows.sort(key=lambda row: row.iteration_seconds)
    return RlSearch(
        FORMAT, job.name, job.spec.name, job.spec.device.name, number, num_plans, num_evaluated, clock.stopped, tuple(rows[:top])
    )


def _all_devices(plan: PostTraining, world_size: int) -> int:
    """Devices of the spec's own plan; `world_size` counts the training devices."""
    return world_size + (plan.rollout.gpus or world_size) if plan.placement == "split" else world_size


def _pools(number: int, staleness: int) -> list[_Pool]:
    """Placements on a number of devices; colocated parts cannot work at the same time."""
    parts = dict.fromkeys(number * each // 8 for each in EIGHTHS)
    colocated = [] if staleness else [_Pool("colocated", number, number)]
    return colocated + [_Pool("split", number - part, part) for part in parts if 0 < part < number]


def _mesh_texts(job: LoadedJob, devices: int) -> list[tuple[str, ...]]:
    """Changes for every mesh of powers of two on these devices, most data ranks first."""
    mesh, moe = job.spec.mesh, job.spec.model.moe
    powers = [2**exponent for exponent in range(8)]
    experts = [1] if moe is None else [ep for ep in powers if moe.num_experts % ep == 0]
    found = []
    for tp, pp, ep in product([each for each in powers if each <= MOST_TENSOR], powers[:6], experts):
        model = tp * pp * mesh.cp
        if devices % model or pp > job.spec.model.num_layers or (devices // pp) % ep:
            continue
        texts = (
            f"mesh.tp={tp}",
            f"mesh.pp={pp}",
            f"mesh.ep={ep}",
            f"mesh.dp_shard={devices // model}",
            "mesh.dp_replicate=1",
            "mesh.vpp=1",
        )
        found.append((model, (*texts, "schedule.kind=1f1b", f"schedule.num_microbatches={pp}", "split={mode: equal}")))
    return [texts for _, texts in sorted(found, key=lambda each: each[0])]


def _meshes(job: LoadedJob, devices: int, clock: _Clock) -> list[tuple[str, ...]]:
    """The fastest meshes of a training pool that fit, by the time of training and of a forward."""
    timed: list[tuple[float, tuple[str, ...]]] = []
    for texts in _mesh_texts(job, devices):
        if not clock.has(TRAINING_SHARE):
            break
        try:
            candidate = load(job, *texts, *TRAINING_ALONE)
            made = training_job(candidate.spec, candidate.inventory, candidate.spans, section_of(candidate.spec))
            if made.budget().fits:
                step = made.step()
                timed.append((made.plan.policy.updates * step.seconds + 2 * made.forward_seconds(step), texts))
        except MegaplanError:
            continue
    return [texts for _, texts in sorted(timed)[:KEPT]]


def _engines(pool: _Pool) -> list[tuple[str, ...]]:
    """Changes for tensor groups of an engine; experts follow the group unless the spec gives more ranks."""
    sizes = (2**exponent for exponent in range(6))
    return [
        (f"post_training.rollout.tp={tp}", "post_training.rollout.ep=null") for tp in sizes if pool.rollout % tp == 0 and tp <= pool.rollout
    ]


def _pool_texts(pool: _Pool) -> Iterator[str]:
    yield f"post_training.placement={pool.placement}"
    yield f"post_training.rollout.gpus={pool.rollout}"
    yield "post_training.sync.how=null"


def _row(found: RlEstimate, pool: _Pool, job: LoadedJob, changes: tuple[str, ...]) -> RlRow:
    mesh, seconds = job.spec.mesh, found.iteration_seconds
    degrees = (("pp", mesh.pp), ("tp", mesh.tp), ("ep", mesh.ep), ("dp", mesh.dp_shard), ("engine tp", found.engine.tp))
    layout = tuple(f"{name} {degree}" for name, degree in degrees if degree > 1)
    last = {text.partition("=")[0]: text for text in changes}
    return RlRow(
        *(seconds.value, seconds.low, seconds.high, pool.placement, pool.training, pool.rollout, found.peak_bytes, found.host_peak_bytes),
        *(tuple(each.idle_share for each in found.pools), layout, tuple(last.values())),
    )
