"""Defaults of a project: `[tool.megaplan]` of pyproject.toml, or megaplan.toml, in the working directory or the nearest one above it."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from megaplan.diagnostics import refuse
from megaplan.families.registry import families_of
from megaplan.scalars import OptionsSection, Section

OWN_ACTIVATIONS = frozenset({"geglu", "xielu", "relu2glu"})
"""Values of `activation` that were added later."""
ROUTING = frozenset(
    {f"model.moe.{key}" for key in ("score", "expert_bias", "expert_bias_rate", "num_groups", "top_groups", "routed_scale")}
)
"""Keys of expert scoring and selection."""
SCALES = frozenset(
    {"model.zero_centered_norm", "model.embedding_multiplier", "model.attention.latent_norm_eps", "model.attention.window_rope_theta"}
    | {"model.attention.window_rotary_dim"}
    | {"model.linear_attention.gated_norm_eps", "model.logits_multiplier", "model.mlp.gate_multiplier", "model.mamba.part_multipliers"}
    | {"model.mamba.inner_norm_eps", "model.linear_attention.gate_soft_cap"}
    | {"model.logits_cap", "model.attention.score_cap"}
    | {f"model.{section}.output_multiplier" for section in ("attention", "mamba", "mlp")}
)
"""Constants of norms, embeddings, logits, projections and rotary angles."""
VALUES_ALONE = (
    frozenset({"model.attention.rope_scaling", "model.attention.softmax_scale", "model.moe.swiglu_limit", "model.moe.capacity_drop"})
    | {"model.features.mtp.normed_input"}
    | ROUTING
    | SCALES
)
"""Options that do not affect parameters and time, nor the memory of other hosts than megarun."""


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
    yield from _of("model.features", model.features)
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
        value = value.model_dump(exclude_defaults=True)
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_shown(inside)}' for key, inside in value.items())}}}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


OWN, PROJECT = "megaplan.toml", "pyproject.toml"


class Settings(NamedTuple):
    """Defaults of a project; None if the file lacks them.

    Attributes:
        device: Name of the device.
        gpus: GPUs of a job.
        price: Price of one GPU for one hour, in any currency.
        calibration: Path of a device file (`megaplan calibrate -o`), relative to the file that names it.
        file: The file.
    """

    device: str | None = None
    gpus: int | None = None
    price: float | None = None
    calibration: str | None = None
    file: str | None = None


def find_settings(folder: Path | None = None) -> Settings:
    """The settings for a folder, or for the working directory.

    Raises:
        MegaplanError: MP144, the file is not TOML, or has an unknown key or a value of another type.
    """
    start = Path.cwd() if folder is None else folder
    for place in (start, *start.parents):
        for name in (OWN, PROJECT):
            path = place / name
            if os.path.isfile(path) and (table := _table(path)) is not None:
                return _settings(table, path)
        if os.path.exists(place / ".git"):
            break
    return Settings()


def _table(path: Path) -> dict[str, Any] | None:
    """The table of a file; None for a project without settings."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.name == PROJECT and "tool.megaplan" not in text:
            return None
        import tomllib  # noqa: PLC0415  (most folders have no such file)

        document = tomllib.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise refuse("MP144", f"{path}: {error}", file=str(path)) from None
    if path.name == PROJECT:
        document = document.get("tool", {}).get("megaplan")
    return document if isinstance(document, dict) else None


def _settings(table: dict[str, Any], path: Path) -> Settings:
    checks = {
        "device": lambda value: isinstance(value, str),
        "gpus": lambda value: isinstance(value, int) and not isinstance(value, bool) and value > 0,
        "price": lambda value: isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf"),
        "calibration": lambda value: isinstance(value, str),
    }
    kinds = {"device": "text", "gpus": "a positive integer", "price": "a positive number", "calibration": "a path"}
    for key, value in table.items():
        if key not in checks:
            raise refuse("MP144", f"{key} is not a key here; the keys are {', '.join(checks)}", 'device = "h100"', file=str(path), key=key)
        if not checks[key](value):
            raise refuse("MP144", f"{key} = {value!r}, but it takes {kinds[key]}", file=str(path), key=key)
    found = dict(table)
    if "calibration" in found:
        found["calibration"] = str(path.parent / found["calibration"])
    return Settings(**found, file=str(path))
