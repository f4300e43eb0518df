"""The section `model.moe`: dimensions of E blocks."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Tag

from megakernels.ops.moe.facts import ExpertSizes
from megaplan.scalars import (
    BRANCH,
    GATED,
    Activation,
    FactorFromOne,
    NaturalInt,
    NonNegativeFloat,
    OptionsSection,
    PositiveFloat,
    PositiveInt,
    Section,
    StrictBool,
)


class LayerSkew(Section):
    """Routing skew that is larger in the model's first E layers, as in trained models.

    Attributes:
        first: Skew of the first E layer, or a list for the first E layers in order.
        rest: Skew of all others.
    """

    first: Annotated[
        Annotated[FactorFromOne, Tag(f"{BRANCH}number")] | Annotated[tuple[FactorFromOne, ...], Tag(f"{BRANCH}list")],
        Discriminator(lambda value: f"{BRANCH}{'list' if isinstance(value, list | tuple) else 'number'}"),
    ]
    rest: FactorFromOne = 1.0


def _form(value: Any) -> str:
    """The form in which a skew is given."""
    if isinstance(value, Mapping | LayerSkew):
        return f"{BRANCH}section"
    return f"{BRANCH}{'list' if isinstance(value, list | tuple) else 'number'}"


RoutingSkew = Annotated[
    Annotated[FactorFromOne, Tag(f"{BRANCH}number")]
    | Annotated[tuple[FactorFromOne, ...], Tag(f"{BRANCH}list")]
    | Annotated[LayerSkew, Tag(f"{BRANCH}section")],
    Discriminator(_form),
]
"""One skew for all E layers, a list with one per E layer in order, or one for the first layers and one for the rest."""


class MixtureOfExperts(OptionsSection):
    """Routed experts, chosen by tokens or choosing tokens, with an optional shared expert.

    Attributes:
        num_experts: Routed experts of a layer.
        top_k: Experts that each token chooses; with expert_choice the mean at a capacity_factor of 1.
        null_experts: Further choices of the router whose output is zero: a token that chooses them has fewer experts.
        expert_choice: Each expert takes the tokens with its largest scores, up to its capacity (default 1.0).
        ffn_hidden_size: Width of a routed expert.
        shared_ffn_hidden_size: Width of the shared expert; 0 for none.
        own_norms: Experts, shared expert and router read their own norms, and the outputs of both kinds of experts are normed.
        shared_gate: The shared expert's output is multiplied by the sigmoid of one score per token.
        latent_size: Width of the routed experts' inputs and outputs, between two projections that all share; null for hidden_size.
        activation: swiglu or geglu (three matrices), relu2 or gelu (two).
        bias: Bias on every projection of the routed experts.
        swiglu_limit: Limit of gpt-oss: gate is at most this, up within ± this plus 1, the sigmoid of 1.702 gate; null for plain swiglu.
        router_bias: Bias on the router's projection.
        score_correction: A parameter per expert, added to its score only for the choice; it has no gradient and keeps its value.
        score: A token's scores of its experts: softmax over all, or sigmoid of each.
        expert_bias: A number per expert, added to its score only for the choice; it is a buffer, not a parameter.
        expert_bias_rate: Amount that a step adds to the bias of an expert with fewer rows than the mean, and subtracts with more.
        num_groups: Equal groups of experts; a token chooses top_groups of them before it chooses experts; 1 for no groups.
        top_groups: Groups that each token chooses: by their best score, or with sigmoid scores by the sum of their best two.
        routed_scale: Factor of the chosen experts' weights.
        normalize_top_k: The chosen experts' weights sum to 1, before routed_scale.
        capacity_factor: Rows kept per expert and source rank, relative to the even share, in buffers of that size; null for dropless.
        capacity_drop: Rows that an expert drops beyond its capacity: of the smallest weights (score), or of the last tokens (position).
        routing_skew: Rows of the busiest expert relative to the even share; also a list with one for each E layer, or {first, rest}.
        balance_loss_coefficient: Coefficient of each E layer's load-balancing loss, balanced over each sequence; 0 for none.
        z_loss_coefficient: Coefficient of each E layer's router z-loss, the mean over tokens; 0 for none.
    """

    options: ClassVar[frozenset[str]] = frozenset(
        {"shared_gate", "own_norms", "latent_size", "bias", "router_bias", "score_correction"}
        | {
            "score",
            "expert_bias",
            "expert_bias_rate",
            "num_groups",
            "top_groups",
            "routed_scale",
            "swiglu_limit",
            "capacity_drop",
            "null_experts",
            "expert_choice",
        }
    )

    num_experts: PositiveInt
    top_k: PositiveInt
    null_experts: NaturalInt = 0
    expert_choice: StrictBool = False
    ffn_hidden_size: PositiveInt
    shared_ffn_hidden_size: NaturalInt = 0
    own_norms: StrictBool = False
    shared_gate: StrictBool = False
    latent_size: PositiveInt | None = None
    activation: Activation = "swiglu"
    bias: StrictBool = False
    swiglu_limit: PositiveFloat | None = None
    router_bias: StrictBool = False
    score_correction: StrictBool = False
    score: Literal["softmax", "sigmoid"] = "softmax"
    expert_bias: StrictBool = False
    expert_bias_rate: NonNegativeFloat = 0.0
    num_groups: PositiveInt = 1
    top_groups: PositiveInt = 1
    routed_scale: PositiveFloat = 1.0
    normalize_top_k: StrictBool = True
    capacity_factor: PositiveFloat | None = None
    capacity_drop: Literal["score", "position"] = "score"
    routing_skew: RoutingSkew = 1.0
    balance_loss_coefficient: NonNegativeFloat = 0.0
    z_loss_coefficient: NonNegativeFloat = 0.0

    @property
    def num_choices(self) -> int:
        """Outputs of the router: experts and null experts."""
        return self.num_experts + self.null_experts

    @property
    def slots(self) -> int:
        """Experts that the router records for each token: the chosen ones, or all experts that may choose it."""
        return self.num_experts if self.expert_choice else self.top_k

    @property
    def capacity(self) -> float | None:
        """Rows of an expert's buffer over the even share; None without buffers."""
        return 1.0 if self.expert_choice and self.capacity_factor is None else self.capacity_factor

    @property
    def takes_some(self) -> bool:
        """True if a (token, slot) pair may have no row, or a row no pair: with buffers, or with null experts."""
        return self.capacity is not None or self.null_experts > 0

    def rows_of(self, num_tokens: int) -> int:
        """Rows of tokens under even routing: `top_k` each, without null experts' rows."""
        return -(-num_tokens * self.top_k * self.num_experts // self.num_choices)

    def row_width(self, hidden_size: int) -> int:
        """Width of the routed experts' inputs and outputs."""
        return self.latent_size or hidden_size

    def parameters_per_expert(self, hidden_size: int) -> int:
        """Parameters of one routed expert: two matrices, three with a gate, and their biases."""
        rows, matrices = self.row_width(hidden_size), 3 if self.activation in GATED else 2
        biases = (matrices - 1) * self.ffn_hidden_size + rows if self.bias else 0
        return matrices * rows * self.ffn_hidden_size + biases

    @property
    def skews(self) -> tuple[float, ...]:
        """Skews of the first E layers in order, at least one; every E layer after them has the last."""
        given = self.routing_skew
        if isinstance(given, LayerSkew):
            return (*(given.first if isinstance(given.first, tuple) else (given.first,)), given.rest)
        return given if isinstance(given, tuple) else (given,)

    def variant_of(self, place: int) -> float | None:
        """Skew of an E layer, None if all have the same; `place` is its number among the E layers, and prediction depths follow them."""
        skews = self.skews
        return skews[min(place, len(skews) - 1)] if len(skews) > 1 else None

    def skew_in(self, variant: float | None) -> float:
        """Skew of the E layers of a variant."""
        return self.skews[0] if variant is None else variant

    def busiest_share(self, skew: float, ep: int) -> Fraction:
        """Rows of the busiest of `ep` expert ranks over the even share: by a layer's skew all rows at most, or the capacity."""
        if self.capacity is not None:
            return Fraction(str(self.capacity))
        return min(Fraction(str(skew)), Fraction(ep)) if ep > 1 else Fraction(1)

    @property
    def largest_skew(self) -> float:
        """The largest skew of all E layers."""
        return max(self.skews)

    @property
    def num_step_sums(self) -> int:
        """Rows of each expert, entropy, and the router's two losses; and the experts' bias, which has the same dtype."""
        return self.num_choices * (2 if self.expert_bias else 1) + 3

    @property
    def has_router_losses(self) -> bool:
        """True if the routers have their own losses."""
        return self.balance_loss_coefficient + self.z_loss_coefficient > 0


def expert_sizes(moe: MixtureOfExperts, tokens: int, slots: int, hidden_size: int, itemsize: int, *, ep: int, etp: int) -> ExpertSizes:
    """Sizes of this rank's bank.

    Args:
        moe: The model's section.
        tokens: Tokens, or rows that arrived from other ranks.
        slots: Rows per token.
        hidden_size: Width of the residual stream.
        itemsize: Bytes of an element.
        ep: Ranks over which the experts are spread.
        etp: Ranks over which each expert is sharded.
    """
    widths = moe.ffn_hidden_size // etp, moe.row_width(hidden_size)
    return ExpertSizes(tokens, slots, moe.num_experts // ep, *widths, moe.activation in GATED, moe.bias, itemsize)
