"""The interface of a family of blocks."""

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from megaplan.blocks.formula import Formula
from megaplan.blocks.ops import BlockProgram, Dims
from megaplan.blocks.payload import Payload
from megaplan.blocks.storages import Shapes
from megaplan.blocks.work import Workload, Works
from megaplan.dtypes import DType
from megaplan.errors import Diagnostic
from megaplan.families.checks import CheckedSpec
from megaplan.inventory.tensors import ParamTensor


class Selective(NamedTuple):
    """Selective recompute of a family; ledger, cost model and runtime all read this value.

    Attributes:
        method: Method of the family's module in megarun that runs under a checkpoint; `experts.forward` names a method of a submodule.
        reruns: Names of its operations that run again before backward.
        caches: Operations in it whose outputs are saved instead, each with the operation of megakernels that runs it.
    """

    method: str
    reruns: frozenset[str]
    caches: Mapping[str, str] = {}

    def program(self, *ops: Any, held: frozenset[str] = frozenset(), more: frozenset[str] = frozenset()) -> BlockProgram:
        """The program of these operations; `more` are operations that this mesh recomputes in addition to `reruns`."""
        kept = {name for op in ops for name in op.keeps}
        cached = frozenset(name for op in ops if op.name in self.caches for name in op.makes if name in kept)
        return BlockProgram(ops, held, self.reruns | more, cached)


class Exchanges(NamedTuple):
    """Data that a block moves between ranks, in elements of activations.

    Attributes:
        sharded: True if its tensor group gathers its input and scatters the sum of its output.
        gathered_width: Width of the gathered tensor; None for the residual stream's dtype.
        context_width: Width of the keys and values that a context group gathers, of all heads.
        latent_width: Width of the latents that it can gather instead (`mesh.context_exchange`); 0 if it cannot.
        expanded_width: Width of all heads' keys and values that it makes of latents, without the rotary key.
        rotary_width: Width of the rotary key of all heads.
        rows: Rows that a token sends to the ranks of an expert group.
        row_width: Width of such a row; None for the residual stream's dtype.
        skew: Rows that the busiest rank receives over the even share.
        counts: True if ranks exchange the counts of these rows first.
    """

    sharded: bool = True
    gathered_width: int | None = None
    context_width: int = 0
    latent_width: int = 0
    expanded_width: int = 0
    rotary_width: int = 0
    rows: int = 0
    row_width: int | None = None
    skew: float = 1.0
    counts: bool = False


class ServingState(NamedTuple):
    """State of a layer for each sequence that is served.

    Attributes:
        cache_width: Elements in the key-value cache for each token.
        window: Largest number of tokens in the cache; None for the whole context.
        state_bytes: Bytes of state whose size does not depend on the context; a tensor group divides it.
        cache_parts: Heads that make the cache, which a tensor group distributes; 1 for latents, which every rank holds.
        cached_by: Parameters that make a head's keys and values: ranks with the same head hold them twice.
    """

    cache_width: int = 0
    window: int | None = None
    state_bytes: int = 0
    cache_parts: int = 1
    cached_by: frozenset[str] = frozenset()


class ProgramOf(Protocol):
    """Function that gives a layer's operations and the storages that they name."""

    def __call__(self, dims: Dims, section: Any, variant: Any, operations: Any, parameters: DType, /) -> tuple[BlockProgram, Shapes]:
        """Program and storages of a layer.

        Args:
            dims: Local sizes.
            section: The model's section.
            variant: `Family.variant` of the layer.
            operations: `Family.operations` of the layer.
            parameters: Dtype of the parameters' gradients.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A letter of the pattern.

    Attributes:
        letter: Letter in patterns.
        title: Meaning of the letter, for readers.
        section: Key of `model` with its dimensions.
        tensors: (section, hidden size, variant) to the parameters of a layer, its pre-norm included.
        program: Operations and storages, see `ProgramOf`.
        work: (workload, section, hidden size, variant) to the cost model's operations.
        formulas: Names of its operations to their FLOPs as text, for `megaplan explain`.
        selective: (section, variant) to its selective recompute.
        full_refused: Reason that it must not have full recompute; None if it may.
        variant: (section, layer, place among the layers of its letter) to the properties that decide its tensors and work; layers of one
            variant share a `Block`.
        operations: (section, layer) to the properties that decide only its operations.
        payload: (section) to the values that its layers pass on to later layers; None for none.
        rules: (check, section) to the diagnostics of its rules.
        sharded: (section, hidden size) to the counts that `mesh.tp` must divide, by name.
        exchanges: (section, hidden size, variant) to the data that it moves between ranks.
        exchanging: (workload, section) to the operations of `program` without sizes, among them the exchanges of rows; None if it has no
            rows that leave their rank.
        serving: (section, hidden size, variant, dtype of activations) to its state for each sequence that is served.
        convolution: (section) to the taps of its causal convolution; None without one. Under CP a piece has at least one position less.
        rotary: (section) to the rotated width of rotary embedding; None for layers without it.
        idle_parameters: (section, hidden size) to the parameters of a layer that one token does not use.
        step_sums: (section) to the fp64 values in a layer's buffers: sums over the microbatches of a step, and the buffers they update; 0
            for none.
        execution_keys: Keys of the section that change how it runs or its expected cost, but not the function or its parameters.
        timed: True if the step-time model of other frameworks has terms for it.
        last_own: Last parameter that belongs to the block's module itself, not to one of its children: FSDP2 lists them last.
        in_pieces: True if a CP group computes its pieces of a sequence one after another.
        banks: True if it has an expert bank, which is a separate FSDP2 group.
        region: Code of the diagnostic for a cut inside a run of such layers; None if all cuts are equally good.
    """

    letter: str
    title: str
    section: str
    tensors: Callable[[Any, int, Any], tuple[ParamTensor, ...]]
    program: ProgramOf
    work: Callable[[Workload, Any, int, Any], Works]
    selective: Callable[[Any, Any], Selective]
    formulas: Mapping[str, Formula] = field(default_factory=dict, hash=False)
    full_refused: str | None = None
    variant: Callable[[Any, int, int], Hashable] = lambda _section, _layer, _place: None
    operations: Callable[[Any, int], Hashable] = lambda _section, _layer: None
    payload: Callable[[Any], tuple[Payload, ...]] | None = None
    rules: Callable[[CheckedSpec, Any], Iterator[Diagnostic]] = lambda _checked, _section: iter(())
    sharded: Callable[[Any, int], Mapping[str, int]] = lambda _section, _hidden: {}
    exchanging: Callable[[Workload, Any], BlockProgram] | None = None
    exchanges: Callable[[Any, int, Any], Exchanges] = lambda _section, _hidden, _variant: Exchanges()
    serving: Callable[[Any, int, Any, DType], ServingState] = lambda _section, _hidden, _variant, _dtype: ServingState()
    convolution: Callable[[Any], int | None] = lambda _section: None
    rotary: Callable[[Any], int] | None = None
    idle_parameters: Callable[[Any, int], int] = lambda _section, _hidden: 0
    step_sums: Callable[[Any], int] = lambda _section: 0
    execution_keys: frozenset[str] = frozenset()
    timed: bool = True
    last_own: str = ""
    in_pieces: bool = False
    banks: bool = False
    region: str | None = None

    def section_of(self, model: Any) -> Any:
        """The model's section for the family.

        Raises:
            ValueError: The model lacks the section (an unchecked spec).
        """
        section = getattr(model, self.section)
        if section is None:
            raise ValueError(f"the model needs a section model.{self.section} and has none; check_rules reports this")
        return section
