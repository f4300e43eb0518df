"""The values of a search: a layout, its policy, and their results."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from megaplan.dtypes import DType
from megaplan.errors import Severity
from megaplan.layout.build import Spans
from megaplan.spec.models import Spec
from megaplan.spec.pattern import BOUNDARY
from megaplan.spec.rules import check_rules

Objective = Literal["time", "headroom", "tokens_per_second_per_device"]


class LayoutChoice(NamedTuple):
    """Degrees, schedule and micro-batch: everything that distinguishes one row of the result from another.

    Attributes:
        pp: Pipeline ranks.
        vpp: Slots of each pipeline rank.
        kind: Kind of the schedule.
        tp: Tensor-parallel ranks.
        cp: Context-parallel ranks.
        ep: Ranks over which experts are spread.
        etp: Ranks over which each expert is sharded.
        dp_replicate: Copies of the sharded state.
        dp_shard: Ranks over which state is sharded.
        micro_batch: Sequences of a microbatch.
        num_microbatches: Microbatches of an optimizer step.
    """

    pp: int
    vpp: int
    kind: str
    tp: int
    cp: int
    ep: int
    etp: int
    dp_replicate: int
    dp_shard: int
    micro_batch: int
    num_microbatches: int


ONE_RANK = LayoutChoice(1, 1, "1f1b", 1, 1, 1, 1, 1, 1, 1, 1)


class MemoryPolicy(NamedTuple):
    """Settings that trade a layout's memory for time; the result has the best policy of each layout.

    Attributes:
        recompute: Policy of each letter of the pattern.
        reshard: `sharding.reshard_after_forward`.
        vocab_parallel: `mesh.vocab_parallel`.
        triton: `host.kernels` is triton; False for a host without this property.
        distributed: `host.distributed_optimizer`; True for a host without this property.
        full_layers: `host.recompute_num_layers`; 0 for none.
        modules: `host.recompute_modules`.
        grads: `precision.grads` and `precision.reduce`.
    """

    recompute: tuple[tuple[str, str], ...]
    reshard: bool
    vocab_parallel: bool
    triton: bool
    distributed: bool
    full_layers: int
    modules: tuple[str, ...]
    grads: str

    @property
    def rerun(self) -> dict[str, str]:
        """The policies of the letters that recompute any operation."""
        return {letter: name for letter, name in self.recompute if name != "none"}

    @property
    def gradients(self) -> dict[str, DType]:
        """Values of `precision`."""
        return grads_in(self.grads)


SpecOf = Callable[[LayoutChoice, MemoryPolicy], Spec]
"""Function that gives the spec of a layout with a policy."""


@dataclass(frozen=True, slots=True)
class Fitting:
    """Cuts of one spec.

    Attributes:
        spans: Cuts that fit, or the last ones that were tried.
        over_bytes: Excess of the worst rank over the memory less the requested headroom; 0 or less if they fit.
        proven: True if it is proven that no cuts fit; then `over_bytes` is the excess of storage and kept tensors alone.
        beyond: True if it is proven that the step of any fitting cuts is longer than the limit.
        by_sums: True if the proof also holds for every policy that keeps more. It does for sums of live bytes, not for reserved memory,
            which may be less with more live bytes.
    """

    spans: Spans
    over_bytes: int
    proven: bool
    beyond: bool = False
    by_sums: bool = True


class Exact(NamedTuple):
    """A layout with a policy and its cuts.

    Attributes:
        layout: The layout.
        policy: Policy of the layout.
        spans: Layers of each slot.
        step_ns: Modelled time of an optimizer step.
        peak_bytes: Largest peak of any rank.
        headroom_bytes: Usable bytes less the peak.
    """

    layout: LayoutChoice
    policy: MemoryPolicy
    spans: Spans
    step_ns: int
    peak_bytes: int
    headroom_bytes: int

    def order(self, objective: Objective) -> tuple[object, ...]:
        """The sort key of rows: the objective, the other quantity, and the layout itself, so that no two keys are equal."""
        values = (-self.headroom_bytes, self.step_ns) if objective == "headroom" else (self.step_ns, -self.headroom_bytes)
        return (*values, self.layout, self.policy)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of evaluating one layout.

    Attributes:
        layout: The layout.
        best: The best policy that fits; None if none fits or none could win.
        num_evaluated: Policies whose memory or time was evaluated exactly.
        num_pruned: Policies excluded by a bound.
        bound_ns: Lower bound on the step over all cuts and all policies that may fit.
        proven: True if every policy that does not fit is proven not to fit for any cuts.
        over_bytes: Smallest excess of a policy over the memory; 0 if one fits, or none was tried.
        column: The largest column of that attempt; None if one fits.
        is_late: A deadline passed before a policy was evaluated.
    """

    layout: LayoutChoice
    best: Exact | None
    num_evaluated: int
    num_pruned: int
    bound_ns: int
    proven: bool
    over_bytes: int = 0
    column: str | None = None
    is_late: bool = False


@dataclass(frozen=True, slots=True)
class Illegal:
    """A class of layouts that no run can have.

    Attributes:
        key: Key of the spec, as in the diagnostic.
        code: Code of the diagnostic.
        detail: The equation of the first combination.
        count: Combinations of degrees excluded for it.
    """

    key: str
    code: str
    detail: str
    count: int


def grads_in(name: str) -> dict[str, DType]:
    """Values of `precision` by which gradients accumulate and are reduced in a dtype."""
    return dict.fromkeys(("grads", "reduce"), DType[name.upper()])


def takes_grads(base: Spec, name: str) -> bool:
    """True if the spec's host and model take gradients in a dtype, which may be the spec's own."""
    changed = base.model_copy(update={"precision": base.precision.model_copy(update=grads_in(name))})
    errors = [{(found.code, found.detail) for found in check_rules(spec) if found.severity is Severity.ERROR} for spec in (base, changed)]
    return name == str(base.precision.grads) or errors[1] <= errors[0]


def kept_parts(base: Spec, layout: LayoutChoice, policy: MemoryPolicy) -> int | None:
    """`sharding.reshard_size` of the spec, if it divides the layout's shard groups."""
    size, shared = base.sharding.reshard_size, layout.dp_shard
    banks = shared * layout.cp * layout.tp // (layout.ep * layout.etp) if base.model.moe is not None else shared
    return size if size is not None and policy.reshard and shared % size == banks % size == 0 else None


def without_manual_cuts(spec: Spec, letters: str) -> Spec:
    """The spec with weighted cuts."""
    update: dict[str, Any] = {"mode": "weighted", "objective": "step_time", "spans": None, "reason": None, "protects": ()}
    model = spec.model
    if BOUNDARY in model.pattern:
        model = model.model_copy(update={"pattern": letters, "num_layers": len(letters)})
    return spec.model_copy(update={"split": spec.split.model_copy(update=update), "model": model})
