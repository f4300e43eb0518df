"""`training` of a spec from the arguments of a launch."""

from typing import Any

from megaplan.hosts.megatron.vocabulary import section_rows
from megaplan.importers.megatron.arguments import Arguments
from megaplan.scalars import MAX_INT


def read_training(launch: Arguments) -> dict[str, Any]:
    """`training`; keys that the launch leaves open keep the spec's defaults."""
    found = {row.key.rpartition(".")[2]: launch.converted(row) for row in section_rows("training") if launch.value(row.name) is not None}
    rate = _rate(launch, found.get("learning_rate"))
    return {**found, **({"rate_schedule": rate} if rate else {})}


def _steps(launch: Arguments, key: str) -> int | None:
    """A number of steps, from 0 on; None if absent."""
    found = launch.value(key)
    if found is None or (isinstance(found, int) and not isinstance(found, bool) and 0 <= found <= MAX_INT):
        return found
    launch.wrong(key, found, "an integer from 0 on")
    return None


def _rate(launch: Arguments, base: float | None) -> dict[str, Any] | None:
    style = launch.value("lr_decay_style")
    warmup, decay = (_steps(launch, key) for key in ("lr_warmup_iters", "lr_wsd_decay_iters"))
    least, fraction, shape = launch.number("min_lr"), launch.number("lr_warmup_fraction"), launch.text("lr_wsd_decay_style")
    if style is None:
        return None
    steps = _steps(launch, "train_iters")
    if steps is not None and (warmup or 0) + (decay or 0 if style == "WSD" else 0) > steps:
        launch.warn("lr_warmup_iters" if warmup else "lr_wsd_decay_iters", f"the run ends before, after {steps} steps")
        return None
    kept: dict[str, Any] = {} if warmup is None else {"warmup_steps": warmup}
    final = {} if not base or least is None else {"final_fraction": float(f"{least / base:.12g}")}
    if fraction is not None:
        launch.warn("lr_warmup_fraction", "warm-up of a spec is in steps")
    if style == "constant":
        return {"kind": "constant", **kept}
    if style == "cosine":
        return {"kind": "cosine", **kept, **final}
    shapes = {"linear": "linear", "minus_sqrt": "sqrt"}
    if style == "WSD" and decay is not None and shape in shapes:
        return {"kind": "wsd", **kept, "decay_steps": decay, "decay": shapes[shape], **final}
    launch.warn("lr_decay_style", "rates of a spec are constant, cosine or WSD with a linear or square-root decay")
    return None
