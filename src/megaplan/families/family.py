"""What megaplan asks a family of blocks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from megaplan.blocks.dims import Dims
from megaplan.blocks.ops import BlockProgram
from megaplan.blocks.storages import Shapes
from megaplan.blocks.work import Ops, Workload
from megaplan.dtypes import DType
from megaplan.errors import Diagnostic
from megaplan.families.checks import CheckedSpec
from megaplan.inventory.tensors import ParamTensor


class Selective(NamedTuple):
    """Selective recompute of a family: the one statement that ledger, cost model and runtime read.

    Attributes:
        method: Of the family's module in megarun: what of its forward runs under a checkpoint, `experts.forward` for a submodule's.
        reruns: Names of the operations in it that run again before backward.
        caches: Operations in it that do not, by the operation of megakernels that runs each; their outputs are kept.
    """

    method: str
    reruns: frozenset[str]
    caches: Mapping[str, str] = {}

    def program(self, *ops: Any, held: frozenset[str] = frozenset(), more: frozenset[str] = frozenset()) -> BlockProgram:
        """The program of these operations; `more` are those that run again beside `reruns` under this mesh."""
        kept = {name for op in ops for name in op.keeps}
        cached = frozenset(name for op in ops if op.name in self.caches for name in op.makes if name in kept)
        return BlockProgram(ops, held, self.reruns | more, cached)


class Exchanges(NamedTuple):
    """What a block moves between ranks, in elements of activations.

    Attributes:
        sharded: True if its tensor group gathers its input and scatters the sum of its output.
        gathered_width: Width of what is gathered; None for the residual stream's.
        context_width: Width of the keys and values that a context group gathers, of all heads.
        rows: Rows that a token sends to the ranks of an expert group.
        row_width: Width of such a row; None for the residual stream's.
    """

    sharded: bool = True
    gathered_width: int | None = None
    context_width: int = 0
    rows: int = 0
    row_width: int | None = None


class ServingState(NamedTuple):
    """What a layer holds for each sequence that is served.

    Attributes:
        cache_width: Elements in the key-value cache for each token.
        window: Tokens that the cache holds at most; None for the whole context.
        state_bytes: State that does not grow with the context.
    """

    cache_width: int = 0
    window: int | None = None
    state_bytes: int = 0


class ProgramOf(Protocol):
    """A layer's operations, and the storages that they name."""

    def __call__(self, dims: Dims, section: Any, variant: Any, operations: Any, parameters: DType, /) -> tuple[BlockProgram, Shapes]:
        """Program and storages.

        Args:
            dims: Local sizes.
            section: The model's.
            variant: `Family.variant` of the layer.
            operations: `Family.operations` of the layer.
            parameters: Dtype of the parameters' gradients.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A letter of the pattern.

    Attributes:
        letter: As patterns spell it.
        title: What the letter stands for, as a person reads it.
        section: Key of `model` that has its dimensions.
        tensors: (section, hidden size, variant) to the parameters of a layer, its pre-norm included.
        program: Operations and storages, see `ProgramOf`.
        work: (workload, section, hidden size, variant) to the cost model's operations.
        selective: (section, variant) to its selective recompute.
        full_refused: Why it may not be recomputed as a whole; None if it may.
        variant: (section, layer) to what of a layer's place decides its tensors and work; layers of one variant share a `Block`.
        operations: (section, layer) to what else of it decides its operations alone.
        rules: (check, section) to what does not fit.
        sharded: (section, hidden size) to the counts that `mesh.tp` must divide, by name.
        exchanges: (section, hidden size) to what it moves between ranks.
        serving: (section, hidden size, variant, dtype of activations) to what it holds for a sequence that is served.
        convolution: (section) to the taps of its causal convolution; None without one. Under CP a piece has as many positions less one.
        rotary: (section) to the width that rotary embedding turns; None for layers without it.
        idle_parameters: (section, hidden size) to the parameters of a layer that a token does not meet.
        step_sums: (section) to the fp64 numbers of a layer's buffers: sums over the microbatches of a step, and what they move; 0 for none.
        execution_keys: Keys of the section that change how it runs or what it is expected to cost, not the function or its parameters.
        timed: True if the step-time model of other frameworks has terms for it.
        last_own: The last of the parameters that belong to the block's module itself, not to one of its children: FSDP2 lists them last.
        in_pieces: True if a CP group computes its pieces of a sequence one after another.
        banks: True if it has a bank of experts, with an FSDP2 group of its own.
        region: Code of the diagnostic for a cut inside a run of such layers; None if it is as good as another.
    """

    letter: str
    title: str
    section: str
    tensors: Callable[[Any, int, Any], tuple[ParamTensor, ...]]
    program: ProgramOf
    work: Callable[[Workload, Any, int, Any], Ops]
    selective: Callable[[Any, Any], Selective]
    full_refused: str | None = None
    variant: Callable[[Any, int], Hashable] = lambda _section, _layer: None
    operations: Callable[[Any, int], Hashable] = lambda _section, _layer: None
    rules: Callable[[CheckedSpec, Any], Iterator[Diagnostic]] = lambda _checked, _section: iter(())
    sharded: Callable[[Any, int], Mapping[str, int]] = lambda _section, _hidden: {}
    exchanges: Callable[[Any, int], Exchanges] = lambda _section, _hidden: Exchanges()
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
        """The model's section of the family.

        Raises:
            ValueError: It has none (a spec that was not checked).
        """
        section = getattr(model, self.section)
        if section is None:
            raise ValueError(f"the model needs a section model.{self.section} and has none; check_rules reports this")
        return section
