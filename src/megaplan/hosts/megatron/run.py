"""`MegatronRun`: a spec as Megatron-Core runs it, and `MegatronStage`: one pipeline rank of it, as the operators of its model chunks."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from megaplan.families.attention.variants import AttentionVariant
from megaplan.hosts.megatron.ledger import Operator, evaluate
from megaplan.hosts.megatron.pattern import EMBEDDING, ENDS, IN_SIXTEEN_BIT, LETTERS, LOSS, MTP, SIXTEEN_BIT, VARIED, count, plain
from megaplan.hosts.megatron.setting import Setting
from megaplan.hosts.megatron.tensors import Parameters, operator_parameters
from megaplan.inventory.tensors import Inventory
from megaplan.layout.ranks import Layout
from megaplan.low_precision import Recipe
from megaplan.spec.host import device_of
from megaplan.spec.local import local_dims
from megaplan.spec.models import Spec
from megaplan.spec.pattern import depth_blocks

GRAPHED = {"attn": "*", "mamba": "M", "mlp": "-", "moe": "E", "moe_router": "", "moe_preprocess": ""}
"""Operators that are entirely in a graph of each module; the router's scratch is not counted."""


class MegatronRun:
    """The part of a run that all pipeline ranks share: sizes, and the bytes and parameters of each operator, evaluated once.

    Attributes:
        spec: A checked spec whose host is Megatron-Core.
        inventory: Unsharded parameter tensors.
        letters: The model's letters, one per layer.
        at: Local sizes, and the recipe of linears in low precision.
        depth: Prediction modules.
        ahead: Operators of one prediction module.
        graphed: Letters of operators that run from CUDA graphs, whose scratch is in their own pool.
    """

    def __init__(self, spec: Spec, inventory: Inventory) -> None:
        """Set sizes; operators are evaluated at their first use."""
        self.spec, self.inventory = spec, inventory
        self.letters = "".join(block.family for block in inventory.layers)
        recipe, mtp, host = spec.precision.recipe, spec.model.features.mtp, spec.host
        self.at = setting_of(spec)
        self.depth = mtp.depth if mtp is not None else 0
        self.ahead = "".join(LETTERS[letter] for letter in mtp.letters) if mtp is not None else ""
        if recipe is not None and not recipe.prediction:
            self.ahead = "".join(IN_SIXTEEN_BIT[letter] for letter in self.ahead)
        modules: Iterable[str] = (host.cuda_graph_modules or GRAPHED) if host.cuda_graphs == "layers" else ()
        self.graphed = frozenset("".join(GRAPHED[module] for module in modules))
        self._skews = tuple(sorted({block.variant for block in inventory.layers if block.family == "E" and block.variant is not None}))
        if mtp is not None:
            ahead = {block.family.letter: block.variant for block in depth_blocks(spec.model)}
            self.ahead = "".join(self._varied(letter, ahead.get("E")) for letter in self.ahead)
        self._operators: dict[str, Operator] = {}
        self._parameters: dict[str, Parameters] = {}

    def operator_letter(self, layer: int) -> str:
        """The letter of a layer's operator; the 16-bit operator's if a low-precision recipe does not cover the layer."""
        own, recipe = LETTERS[self.letters[layer]], self.spec.precision.recipe
        own = own if recipe is None or recipe.covers(self.letters[layer], layer, len(self.letters)) else IN_SIXTEEN_BIT[own]
        if layer in self.spec.model.parallel_layers:
            return chr(VARIED[own])
        return self._varied(own, self.inventory.layers[layer].variant)

    def _varied(self, letter: str, variant: Any) -> str:
        """The letter of an operator; experts with their own skew and attention with another layer's choice have separate letters."""
        if variant is None or letter not in VARIED:
            return letter
        if isinstance(variant, AttentionVariant):
            return chr(VARIED[letter]) if variant.shares else letter
        return chr(VARIED[letter] + self._skews.index(variant))

    def skew(self, letter: str) -> float | None:
        """The skew of an operator of experts that is its own."""
        own = plain(letter)
        return None if letter.isascii() or _in_low_precision(own) != "E" else self._skews[ord(letter) - VARIED[own]]

    def is_graphed(self, letter: str) -> bool:
        """True if the operator of a letter runs from a CUDA graph of layers."""
        return _in_low_precision(plain(letter)) in self.graphed

    def operator(self, letter: str) -> Operator:
        """Bytes of an operator."""
        found = self._operators.get(letter)
        if found is None:
            found = self._operators[letter] = evaluate(*self._plain(letter))
        return found

    def parameters(self, letter: str) -> Parameters:
        """The parameters of an operator, or for `MTP` of a prediction module. Callers must not change the result."""
        found = self._parameters.get(letter)
        if found is None:
            at, plain = self._plain(self.ahead[0] if letter == MTP else letter)
            found = self._parameters[letter] = operator_parameters(at, self.inventory, MTP if letter == MTP else plain)
        return found

    def _plain(self, letter: str) -> tuple[Setting, str]:
        """An operator's plain letter, and its sizes: without low precision if it is a 16-bit letter."""
        own, skew = plain(letter), self.skew(letter)
        at = self.at if letter.isascii() else self.at._replace(skew=skew, shares=skew is None)
        whole = SIXTEEN_BIT.get(own)
        return (at, own) if whole is None else (at._replace(recipe=None), whole)

    def expert_settings(self, letters: str) -> Iterator[Setting]:
        """Settings of the experts among the letters of operators and ends."""
        for letter in letters:
            at, own = self._plain(letter) if letter not in ENDS else (self.at, letter)
            if own == "E":
                yield at

    def chunks(self, layout: Layout, pp_rank: int) -> tuple[str, ...]:
        """The operators of a pipeline rank's model chunks, in the order of its virtual stages."""
        last, found = len(layout.slots) - 1, []
        for slot in layout.of_rank(pp_rank):
            own = "".join([self.operator_letter(layer) for layer in range(slot.start, slot.stop)])
            found.append(EMBEDDING * (slot.index == 0) + own + (MTP * self.depth + LOSS) * (slot.index == last))
        return tuple(found)

    @property
    def end(self) -> str:
        """Letters of the last slot after its layers."""
        return MTP * self.depth + LOSS

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes that full recompute saves per microbatch for a group of layers: their input, or a rank's part of it."""
        return -(-self.boundary_bytes // self.at.dims.tp) if self.spec.host.distribute_saved_activations else self.boundary_bytes

    @property
    def boundary_bytes(self) -> int:
        """Bytes that one stage sends to the next of a microbatch: the residual stream."""
        return self.at.element_bytes * self.at.stream_tokens * self.at.dims.hidden


def setting_of(spec: Spec) -> Setting:
    """The sizes of a spec's rank, and the recipe of its linears in low precision."""
    recipe, dims = spec.precision.recipe, local_dims(spec)
    if not spec.host.sequence_parallel:
        dims = dims._replace(residual_tokens=dims.tokens)
    return Setting(spec, dims, None if recipe is None else Recipe(recipe.name, device_of(spec.device).generation))


def _in_low_precision(letter: str) -> str:
    """The operator of a plain letter, whichever precision it has."""
    return SIXTEEN_BIT.get(letter, letter)


class MegatronStage(NamedTuple):
    """One pipeline rank.

    Attributes:
        run: The part that all ranks share.
        chunks: Letters of its chunks' operators: of Megatron's hybrid pattern, of embedding and loss, and of operators in 16 bits.
        pp_rank: The pipeline rank.
        data_index: Place among the ranks that share dense state; None for the last.
        expert_index: Index among the ranks that share experts' state; None for the last.
    """

    run: MegatronRun
    chunks: tuple[str, ...]
    pp_rank: int
    data_index: int | None = None
    expert_index: int | None = None

    @property
    def spec(self) -> Spec:
        """The spec."""
        return self.run.spec

    @property
    def letters(self) -> str:
        """Letters of all chunks."""
        return "".join(self.chunks)

    def count(self, operator: str) -> int:
        """Operators of a kind in all chunks, in low precision or not."""
        return count(self.letters, operator)


def stages_of(run: MegatronRun, layout: Layout, pp_ranks: Sequence[int] | None = None) -> tuple[MegatronStage, ...]:
    """The last data rank of each pipeline rank of a layout; `pp_ranks` are the pipeline ranks to return, None for all."""
    return tuple([MegatronStage(run, run.chunks(layout, rank), rank) for rank in (range(layout.pp) if pp_ranks is None else pp_ranks)])
