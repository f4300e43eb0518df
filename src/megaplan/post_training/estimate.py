"""A spec's post-training plan: memory by phase, time of an iteration, idle devices."""

from collections.abc import Iterator
from math import ceil

from megaplan.budget.serving import forward_flops
from megaplan.cost.rates import rates_of
from megaplan.goodput.figures import RunFigure, figures
from megaplan.goodput.values import NamedFigure, Spread
from megaplan.inventory.tensors import Group, Inventory
from megaplan.layout.build import Spans
from megaplan.layout.step_time import PlannedTime
from megaplan.post_training.engines import EngineMemory, engine_figures, engine_memory
from megaplan.post_training.job import TrainingJob, section_of, training_job
from megaplan.post_training.memory import Loop
from megaplan.post_training.rollout import Generation, Prompt, generate
from megaplan.post_training.values import EngineShape, PoolIdle, ResponseShape, RlEstimate, TimePhase
from megaplan.spec.host import device_of
from megaplan.spec.models import Spec

FORMAT = "megaplan.rl/1"
NS = 1e-9
MODELLED = "modelled"
FORWARD_BYTES = 2
POOLS = ("all", "training", "rollout")


def rl_estimate(spec: Spec, inventory: Inventory, spans: Spans) -> RlEstimate:
    """The post-training plan of a spec.

    Raises:
        MegaplanError: MP471, the training step has no time; MP850, the batch cannot be made; MP851, the spec has no section; MP852, the
            engine has no room for a sequence.
    """
    return _Estimate(training_job(spec, inventory, spans, section_of(spec))).result()


class _Estimate:
    """The parts of an estimate."""

    def __init__(self, job: TrainingJob) -> None:
        self.job, self.plan = job, job.plan
        longest = min(job.lengths.longest(job.num_responses) + self.plan.rollout.prompt, float(job.spec.batch.seq_length))
        self.engine: EngineMemory = engine_memory(job.rollout_spec, self.plan, longest)
        self.colocated = self.plan.placement == "colocated"
        self.sleep = (2 if self.colocated else 0) if self.plan.rollout.sleep is None else self.plan.rollout.sleep
        self.rates = [rates_of(job.spec), *([rates_of(job.rollout_spec)] if self.plan.rollout.device is not None else [])]
        self.known = engine_figures(self.plan.rollout.engine)
        self.loop = Loop(job, job.budget(), self.engine, self.sleep)
        self.memory = tuple(self.loop.phases())

    @property
    def rollout_devices(self) -> int:
        """Devices of the rollout pool."""
        return self.plan.rollout.gpus or self.job.spec.mesh.world_size

    @property
    def num_devices(self) -> int:
        """Devices of all pools."""
        training = self.job.spec.mesh.world_size
        return max(training, self.rollout_devices) if self.colocated else training + self.rollout_devices

    @property
    def num_groups(self) -> int:
        """Tensor groups that generate independently."""
        return self.rollout_devices // (self.engine.degrees[0] * self.engine.degrees[1])

    def generation(self) -> Generation:
        """Generation of the group that has the longest response."""
        lengths, rollout = self.job.lengths, self.plan.rollout
        count = ceil(self.job.num_responses / self.num_groups)
        own = lengths.quantiles(count)
        own[-1] = max(own[-1], lengths.longest(self.job.num_responses))
        prompts = count / self.plan.samples if self.engine.prefix_cache else float(count)
        flops = forward_flops(self.job.spec, self.job.inventory, int(rollout.prompt))
        read = self.engine.model.prefill_seconds
        prompt = Prompt(
            rollout.prompt,
            read(max(prompts, 1.0) * rollout.prompt, flops),
            read(self.engine.batched_tokens, flops) / self.engine.batched_tokens,
        )
        found = generate(self.engine.model, own, prompt, self.engine.max_sequences, self.engine.cache_tokens or float("inf"))
        return self._continuous(found) if self.overlaps else found

    @property
    def overlaps(self) -> bool:
        """True if both pools work at the same time, and responses of later iterations begin where earlier ones have ended."""
        return self.plan.staleness > 0 and not self.colocated

    def _continuous(self, found: Generation) -> Generation:
        """Generation without a tail: `staleness` iterations are in flight; a prompt makes room when the longest of its responses ends.

        A group has its share of the responses, of all lengths in turn.
        """
        mean, count = self.job.lengths.mean, self.job.num_responses / self.num_groups
        context, begun = self.plan.rollout.prompt + self.job.lengths.mean_square / mean / 2, count * self.plan.staleness
        slots = min(self.engine.max_sequences, begun, self.engine.cache_tokens / context if self.engine.cache_tokens else begun)
        steps = max(count * mean / max(slots, 1.0), self.job.lengths.longest(self.plan.samples) / self.plan.staleness)
        step = self.engine.model.decode_seconds(max(count * mean / steps, 1.0), context)
        return Generation(steps * step + found.prefill_seconds, found.prefill_seconds, int(slots), 0.0, steps, int(slots < begun))

    def result(self) -> RlEstimate:
        """Everything."""
        job, plan = self.job, self.plan
        step, generation = job.step(), self.generation()
        memory, times = self.memory, tuple(self._times(step, generation))
        seconds = self._iteration(times)
        peak = max(memory, key=lambda phase: phase.total_bytes)
        host = max(memory, key=lambda phase: phase.host_total_bytes)
        fits = all(phase.headroom_bytes >= 0 for phase in memory)
        return RlEstimate(
            format=FORMAT,
            name=job.spec.name,
            device=" + ".join(dict.fromkeys((job.spec.device.name, job.rollout_spec.device.name))),
            num_devices=self.num_devices,
            placement=plan.placement,
            fits=fits and (plan.host_memory is None or host.host_total_bytes <= plan.host_memory),
            peak_bytes=peak.total_bytes,
            peak_phase=peak.name,
            peak_column=max(peak.columns, key=lambda column: peak.columns[column]),
            host_peak_bytes=host.host_total_bytes,
            host_peak_phase=host.name,
            host_capacity_bytes=plan.host_memory,
            memory=memory,
            iteration_seconds=seconds,
            tokens=job.tokens,
            tokens_per_second_per_device=job.tokens / seconds.value / self.num_devices,
            times=times,
            pools=tuple(self._pools(times, seconds.value, generation)),
            lengths=self._lengths(),
            engine=self._engine(generation),
            microbatches=job.spec.schedule.num_microbatches,
            sync_bytes=self.sync_bytes,
            figures=tuple(NamedFigure(each.name, each.value, each.unit, str(each.basis), each.source) for each in self._figures()),
        )

    @property
    def sync_bytes(self) -> int:
        """Bytes of the parameters that the engine gets: the model in 16 bits, or adapters alone."""
        inventory = self.job.inventory
        adapters = sum(tensor.elements for _, tensor in inventory.tensors() if tensor.group is not Group.FROZEN)
        alone = self.job.spec.lora is not None and not self.plan.sync.merged
        return (adapters if alone else inventory.parameters) * FORWARD_BYTES

    def _times(self, step: PlannedTime, generation: Generation) -> Iterator[TimePhase]:
        plan, pool = self.plan, "all" if self.colocated else "training"
        loop, of_layer = self.known["loop"].value, self.known["expert_layer_seconds"].value
        basis = f"{step.basis} step of host {self.job.spec.host.kind.name}, times {loop:g}"
        basis += f", {1000 * of_layer:g} ms of the host for a pass of an MoE layer" if self.job.expert_layers else ""
        yield self._timed("sync", "all", self._sync_seconds(), MODELLED)
        yield self._timed("rollout", "all" if self.colocated else "rollout", generation.seconds, MODELLED)
        if self.colocated and (moved := self.loop.copied_bytes()):
            copied = moved / figures()["copy_bytes_per_second"].value
            yield self._timed("offload", "all", copied, "bytes over the measured rate of a device's link")
        launched = of_layer * self.job.expert_layers
        forward = loop * self.job.forward_seconds(step) + launched
        if plan.reward is not None:
            given = plan.reward.seconds
            seconds = given if given is not None else forward * self._ratio(plan.reward.parameters)
            yield self._timed("reward", pool, seconds, "given" if given is not None else basis, None if given is None else (1.0, 1.0))
        if plan.policy.log_probs:
            yield self._timed("log_probs", pool, forward, basis)
        if plan.reference is not None:
            seconds = plan.reference.seconds or forward * self._ratio(plan.reference.parameters)
            yield self._timed("reference", pool, seconds, basis)
        training = loop * plan.policy.updates * step.seconds + self.job.training_passes * launched
        if plan.critic is not None:
            yield self._timed("critic", pool, (forward + training) * self._ratio(plan.critic.parameters), basis)
        yield self._timed("training", pool, training, basis)

    def _timed(self, name: str, pool: str, seconds: float, basis: str, spread: tuple[float, float] | None = None) -> TimePhase:
        low, high = spread or (self.known["iteration_low"].value, self.known["iteration_high"].value)
        return TimePhase(name, pool, Spread(seconds, seconds * low, seconds * high), basis)

    def _ratio(self, parameters: int | None) -> float:
        return 1.0 if parameters is None else parameters / self.job.inventory.parameters

    def _sync_seconds(self) -> float:
        """Seconds of the transfer: buckets are converted while others are sent over the slowest link that carries all to a device."""
        plan, spec = self.plan, self.job.spec
        moved, converted = self.sync_bytes, self.sync_bytes / self.known["convert_bytes_per_second"].value
        how = plan.sync.how or ("ipc" if self.colocated else "broadcast")
        inside = len(self.rates) == 1 and self.num_devices <= device_of(spec.device).domain.value
        if how == "disk":
            rate = figures()["parallel_node_bytes_per_second"].value
            per_node = self.job.rollout_spec.device.per_node
            nodes = max(1, self.rollout_devices // per_node)
            return moved / rate / max(1, spec.mesh.world_size // spec.device.per_node) + moved / rate * max(1, self.engine.group_size) / (
                per_node * nodes
            )
        if how == "p2p":
            part = self.engine.columns["engine_parameters"] if moved > self.engine.columns["engine_parameters"] else moved
            return max(self._link_ns(part, inside=inside) * NS, converted / self.engine.group_size)
        buckets = ceil(moved / plan.sync.bucket_bytes)
        latency = max(rates.latency_ns for rates in self.rates)
        sent = (self._link_ns(moved, inside=inside) + buckets * latency) * NS
        return max(sent, converted) if how == "ipc" else sent  # a bucket is packed while the one before it is sent

    def _link_ns(self, moved: int, *, inside: bool) -> int:
        """Time of bytes between the pools, by the slower device's links: the node's, or between types of devices the network's."""
        return max(rates.node_ns(moved) if inside else rates.network_ns(moved) for rates in self.rates)

    def _iteration(self, times: tuple[TimePhase, ...]) -> Spread:
        ends = []
        for end in ("value", "low", "high"):
            by_pool = {pool: sum(getattr(phase.seconds, end) for phase in times if phase.pool == pool) for pool in POOLS}
            everyone, training, rollout = (by_pool[pool] for pool in POOLS)
            ends.append(everyone + (max(training, rollout) if self.overlaps else training + rollout))
        return Spread(*ends)

    def _pools(self, times: tuple[TimePhase, ...], iteration: float, generation: Generation) -> Iterator[PoolIdle]:
        if self.colocated:
            yield PoolIdle("all", self.num_devices, iteration, 0.0, generation.empty)
            return
        for name, devices in (("training", self.job.spec.mesh.world_size), ("rollout", self.rollout_devices)):
            busy = sum(phase.seconds.value for phase in times if phase.pool in ("all", name))
            yield PoolIdle(name, devices, busy, 1 - busy / iteration, generation.empty if name == "rollout" else None)

    def _lengths(self) -> ResponseShape:
        lengths = self.job.lengths
        sample = lengths.quantiles(1000)
        cut = sum(length >= lengths.limit for length in sample) / len(sample)
        longest = lengths.longest(self.job.num_responses)
        return ResponseShape(lengths.mean, lengths.at(0.5), lengths.at(0.9), lengths.at(0.99), longest, lengths.limit, cut)

    def _engine(self, generation: Generation) -> EngineShape:
        tp, pp, ep = self.engine.degrees
        count = self.job.num_responses / self.num_groups
        limited = "kv_cache" if generation.stops else "sequences" if generation.slots >= count else "max_sequences"
        context = self.plan.rollout.prompt + self.job.lengths.mean / 2
        return EngineShape(
            name=self.plan.rollout.engine,
            num_groups=self.num_groups,
            tp=tp,
            pp=pp,
            ep=ep,
            sequences_of_group=count,
            slots=generation.slots,
            limited_by=limited,
            cache_tokens=self.engine.cache_tokens,
            steps=generation.steps,
            decode_seconds=self.engine.model.decode_seconds(generation.slots, context),
            prefill_seconds=generation.prefill_seconds,
            tokens_per_second=self.job.num_responses * self.job.lengths.mean / generation.seconds,
        )

    def _figures(self) -> Iterator[RunFigure]:
        rollout = self.plan.rollout
        given = {"memory_fraction", "max_sequences", "batched_tokens", "block_size", "prefix_cache"}
        idle = "eager_layer_seconds" if rollout.graphs else "graph_bytes"
        for name, figure in self.known.items():
            if name != idle and (name not in given or getattr(rollout, name) is None):
                yield figure
        yield figures()["copy_bytes_per_second"]
        device = device_of(self.job.rollout_spec.device)
        for name, rate in (("memory_bandwidth", device.memory_bandwidth), ("node_bandwidth", device.node_bandwidth)):
            yield RunFigure(name, rate.value, "B/s", rate.basis, rate.source)
