"""`HostKind`: everything that megaplan needs to know about a host, as one value."""

from collections.abc import Callable, Mapping
from functools import cached_property
from importlib import import_module
from typing import Any, NamedTuple

from megaplan.columns import Column


class Later:
    """A function, or another value, of a module higher in the import order; it is imported on first use.

    A host's value is read from the rules of a spec up to the command line, and names functions of all these layers.
    """

    def __init__(self, place: str) -> None:
        """`place` has the form `module:name`."""
        self._module, _, self._name = place.partition(":")

    @cached_property
    def value(self) -> Any:
        """The function itself."""
        return getattr(import_module(self._module), self._name)

    def __call__(self, *arguments: Any) -> Any:
        """Call the function; the caller declares the type of the result."""
        return self.value(*arguments)


def share_above(percent: int, most_percent: int) -> float:
    """Share by which a peak that includes `percent` above allocated memory must grow to include `most_percent`."""
    return max(0.0, (100 + most_percent) / (100 + percent) - 1)


class HostKind(NamedTuple):
    """A host: the memory, execution, limits and texts of its framework. Optional parts are None if the host has none.

    Attributes:
        name: `host.name` of a spec.
        keys: Keys of the section `host` that it reads, in addition to the name. Code for a key, such as its place in a search, checks for
            it.
        holds: Contents of each column.
        describe: Function from the section `host` to the words of a report's header.
        budget: `(spec, inventory, layout) -> Budget`.
        kept: `(spec, inventory, layout) -> tuple[KeptBytes, ...]`, for each slot in model order.
        layer_kept: `(spec, name, block) -> bytes` that a layer keeps of a microbatch, its input included; None if they never leave the
            device.
        explain: `(spec, inventory, layout, pp_rank) -> Explained`: blocks of a pipeline rank, and the tensors that they keep.
        sums: `(spec, inventory, layout, usable_bytes, measured)` -> for each pipeline rank, sums that every fitting split keeps.
        tensors: `(spec, inventory, layout)` -> for each pipeline rank, a counter of the bytes of its stored parameters.
        limits: `(checked)` -> diagnostics of settings that it cannot run, or that are not priced.
        peaks: `(spec, inventory, memo)` -> `(layout, stages) -> (peaks, work)`, for single pipeline ranks; by default the budget's.
        floors: `(inventory, spec) -> AnyFloors`, lower bounds on the peak over all cuts. A host without them is not searched.
        reserve: `(spec) -> tuple[ReserveItem, ...]`, memory of its libraries outside torch's allocator.
        step: `(spec) -> (Software, Recomputed)`, for the step-time model of frameworks.
        import_: The command `megaplan import NAME`.
        export: `(source) -> Exported`.
        topic: Paragraphs of `megaplan explain NAME`.
        schedules: Schedules that searches and advice try; empty for all.
        trained: True if megarun trains it: formulas of columns and padding apply, its step is a replayed schedule, adapters are priced.
        carries_values: Stages pass on values that later layers read (`Family.payload`); without, no cut separates these layers.
        saves_working_copy: A checkpoint holds the parameters in precision.params in addition to the masters.
        own_layers: The host's layers do not use the families' operations: it has its own positions, norms and prediction modules.
        vocab_with_tp: Embedding and head are sharded over the vocabulary if mesh.tp is above 1.
        reshards: Searches and advice vary sharding.reshard_after_forward.
        expandable: The launch sets expandable segments of torch's allocator unless the spec says otherwise.
        graphs: Values of `host.cuda_graphs` that it knows, its default first.
        dispatchers: Values of `host.moe_dispatcher` that it knows, its default first.
        empty_slots: A slot may have only the embedding or the head, or nothing.
        few_microbatches: 1F1B runs fewer microbatches than pipeline ranks.
        xla: XLA compiles its program, for GPUs and TPUs; other hosts run torch on GPUs.
        more_reserved: Function from the section `host` to the largest share of a peak by which measured runs have reserved more.
        block_layers: Number of layers of one of its blocks, which no cut separates; if above 1, all blocks have one recompute policy.
    """

    name: str
    keys: frozenset[str]
    holds: Mapping[Column, str]
    describe: Callable[[Any], str]
    budget: Later
    kept: Later
    layer_kept: Later | None = None
    explain: Later = Later("megaplan.hosts.megarun.explain:explain")
    sums: Later = Later("megaplan.partition.layer_bytes:no_limits")
    tensors: Later = Later("megaplan.budget.pinned:shard_bytes")
    limits: Later | None = None
    peaks: Later | None = None
    floors: Later | None = None
    reserve: Later | None = None
    step: Later | None = None
    import_: Later | None = None
    export: Later | None = None
    topic: Later | None = None
    schedules: tuple[str, ...] = ()
    trained: bool = False
    carries_values: bool = False
    saves_working_copy: bool = False
    own_layers: bool = False
    vocab_with_tp: bool = False
    reshards: bool = True
    expandable: bool = True
    graphs: tuple[str, ...] = ("none",)
    dispatchers: tuple[str, ...] = ("alltoall",)
    empty_slots: bool = False
    few_microbatches: bool = False
    xla: bool = False
    more_reserved: Callable[[Any], float] = lambda _: 0.0
    block_layers: int = 1
