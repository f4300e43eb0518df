"""E blocks: token-choice experts with an optional shared expert."""

from megaplan.families.family import Exchanges, Family
from megaplan.families.moe.composition import moe_work
from megaplan.families.moe.formulas import FORMULAS
from megaplan.families.moe.program import moe_operations, moe_program, moe_selective
from megaplan.families.moe.rules import moe_rules
from megaplan.families.moe.section import MixtureOfExperts
from megaplan.families.moe.tensors import moe_tensors


def _sharded(moe: MixtureOfExperts, _hidden_size: int) -> dict[str, int]:
    return {"moe.shared_ffn_hidden_size": moe.shared_ffn_hidden_size} if moe.shared_ffn_hidden_size else {}


def _exchanges(moe: MixtureOfExperts, _hidden_size: int, variant: float | None) -> Exchanges:
    return Exchanges(
        sharded=moe.shared_ffn_hidden_size > 0,
        rows=moe.top_k,
        row_width=moe.latent_size,
        skew=moe.skew_in(variant),
        counts=moe.capacity is None,
    )


def _idle_parameters(moe: MixtureOfExperts, hidden_size: int) -> int:
    """Parameters of the routed experts that a token does not choose."""
    return moe.num_experts * (moe.num_choices - moe.top_k) * moe.parameters_per_expert(hidden_size) // moe.num_choices


EXPERTS = Family(
    letter="E",
    title="experts",
    section="moe",
    tensors=moe_tensors,
    program=moe_program,
    work=moe_work,
    exchanging=moe_operations,
    formulas=FORMULAS,
    selective=moe_selective,
    variant=lambda moe, _layer, place: moe.variant_of(place),
    full_refused="its dispatch would run twice; selective recomputes expert GEMMs and activation alone",
    rules=moe_rules,
    sharded=_sharded,
    exchanges=_exchanges,
    idle_parameters=_idle_parameters,
    step_sums=lambda moe: moe.num_step_sums,
    execution_keys=frozenset({"routing_skew"}),
    banks=True,
    region="MP337",
)
