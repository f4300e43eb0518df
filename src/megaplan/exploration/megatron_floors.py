"""Lower bounds on the largest peak of a Megatron-Core layout over all cuts, from sums over the whole model.

A layer l on chunk c of rank r needs s_l + a_rc k_l: parameters, gradients and state, and tensors of the microbatches in flight. For any
weights w_r the ranks' bytes, weighted and added up, are at least Σ_l min_rc w_r (s_l + a_rc k_l), and no rank exceeds the largest peak C:
C Σ w_r ≥ Σ_l min_rc w_r (s_l + a_rc k_l). Two kinds of weights are tried: w_r = 1, and weights that make a mean layer equal on all ranks.
"""

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from megaplan.exploration.any_floors import AnyFloors
from megaplan.exploration.values import LayoutChoice, MemoryPolicy, SpecOf
from megaplan.hosts.megatron.chunks import chunk
from megaplan.hosts.megatron.pattern import EMBEDDING, LOSS, count
from megaplan.hosts.megatron.peak import fixed_bytes, fullest_counts
from megaplan.hosts.megatron.run import MegatronRun
from megaplan.inventory.tensors import Inventory
from megaplan.partition.megatron_bytes import static_bytes
from megaplan.spec.models import Spec

SLACK = 1 - 1e-9
"""Fraction of a bound that is kept, for the rounding of its sums."""
StackCounts = tuple[tuple[int, ...], ...]


class Need(NamedTuple):
    """Bytes of one kind of operator, or of an end of the model: permanent, and per microbatch in flight."""

    static: int
    kept: int


class ModelBytes(NamedTuple):
    """Bytes of a model on one tensor and data rank.

    Attributes:
        operators: Each kind, with its number of layers.
        ends: Bytes outside the layers on the first and the last slot; a table that both share on one stage counts for the last.
        fixed: Buffers of every rank.
    """

    operators: tuple[tuple[Need, int], ...]
    ends: tuple[Need, Need]
    fixed: int

    @property
    def static(self) -> int:
        """Stored bytes of all operators."""
        return sum([need.static * number for need, number in self.operators])

    @property
    def kept(self) -> int:
        """Kept bytes of all operators."""
        return sum([need.kept * number for need, number in self.operators])


class MegatronFloors(AnyFloors):
    """Lower bounds for one model under host megatron; values are cached by the degrees that they depend on."""

    def __init__(self, inventory: Inventory, spec: Spec) -> None:
        """`spec` is one of the bounded specs, which differ in the varied keys of a search."""
        run = MegatronRun(spec, inventory)
        own = Counter(map(run.operator_letter, range(len(run.letters))))
        self._inventory, self._last = inventory, run.end
        self._counts, self._tied = tuple(own.items()), spec.model.tie_embeddings
        self._group, self._fragmentation = spec.host.microbatch_group_size, spec.host.fragmentation_percent
        self._static: dict[tuple[object, ...], dict[str, int]] = {}
        self._kept: dict[tuple[object, ...], dict[str, int]] = {}
        self._fixed: dict[tuple[object, ...], int] = {}

    def peak_bytes(self, spec: Spec) -> int:
        """Lower bound on peak memory over all cuts."""
        return self._peak(*_asked(spec))

    def peak_on(self, layout: LayoutChoice, policy: MemoryPolicy, spec_of: SpecOf) -> int:
        """The same for a layout with a policy; its spec is built only on demand."""
        return self._peak(layout, policy, spec_of)

    def shared_bytes(self, spec: Spec) -> int:
        """A weaker bound without a schedule: the stored bytes of the whole model, distributed over the ranks."""
        layout, policy, spec_of = _asked(spec)
        return self.least_on(layout, (policy,), spec_of)

    def least_on(self, mesh: LayoutChoice, policies: Sequence[MemoryPolicy], spec_of: SpecOf) -> int:
        """The same over several policies and any schedule."""
        stored = {(policy.distributed, policy.grads): policy for policy in policies}
        found = []
        for policy in stored.values():
            needs = self._needs(mesh, policy, spec_of)
            ends = needs.ends[0].static + needs.ends[1].static
            found.append(needs.fixed + (needs.static + ends) // mesh.pp)
        return self._with_fragments(min(found))

    def stored_bytes(self, spec: Spec) -> int:
        """Parameters, gradients and state of the whole model."""
        needs = self._needs(*_asked(spec))
        return needs.static + needs.ends[0].static + needs.ends[1].static

    def kept_bytes(self, spec: Spec) -> int:
        """Key by which policies are ordered: more recompute gives less."""
        host = spec.host
        again = len(host.recompute_modules) + (spec.recompute.of("A") != "none") + 100 * bool(host.recompute_num_layers)
        return -2 * again - host.distributed_optimizer

    def _peak(self, layout: LayoutChoice, policy: MemoryPolicy, spec_of: SpecOf) -> int:
        needs = self._needs(layout, policy, spec_of)
        static, kept, (first, last) = needs.static, needs.kept, needs.ends
        if layout.pp == 1:
            return self._with_fragments(needs.fixed + static + kept + first.static + first.kept + last.static + last.kept)
        group = min(self._group or layout.pp, layout.num_microbatches)
        counts = _counts(layout.pp, layout.vpp, group, layout.num_microbatches)
        least = [min(of_rank) for of_rank in counts]
        even = static + min(least) * kept + first.static + counts[0][0] * first.kept + last.static + counts[-1][-1] * last.kept
        weights = [1.0 / max(1, static + count * kept) for count in least]
        return self._with_fragments(needs.fixed + max(int(even / layout.pp * SLACK), _least(needs, counts, weights)))

    def _needs(self, layout: LayoutChoice, policy: MemoryPolicy, spec_of: SpecOf) -> ModelBytes:
        """Stored bytes of each kind of operator, by the degrees that shard it, and the bytes that a microbatch keeps, by its tokens."""
        one_stage = layout.pp == 1
        shares = layout.tp, layout.ep, layout.etp, layout.dp_shard * layout.cp, one_stage, policy.distributed, policy.grads
        tokens = layout.tp, layout.cp, layout.micro_batch, policy
        routed = *tokens, layout.ep, layout.etp
        stored, kept, of_experts = self._static.get(shares), self._kept.get(tokens), self._kept.get(routed)
        if stored is None or kept is None or of_experts is None:
            run = MegatronRun(spec_of(layout, policy), self._inventory)
            letters = [letter for letter, _ in self._counts]
            stored = stored or {name: static_bytes(run, name) for name in (*letters, EMBEDDING, self._last)}
            kept = kept or {name: _kept(run, name) for name in letters if not count(name, "E")}
            own = [letter for letter in letters if count(letter, "E")]
            of_experts = of_experts or {name: _kept(run, name) for name in (*own, EMBEDDING, self._last)}
            self._static[shares], self._kept[tokens], self._kept[routed] = stored, kept, of_experts
            self._fixed[routed] = sum(fixed_bytes(run, (), set()).values())
        kept = kept | of_experts
        ends = [Need(stored[name], kept[name]) for name in (EMBEDDING, self._last)]
        if one_stage and self._tied:
            ends[0] = ends[0]._replace(static=0)
        operators = tuple([(Need(stored[letter], kept[letter]), number) for letter, number in self._counts])
        return ModelBytes(operators, (ends[0], ends[1]), self._fixed[routed])

    def _with_fragments(self, size: int) -> int:
        return size + size * self._fragmentation // 100


def _asked(spec: Spec) -> tuple[LayoutChoice, MemoryPolicy, SpecOf]:
    """A spec by its layout and the settings that distinguish its policy."""
    mesh, batch, schedule = spec.mesh, spec.batch, spec.schedule
    degrees = mesh.pp, mesh.vpp, schedule.kind, mesh.tp, mesh.cp, mesh.ep, mesh.etp, mesh.dp_replicate, mesh.dp_shard
    host, precision = spec.host, spec.precision
    again = (("A", spec.recompute.of("A")),)
    layers, modules = host.recompute_num_layers or 0, host.recompute_modules
    grads = f"{precision.grads} {precision.reduce}"
    policy = MemoryPolicy(again, False, mesh.vocab_parallel, False, host.distributed_optimizer, layers, modules, grads)
    return LayoutChoice(*degrees, batch.micro_batch_size, schedule.microbatches_per_update), policy, lambda *_: spec


def _kept(run: MegatronRun, letters: str) -> int:
    group = run.spec.host.recompute_num_layers
    if group and len(letters) == 1 and letters not in (EMBEDDING, LOSS):  # a group keeps one input
        return 0 if run.spec.host.recompute_method == "block" else run.checkpoint_bytes // (group * run.spec.host.block_layers)
    return chunk(run, letters)


@lru_cache(maxsize=4096)
def _counts(pp: int, vpp: int, group: int, count: int) -> StackCounts:
    """Microbatches of each chunk of each rank at one of its points, independent of the bytes that chunks keep."""
    if vpp == 1:
        return tuple([(min(count, pp - rank),) for rank in range(pp)])
    return tuple([fullest_counts((1,) * vpp, pp - 1 - rank, group, count) for rank in range(pp)])


def _least(needs: ModelBytes, counts: StackCounts, weights: Sequence[float]) -> int:
    places = {(weight, min(of_rank)) for weight, of_rank in zip(weights, counts, strict=True)}
    total = sum(
        [number * min([weight * (need.static + count * need.kept) for weight, count in places]) for need, number in needs.operators]
    )
    first, last = needs.ends
    total += weights[0] * (first.static + counts[0][0] * first.kept) + weights[-1] * (last.static + counts[-1][-1] * last.kept)
    return int(total / sum(weights) * SLACK)
