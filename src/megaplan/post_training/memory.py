"""Memory of a device and of a node's host, phase by phase of an iteration."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from megaplan.budget.values import Budget, RankBudget
from megaplan.columns import Column, Phase
from megaplan.dtypes import DType
from megaplan.post_training.engines import EngineMemory, engine_figures, widest_mlp
from megaplan.post_training.job import TrainingJob
from megaplan.post_training.values import MemoryPhase
from megaplan.spec.device import device_of

PARAMETERS = (Column.REPLICATED_PARAMS, Column.TENSOR_PARALLEL_PARAMS, Column.EXPERT_PARALLEL_PARAMS)
OPTIMIZER = (Column.MATRIX_OPTIMIZER, Column.OTHER_OPTIMIZER)
ACTIVATIONS = (Column.ACTIVATIONS, Column.FEATURE_ACTIVATIONS, Column.ROUTING)
BUFFERS = (Column.COMMUNICATION, Column.WORKSPACE)
FORWARD_WIDTHS = 8
"""Tensors of the residual stream's width that a layer's forward has at a time."""
CHUNK = 1024
STAYS_ASLEEP = ("engine_graphs", "engine_context")
"""Columns of an engine that stay on the device while it sleeps."""
Bytes = dict[str, int]
OfRank = Callable[[RankBudget], Bytes]


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

    def phases(self) -> tuple[MemoryPhase, ...]:
        """Every phase, in the order of an iteration."""
        return tuple(self._phases())

    def _phases(self) -> Iterator[MemoryPhase]:
        plan, pool = self.job.plan, "all" if self.colocated else "training"
        buckets = {"sync_buckets": 2 * plan.sync.bucket_bytes}
        awake = self.engine.columns
        loading = awake if not plan.sync.staged or self.sleep == 0 else {key: size for key, size in awake.items() if key != "kv_cache"}
        if self.colocated:
            yield self._phase("sync", "all", lambda rank: self._trainer(rank, away=False) | buckets | loading, trainer=True, engine=True)
            yield self._phase("rollout", "all", lambda rank: self._trainer(rank, away=True) | awake, engine=True)
            yield self._phase("sleep", "all", lambda rank: self._trainer(rank, away=True) | self._asleep)
        else:
            yield self._phase("sync", "training", lambda rank: self._trainer(rank, away=False) | buckets, trainer=True)
            rollout = awake | {"sync_buckets": plan.sync.bucket_bytes}
            yield self._made("rollout", "rollout", rollout, self._host(trainer=False, engine=True, pools=("rollout",)))
        asleep = self._asleep if self.colocated else {}
        if plan.reward is not None and plan.reward.seconds is None:
            forward = self._forward(logits=False)
            yield self._phase("reward", pool, lambda rank: self._trainer(rank, away=True, but="reward") | forward(rank) | asleep)
        if plan.policy.log_probs:
            forward = self._forward()
            yield self._phase("log_probs", pool, lambda rank: self._trainer(rank, away=False) | forward(rank) | asleep, trainer=True)
        if plan.reference is not None:
            mine = self._forward()
            adapted = self.job.spec.lora is not None and plan.reference.parameters is None
            yield self._phase(
                "reference", pool, lambda rank: self._trainer(rank, away=not adapted, but="reference") | mine(rank) | asleep, trainer=adapted
            )
        if plan.critic is not None:
            step = self._critic_step
            yield self._phase("critic", pool, lambda rank: self._trainer(rank, away=True, but="critic") | step(rank) | asleep)
        yield from self._training(pool, asleep)

    def _training(self, pool: str, asleep: Bytes) -> Iterator[MemoryPhase]:
        yield max(
            (self._phase("training", pool, lambda rank, at=at: self._step(rank, at) | asleep, trainer=True) for at in Phase),
            key=lambda phase: phase.total_bytes,
        )

    def _phase(self, name: str, pool: str, of: OfRank, *, trainer: bool = False, engine: bool = False) -> MemoryPhase:
        """The phase on the rank that has most bytes in it."""
        fullest = max((of(rank) for rank in self.budget.ranks), key=lambda found: sum(found.values()))
        pools = ("training", "rollout") if self.colocated else ("training",)
        return self._made(name, pool, fullest, self._host(trainer=trainer, engine=engine, pools=pools))

    def _made(self, name: str, pool: str, columns: Bytes, host: Bytes) -> MemoryPhase:
        columns, host = ({key: size for key, size in each.items() if size} for each in (columns, host))
        total = sum(columns.values())
        return MemoryPhase(name, pool, columns, total, device_of(self.job.spec.device).capacity.value - total, host, sum(host.values()))

    @property
    def _asleep(self) -> Bytes:
        return self.engine.columns if self.sleep == 0 else {key: self.engine.columns[key] for key in STAYS_ASLEEP}

    def _trainer(self, rank: RankBudget, *, away: bool, but: str = "") -> Bytes:
        """What the trainer's process holds outside the training step; `away`: what `offload` names is on the host, except `but`."""
        plan = self.job.plan
        offloaded = set(plan.offload) if away else set()
        cells = rank.cells[Phase.FORWARD_BACKWARD]
        held = {
            "policy_parameters": 0 if "parameters" in offloaded else _sum(cells, PARAMETERS),
            "policy_gradients": 0 if "gradients" in offloaded else rank.cells[Phase.INIT][Column.GRADIENTS],
            "policy_optimizer": 0 if "optimizer" in offloaded else _sum(cells, OPTIMIZER),
            "training_context": self.budget.device.reserve_bytes,
        }
        return held | {key: size for name, key, size in self._others(rank) if name == but or name not in plan.offload}

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

    def _forward(self, *, logits: bool = True) -> OfRank:
        """Function of a rank: the bytes of a forward without gradients. The reference and the reward model are as wide as the policy."""
        spec, policy = self.job.spec, self.job.plan.policy
        tokens = policy.log_prob_tokens or spec.batch.micro_batch_size * spec.batch.seq_length
        local = tokens // spec.mesh.cp
        work = local * (FORWARD_WIDTHS * spec.model.hidden_size + widest_mlp(spec, spec.mesh.tp)) * 2
        rows = min(local, CHUNK) if policy.logits == "chunks" else local
        scores = 0 if not logits else 2 * rows * (spec.model.vocab_size // spec.mesh.tp) * DType.FP32.bytes

        def found(rank: RankBudget) -> Bytes:
            gathered = rank.cells[Phase.FORWARD_BACKWARD][Column.COMMUNICATION] if self.shards_parameters else 0
            return {"forward_activations": work + scores, "gathered_parameters": gathered}

        return found

    def _step(self, rank: RankBudget, at: Phase) -> Bytes:
        """The training step of a rank; models that do not train stay where they are."""
        cells = rank.cells[at]
        away = self._trainer(rank, away=True)
        others = {key: away[key] for key in ("reference_parameters", "reward_parameters", "critic_state") if key in away}
        return {
            "policy_parameters": _sum(cells, PARAMETERS),
            "policy_gradients": cells[Column.GRADIENTS],
            "policy_optimizer": _sum(cells, OPTIMIZER),
            "training_activations": _sum(cells, ACTIVATIONS),
            "training_buffers": _sum(cells, BUFFERS),
            "training_overhead": cells[Column.OVERHEAD],
            "training_context": self.budget.device.reserve_bytes,
            **others,
        }

    def _host(self, *, trainer: bool, engine: bool, pools: Iterable[str]) -> Bytes:
        """A node's host memory; `trainer`, `engine`: it is on its devices."""
        spec, plan = self.job.spec, self.job.plan
        per_node = spec.device.per_node
        process = int(engine_figures(plan.rollout.engine)["process_bytes"].value)
        found: Bytes = {}
        if "rollout" in pools:
            found["host_processes"] = per_node * process
            if self.sleep == 1 and not engine:
                found["host_engine_parameters"] = per_node * self.engine.columns["engine_parameters"]
        if "training" not in pools:
            return found
        ranks = self._fullest_node(min(per_node, spec.mesh.world_size))
        found["host_processes"] = found.get("host_processes", 0) + len(ranks) * process
        found["host_training"] = sum(rank.host.total for rank in ranks)
        for rank in ranks:
            cells = rank.cells[Phase.FORWARD_BACKWARD]
            if not trainer:
                for name, key, columns in (("parameters", "host_policy_parameters", PARAMETERS), ("optimizer", "host_policy_optimizer", OPTIMIZER)):
                    if name in plan.offload:
                        found[key] = found.get(key, 0) + _sum(cells, columns)
            for name, _, size in self._others(rank):
                if name in plan.offload:
                    found[f"host_{name}"] = found.get(f"host_{name}", 0) + size
        return found

    def _fullest_node(self, per_node: int) -> list[RankBudget]:
        """Ranks of the node whose parameters and optimizer are largest."""
        of_rank = {number: rank for rank in self.budget.ranks for number in rank.ranks}
        numbers = range(0, len(of_rank), per_node)
        nodes = [[of_rank[number] for number in range(first, min(first + per_node, len(of_rank)))] for first in numbers]
        return max(nodes, key=lambda node: sum(_sum(rank.cells[Phase.FORWARD_BACKWARD], PARAMETERS + OPTIMIZER) for rank in node))


def _sum(cells: dict[Column, int], columns: tuple[Column, ...]) -> int:
    return sum([cells[column] for column in columns])
