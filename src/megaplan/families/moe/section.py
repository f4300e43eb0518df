"""The section `model.moe`: dimensions of E blocks."""

from __future__ import annotations

from megaplan.scalars import Activation, FactorFromOne, NaturalInt, NonNegativeFloat, PositiveFloat, PositiveInt, Section, StrictBool


class MixtureOfExperts(Section):
    """Token-choice top-k experts with an optional shared expert.

    Attributes:
        num_experts: Routed experts of a layer.
        top_k: Experts that each token chooses.
        ffn_hidden_size: Width of a routed expert.
        shared_ffn_hidden_size: Width of the shared expert; 0 for none.
        activation: swiglu (three matrices), relu2 or gelu (two).
        normalize_top_k: The chosen experts' weights sum to 1.
        capacity_factor: Rows kept an expert over the even share; null for dropless.
        routing_skew: Rows of the busiest expert over the even share, for the budget; 1.0 is balanced.
        balance_loss_coefficient: Of each E layer's load-balancing loss, balanced over each sequence; 0 for none.
        z_loss_coefficient: Of each E layer's router z-loss, the mean over tokens; 0 for none.
    """

    num_experts: PositiveInt
    top_k: PositiveInt
    ffn_hidden_size: PositiveInt
    shared_ffn_hidden_size: NaturalInt = 0
    activation: Activation = "swiglu"
    normalize_top_k: StrictBool = True
    capacity_factor: PositiveFloat | None = None
    routing_skew: FactorFromOne = 1.0
    balance_loss_coefficient: NonNegativeFloat = 0.0
    z_loss_coefficient: NonNegativeFloat = 0.0

    @property
    def has_router_losses(self) -> bool:
        """Whether its routers have losses of their own."""
        return self.balance_loss_coefficient + self.z_loss_coefficient > 0
