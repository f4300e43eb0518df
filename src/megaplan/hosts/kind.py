"""`HostKind`: everything that megaplan asks of a host, as one value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from importlib import import_module
from typing import Any, NamedTuple

from megaplan.columns import Column


class Later:
    """A function, or another value, of a module above this one in the order of imports: imported when it is first used.

    A host's value is read from the rules of a spec up to the command line, and names functions of all these layers.
    """

    def __init__(self, place: str) -> None:
        """`place`: `module:name`."""
        self._module, _, self._name = place.partition(":")

    @cached_property
    def value(self) -> Any:
        """The function itself."""
        return getattr(import_module(self._module), self._name)

    def __call__(self, *arguments: Any) -> Any:
        """Call the function; the caller declares the type of the result."""
        return self.value(*arguments)


class HostKind(NamedTuple):
    """A host: what its framework keeps in memory, runs, refuses and shows. Optional parts are None where the host has none.

    Attributes:
        name: `host.name` of a spec.
        keys: Keys of the section `host` that it reads, beside the name. Code of a key, as its place in a search, asks for the key.
        holds: What it keeps in each column.
        describe: From the section `host`, the words of a report's header.
        budget: `(spec, inventory, layout) -> Budget`.
        kept: `(spec, inventory, layout) -> tuple[KeptBytes, ...]`, for each slot in model order.
        explain: `(spec, inventory, layout, pp_rank) -> Explained`: blocks of a pipeline rank, and the tensors that these keep.
        sums: `(spec, inventory, layout, usable_bytes, measured)` -> for each pipeline rank, sums that every split which fits keeps.
        limits: `(checked)` -> diagnostics of what it cannot run, or is not priced with.
        peaks: `(spec, inventory, memo)` -> `(layout, stages) -> (peaks, work)`, of single pipeline ranks; else the budget's are taken.
        floors: `(inventory, spec) -> AnyFloors`, bounds of the peak over all cuts. A host without them is not searched.
        step: `(spec) -> (Software, Recomputed)`, for the step-time model of frameworks.
        import_: The command `megaplan import NAME`.
        export: `(source) -> Exported`.
        topic: Paragraphs of `megaplan explain NAME`.
        schedules: Those that searches and advice try; empty for all.
        trained: megarun trains it: formulas of columns and padding are of its budget, its step is a replayed schedule, adapters are priced.
        own_layers: Its layers are not the families' operations: positions, norms and prediction modules are its own.
        vocab_with_tp: Embedding and head are sharded over the vocabulary wherever mesh.tp is above 1.
        reshards: Searches and advice vary sharding.reshard_after_forward.
        expandable: Its launch sets expandable segments of torch's allocator unless the spec says otherwise.
        empty_slots: A slot may have the embedding or the head alone, or nothing.
        block_layers: Layers of one of its blocks, which no cut separates.
    """

    name: str
    keys: frozenset[str]
    holds: Mapping[Column, str]
    describe: Callable[[Any], str]
    budget: Later
    kept: Later
    explain: Later = Later("megaplan.hosts.megarun.explain:explain")
    sums: Later = Later("megaplan.partition.layer_bytes:no_limits")
    limits: Later | None = None
    peaks: Later | None = None
    floors: Later | None = None
    step: Later | None = None
    import_: Later | None = None
    export: Later | None = None
    topic: Later | None = None
    schedules: tuple[str, ...] = ()
    trained: bool = False
    own_layers: bool = False
    vocab_with_tp: bool = False
    reshards: bool = True
    expandable: bool = True
    empty_slots: bool = False
    block_layers: int = 1
