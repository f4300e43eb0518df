"""Options of blocks: keys whose default gives a plain block, and which not every host can build."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from megaplan.families.registry import families_of
from megaplan.scalars import OptionsSection, Section

OWN_ACTIVATIONS = frozenset({"geglu"})
"""Values of `activation` that were added later."""
ROUTING = frozenset(
    {f"model.moe.{key}" for key in ("score", "expert_bias", "expert_bias_rate", "num_groups", "top_groups", "routed_scale")}
)
"""Keys of expert scoring and selection."""
SCALES = frozenset(
    {"model.zero_centered_norm", "model.embedding_multiplier", "model.attention.latent_norm_eps", "model.attention.window_rope_theta"}
    | {"model.linear_attention.gated_norm_eps", "model.logits_multiplier", "model.mlp.gate_multiplier", "model.mamba.part_multipliers"}
    | {"model.logits_cap", "model.attention.score_cap"}
    | {f"model.{section}.output_multiplier" for section in ("attention", "mamba", "mlp")}
)
"""Constants of norms, embeddings, logits, projections and rotary angles."""
VALUES_ALONE = (
    frozenset({"model.attention.rope_scaling", "model.attention.softmax_scale", "model.moe.swiglu_limit"})
    | {"model.features.mtp.normed_input"}
    | ROUTING
    | SCALES
)
"""Options that affect neither parameters nor time, nor the memory of a host other than megarun."""


class Option(NamedTuple):
    """A key whose value differs from its default.

    Attributes:
        key: Dotted key of the spec.
        value: Value as given.
        default: Value for a plain block.
    """

    key: str
    value: Any
    default: Any

    @property
    def shown(self) -> str:
        """The value as a spec writes it."""
        return _shown(self.value)

    @property
    def neutral(self) -> str:
        """The default as a spec writes it."""
        return _shown(self.default)


def given_options(model: Any) -> Iterator[Option]:
    """The options of a model and its blocks that differ from their defaults."""
    yield from _of("model", model)
    if model.features.mtp is not None:
        yield from _of("model.features.mtp", model.features.mtp)
    for family, section in families_of(model):
        if isinstance(section, OptionsSection):
            yield from _of(f"model.{family.section}", section)
        if isinstance(indexer := getattr(section, "indexer", None), OptionsSection):
            yield from _of(f"model.{family.section}.indexer", indexer)
        if getattr(section, "activation", None) in OWN_ACTIVATIONS:
            yield Option(f"model.{family.section}.activation", section.activation, "swiglu")


def _of(prefix: str, section: OptionsSection) -> Iterator[Option]:
    for name, field in type(section).model_fields.items():
        if name in section.options and (value := getattr(section, name)) != field.default:
            yield Option(f"{prefix}.{name}", value, field.default)


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        listed = ", ".join(map(_shown, value[:8]))
        return f"[{listed}{', …' if len(value) > 8 else ''}]"
    if isinstance(value, Section):
        given = value.model_dump(exclude_defaults=True)
        return f"{{{', '.join(f'{key}: {_shown(inside)}' for key, inside in given.items())}}}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
