"""Memory of a device and of a node's host, phase by phase of an iteration."""

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property

from megaplan.budget.pinned import pinned_bytes
from megaplan.budget.values import Budget, RankBudget
from megaplan.columns import Column, Phase
from megaplan.dtypes import DType
from megaplan.layout.build import build_layout
from megaplan.post_training.engines import EngineMemory, engine_figures, widest_mlp
from megaplan.post_training.job import TrainingJob
from megaplan.post_training.values import MemoryPhase
from megaplan.spec.host import device_of

PARAMETERS = (Column.REPLICATED_PARAMS, Column.TENSOR_PARALLEL_PARAMS, Column.EXPERT_PARALLEL_PARAMS)
OPTIMIZER = (Column.MATRIX_OPTIMIZER, Column.OTHER_OPTIMIZER)
ACTIVATIONS = (Column.ACTIVATIONS, Column.FEATURE_ACTIVATIONS, Column.ROUTING)
BUFFERS = (Column.COMMUNICATION, Column.WORKSPACE)
FORWARD_WIDTHS = 8
"""Tensors of the residual stream's width that a layer's forward has at a time."""
CHUNK = 1024
CACHES = ("kv_cache", "recurrent_states")
"""Columns of an engine that it allocates after its parameters where `sync` is staged."""
STAYS_ASLEEP = ("engine_graphs", "engine_context")
"""Columns of an engine that stay on the device while it sleeps."""
Bytes = dict[str, int]
OfRank = Callable[[RankBudget], Bytes]
NOTHING: frozenset[str] = frozenset()
WEIGHTS = frozenset({"parameters"})
FROZEN = frozenset({"reference", "reward"})
TRAINED = frozenset({"parameters", "gradients", "optimizer"})
"""Parts of the trainer that a phase works with."""


@dataclass(frozen=True)
class Loop:
    """The parts of an iteration's memory."""

    job: TrainingJob
    budget: Budget
    engine: EngineMemory
    sleep: int

    @property
    def colocated(self) -> bool:
        """True if the engine is on the devices of training."""
        return self.job.plan.placement == "colocated"

    def phases(self) -> Iterator[MemoryPhase]:
        """Every phase, in the order of an iteration."""
        plan, pool = self.job.plan, "all" if self.colocated else "training"
        buckets = {"sync_buckets": 2 * plan.sync.bucket_bytes}
        awake, asleep = self.engine.columns, self._asleep
        staged = plan.sync.staged and self.sleep > 0
        loading = {key: size for key, size in awake.items() if not staged or key not in CACHES}
        if self.colocated:
            yield self._phase("sync", pool, WEIGHTS, lambda _: buckets | loading, engine=True)
            yield self._phase("rollout", pool, NOTHING, lambda _: awake, engine=True)
            yield self._phase("sleep", pool, NOTHING, lambda _: asleep)
        else:
            yield self._phase("sync", pool, WEIGHTS, lambda _: buckets)
            generating = awake | {"sync_buckets": plan.sync.bucket_bytes}
            yield self._made("rollout", "rollout", generating, self._host(NOTHING, engine=True, pools=("rollout",)))
        idle_engine = asleep if self.colocated else {}
        if plan.reward is not None and plan.reward.seconds is None:
            yield self._phase("reward", pool, {"reward"}, lambda rank: self._forward(rank, logits=False) | idle_engine)
        if plan.policy.log_probs:
            yield self._phase("log_probs", pool, WEIGHTS, lambda rank: self._forward(rank) | idle_engine)
        if plan.reference is not None:
            adapted = self.job.spec.lora is not None and plan.reference.parameters is None
            yield self._phase("reference", pool, WEIGHTS if adapted else {"reference"}, lambda rank: self._forward(rank) | idle_engine)
        if plan.critic is not None:
            yield self._phase("critic", pool, {"critic"}, lambda rank: self._critic_step(rank) | idle_engine)
        yield max((self._trained(pool, at, idle_engine) for at in Phase), key=lambda phase: phase.total_bytes)

    def copied_bytes(self) -> int:
        """The most bytes over a device's link to the host in an iteration: what changes goes and returns, a frozen model only returns."""
        away = self.job.plan.offload
        engine = 2 * self.engine.columns["engine_parameters"] if self.sleep == 1 else 0

        def of(rank: RankBudget) -> int:
            cells = rank.cells[Phase.FORWARD_BACKWARD]
            own = {"parameters": 2 * _sum(cells, PARAMETERS), "optimizer": 2 * _sum(cells, OPTIMIZER)}
            others = {name: size if name in FROZEN else 2 * size for name, _, size in self._others(rank)}
            return sum(size for name, size in (own | others).items() if name in away)

        return engine + max(of(rank) for rank in self.budget.ranks)

    def _trained(self, pool: str, at: Phase, idle_engine: Bytes) -> MemoryPhase:
        return self._phase("training", pool, TRAINED, lambda rank: self._step(rank, at) | idle_engine)

    def _phase(self, name: str, pool: str, here: AbstractSet[str], of: OfRank, *, engine: bool = False) -> MemoryPhase:
        """The phase on the rank with the most bytes in it.

        Args:
            name: Name of the phase.
            pool: Devices that work.
            here: Parts of the trainer that are on the device even if `offload` lists them.
            of: Additional bytes of a rank, by column.
            engine: The engine's parameters are on the device.
        """
        fullest = max((self._trainer(rank, here) | of(rank) for rank in self.budget.ranks), key=lambda found: sum(found.values()))
        pools = ("training", "rollout") if self.colocated else ("training",)
        return self._made(name, pool, fullest, self._host(here, engine=engine, pools=pools))

    def _made(self, name: str, pool: str, columns: Bytes, host: Bytes) -> MemoryPhase:
        columns, host = ({key: size for key, size in each.items() if size} for each in (columns, host))
        total = sum(columns.values())
        spec = self.job.rollout_spec if pool == "rollout" else self.job.spec
        return MemoryPhase(name, pool, columns, total, device_of(spec.device).capacity.value - total, host, sum(host.values()))

    @property
    def _asleep(self) -> Bytes:
        return self.engine.columns if self.sleep == 0 else {key: self.engine.columns[key] for key in STAYS_ASLEEP}

    def _trainer(self, rank: RankBudget, here: AbstractSet[str]) -> Bytes:
        """Bytes that the trainer's process holds outside a step: all parts that are not in `offload`, and the parts in `here`."""
        away = set(self.job.plan.offload) - here
        cells = rank.cells[Phase.FORWARD_BACKWARD]
        held = {
            "policy_parameters": 0 if "parameters" in away else _sum(cells, PARAMETERS),
            "policy_gradients": 0 if "gradients" in away else rank.cells[Phase.INIT][Column.GRADIENTS],
            "policy_optimizer": 0 if "optimizer" in away else _sum(cells, OPTIMIZER),
            "training_context": self.budget.device.reserve_bytes,
        }
        return held | {column: size for name, column, size in self._others(rank) if name not in away}

    def _others(self, rank: RankBudget) -> Iterator[tuple[str, str, int]]:
        """Parameters and state of the other models of the loop: name in `offload`, column, bytes."""
        plan = self.job.plan
        if plan.reference is not None:
            yield "reference", "reference_parameters", self._reference(rank)
        if plan.reward is not None and plan.reward.seconds is None:
            yield "reward", "reward_parameters", self._reward
        if plan.critic is not None:
            yield "critic", "critic_state", self._critic(rank)

    def _reference(self, rank: RankBudget) -> int:
        plan, spec = self.job.plan, self.job.spec
        assert plan.reference is not None
        if spec.lora is not None and plan.reference.parameters is None:
            return 0
        held = _sum(rank.cells[Phase.FORWARD_BACKWARD], PARAMETERS)
        stored = spec.precision.params if not self.shards_parameters else spec.precision.master
        return int(held * DType.BF16.bytes / stored.bytes * self._ratio(plan.reference.parameters))

    @property
    def shards_parameters(self) -> bool:
        """True if the host keeps sharded masters as parameters, as FSDP2 does, instead of whole ones in 16 bits."""
        return not self.job.spec.host.kind.saves_working_copy

    @property
    def _reward(self) -> int:
        plan = self.job.plan
        assert plan.reward is not None
        count = plan.reward.parameters or self.job.inventory.parameters
        return count * DType.BF16.bytes // self.job.spec.mesh.world_size

    def _critic(self, rank: RankBudget) -> int:
        assert self.job.plan.critic is not None
        cells = rank.cells[Phase.FORWARD_BACKWARD]
        held = _sum(cells, PARAMETERS) + _sum(cells, OPTIMIZER) + rank.cells[Phase.INIT][Column.GRADIENTS]
        return int(held * self._ratio(self.job.plan.critic.parameters))

    def _critic_step(self, rank: RankBudget) -> Bytes:
        assert self.job.plan.critic is not None
        cells, ratio = rank.cells[Phase.FORWARD_BACKWARD], self._ratio(self.job.plan.critic.parameters)
        more = max(0, cells[Column.GRADIENTS] - rank.cells[Phase.INIT][Column.GRADIENTS])
        return {"critic_activations": int((_sum(cells, ACTIVATIONS) + _sum(cells, BUFFERS) + more) * ratio)}

    def _ratio(self, parameters: int | None) -> float:
        return 1.0 if parameters is None else parameters / self.job.inventory.parameters

    def _forward(self, rank: RankBudget, *, logits: bool = True) -> Bytes:
        """A forward without gradients. The reference and the reward model are taken to be as wide as the policy."""
        spec, policy = self.job.spec, self.job.plan.policy
        tokens = (policy.log_prob_tokens or spec.batch.micro_batch_size * spec.batch.seq_length) // spec.mesh.cp
        work = tokens * (FORWARD_WIDTHS * spec.model.hidden_size + widest_mlp(spec, spec.mesh.tp)) * 2
        rows = min(tokens, CHUNK) if policy.logits == "chunks" else tokens
        scores = 2 * rows * (spec.model.vocab_size // spec.mesh.tp) * DType.FP32.bytes if logits else 0
        gathered = rank.cells[Phase.FORWARD_BACKWARD][Column.COMMUNICATION] if self.shards_parameters else 0
        return {"forward_activations": work + scores, "gathered_parameters": gathered}

    def _step(self, rank: RankBudget, at: Phase) -> Bytes:
        """The columns of a phase of the training step."""
        cells = rank.cells[at]
        return {
            "policy_parameters": _sum(cells, PARAMETERS),
            "policy_gradients": cells[Column.GRADIENTS],
            "policy_optimizer": _sum(cells, OPTIMIZER),
            "training_activations": _sum(cells, ACTIVATIONS),
            "training_buffers": _sum(cells, BUFFERS),
            "training_overhead": cells[Column.OVERHEAD],
        }

    def _host(self, here: AbstractSet[str], *, engine: bool, pools: Iterable[str]) -> Bytes:
        """A node's host memory; `here` and `engine` as in `_phase`."""
        spec, plan = self.job.spec, self.job.plan
        per_node, known = spec.device.per_node, engine_figures(plan.rollout.engine)
        found: Bytes = {}
        if "rollout" in pools:
            engines = min(self.job.rollout_spec.device.per_node, plan.rollout.gpus or spec.mesh.world_size)
            found["host_processes"] = engines * int(known["engine_process_bytes"].value)
            if self.sleep == 1 and not engine:
                found["host_engine_parameters"] = engines * self.engine.columns["engine_parameters"]
        if "training" not in pools:
            return found
        ranks = self._fullest_node(min(per_node, spec.mesh.world_size))
        found["host_processes"] = found.get("host_processes", 0) + len(ranks) * int(known["process_bytes"].value)
        found["host_training"] = sum(rank.host.total for rank in ranks)
        away = set(plan.offload) - here
        for rank in ranks:
            cells = rank.cells[Phase.FORWARD_BACKWARD]
            parts = [
                ("parameters", "host_policy_parameters", self._copied(rank)),
                ("optimizer", "host_policy_optimizer", _sum(cells, OPTIMIZER)),
            ]
            for name, column, size in (*parts, *((name, f"host_{name}", size) for name, _, size in self._others(rank))):
                if name in away:
                    found[column] = found.get(column, 0) + size
        return found

    def _copied(self, rank: RankBudget) -> int:
        """Bytes of the host's copy of a rank's parameters."""
        if not self.job.plan.pinned:
            return _sum(rank.cells[Phase.FORWARD_BACKWARD], PARAMETERS)
        return self._pinned[rank.ranks[0] * self.job.spec.mesh.pp // self.job.spec.mesh.world_size]

    @cached_property
    def _pinned(self) -> tuple[int, ...]:
        spec, inventory = self.job.spec, self.job.inventory
        return pinned_bytes(spec, inventory, build_layout(spec, inventory, self.job.spans))

    def _fullest_node(self, per_node: int) -> list[RankBudget]:
        """Ranks of the node whose parameters and optimizer are largest."""
        of_rank = {number: rank for rank in self.budget.ranks for number in rank.ranks}
        numbers = range(0, len(of_rank), per_node)
        nodes = [[of_rank[number] for number in range(first, min(first + per_node, len(of_rank)))] for first in numbers]
        return max(nodes, key=lambda node: sum(_sum(rank.cells[Phase.FORWARD_BACKWARD], PARAMETERS + OPTIMIZER) for rank in node))


def _sum(cells: dict[Column, int], columns: tuple[Column, ...]) -> int:
    return sum([cells[column] for column in columns])
