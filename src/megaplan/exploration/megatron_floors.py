"""What every rank of a Megatron-Core layout holds at least, whatever its cuts: a bound of the largest peak from sums over the whole model.

A layer l on chunk c of rank r needs s_l + a_rc k_l: parameters, gradients and state, and what the microbatches in flight keep. For any
weights w_r the ranks' bytes, weighted and added up, are at least Σ_l min_rc w_r (s_l + a_rc k_l), and no rank exceeds the largest peak C:
C Σ w_r ≥ Σ_l min_rc w_r (s_l + a_rc k_l). Two kinds of weights are tried: w_r = 1, and what makes a mean layer weigh the same on all ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from megaplan.hosts.megatron.from_spec import common_job, operator_letter
from megaplan.hosts.megatron.job import EMBEDDING, LOSS, MTP, MegatronJob
from megaplan.hosts.megatron.peak import fixed_bytes, fullest_counts
from megaplan.hosts.megatron.saved import chunk
from megaplan.inventory.tensors import Inventory
from megaplan.partition.megatron_bytes import static_bytes
from megaplan.spec.models import Spec

SLACK = 1 - 1e-9
"""Of a bound, for the rounding of its sums."""


class Need(NamedTuple):
    """Bytes of one kind of operator, or of an end of the model: at all times, and of a microbatch in flight."""

    static: int
    kept: int


class Needs(NamedTuple):
    """Bytes of a model on one tensor and data rank.

    Attributes:
        operators: Each kind, and how many layers are of it.
        ends: Of the first and of the last slot, beside layers.
        whole: Of the model on one rank.
        fixed: Buffers of every rank.
    """

    operators: tuple[tuple[Need, int], ...]
    ends: tuple[Need, Need]
    whole: Need
    fixed: int


class MegatronFloors:
    """Of one model under host megatron."""

    def __init__(self, inventory: Inventory) -> None:
        self._letters = "".join(block.family for block in inventory.layers)
        self._needs: dict[tuple[object, ...], Needs] = {}

    def peak_bytes(self, spec: Spec) -> int:
        """No cuts have a smaller largest peak."""
        needs, mesh = self._of(spec), spec.mesh
        if mesh.pp == 1:
            return _with_fragments(spec, needs.fixed + needs.whole.static + needs.whole.kept)
        group = min(spec.host.microbatch_group_size or mesh.pp, spec.schedule.microbatches_per_update)
        counts = [_counts(mesh.pp - 1 - rank, mesh.vpp, group, spec.schedule.microbatches_per_update) for rank in range(mesh.pp)]
        static = sum(need.static * number for need, number in needs.operators)
        kept = sum(need.kept * number for need, number in needs.operators)
        even = [1.0] * mesh.pp
        levelled = [1.0 / max(1, static + min(of_rank) * kept) for of_rank in counts]
        return _with_fragments(spec, needs.fixed + max(_least(needs, counts, weights) for weights in (even, levelled)))

    def shared_bytes(self, spec: Spec) -> int:
        """A smaller bound that looks at no schedule: what is stored of the whole model has to be on some rank."""
        needs = self._of(spec)
        if spec.mesh.pp == 1:
            return _with_fragments(spec, needs.fixed + needs.whole.static)
        static = sum(need.static * number for need, number in needs.operators) + sum(need.static for need in needs.ends)
        return _with_fragments(spec, needs.fixed + static // spec.mesh.pp)

    def least_bytes(self, spec: Spec, options: Sequence[Sequence[tuple[str, str]]]) -> int:  # noqa: ARG002
        """The same, which holds under any recompute policy."""
        return self.shared_bytes(spec)

    def kept_bytes(self, spec: Spec) -> int:
        """To order policies by: less, the more runs again."""
        host = spec.host
        again = len(host.recompute_modules) + (spec.recompute.of("A") != "none") + 100 * bool(host.recompute_num_layers)
        return -2 * again - host.distributed_optimizer

    def _of(self, spec: Spec) -> Needs:
        mesh, precision = spec.mesh, spec.precision
        degrees = mesh.tp, mesh.cp, mesh.ep, mesh.etp, mesh.dp_shard, mesh.efsdp, mesh.pp == 1
        key = (*degrees, spec.batch, spec.host, spec.recompute.of("A"), precision.grads, precision.reduce)
        found = self._needs.get(key)
        if found is None:
            found = self._needs[key] = self._needs_of(spec)
        return found

    def _needs_of(self, spec: Spec) -> Needs:
        job = common_job(spec, self._letters)
        own = "".join([operator_letter(spec, self._letters, layer) for layer in range(len(self._letters))])
        depth = spec.model.features.mtp.depth if spec.model.features.mtp is not None else 0
        last = MTP * depth + LOSS
        operators = tuple([(_need(job, letter), number) for letter, number in Counter(own).items()])
        whole = _need(job, EMBEDDING + own + last)
        return Needs(operators, (_need(job, EMBEDDING), _need(job, last)), whole, sum(fixed_bytes(job, set()).values()))


def _need(job: MegatronJob, letters: str) -> Need:
    if job.recompute_num_layers and len(letters) == 1 and letters not in (EMBEDDING, LOSS):  # a group keeps one input
        group = 0 if job.recompute_block else 2 * job.stream_tokens * job.hidden_size // job.recompute_num_layers
        return Need(static_bytes(job, letters), group)
    return Need(static_bytes(job, letters), chunk(job, letters))


def _counts(behind: int, vpp: int, group: int, count: int) -> tuple[int, ...]:
    """Microbatches of each chunk at one moment of a rank, whatever its chunks keep."""
    return (min(count, behind + 1),) if vpp == 1 else fullest_counts((1,) * vpp, behind, group, count)


def _least(needs: Needs, counts: Sequence[tuple[int, ...]], weights: Sequence[float]) -> int:
    places = {(weight, count) for weight, of_rank in zip(weights, counts, strict=True) for count in of_rank}
    total = sum(number * min([weight * (need.static + count * need.kept) for weight, count in places]) for need, number in needs.operators)
    first, last = needs.ends
    total += weights[0] * (first.static + counts[0][0] * first.kept) + weights[-1] * (last.static + counts[-1][-1] * last.kept)
    return int(total / sum(weights) * SLACK)


def _with_fragments(spec: Spec, size: int) -> int:
    return size + size * spec.host.fragmentation_percent // 100
