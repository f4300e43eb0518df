"""Measured runs by the users' path: each launch is imported, and what is priced is the spec that results."""

from collections.abc import Mapping
from typing import Any

import yaml

from megaplan.errors import MegaplanError, Severity
from megaplan.hosts.megatron.run import MegatronRun, MegatronStage, stages_of
from megaplan.hosts.megatron.workspaces import BLACKWELL_LARGE, SMALL_KIB
from megaplan.importers.megatron.spec import import_megatron
from megaplan.inventory.build import build_inventory
from megaplan.layout.build import build_layout
from megaplan.partition.choose import choose_cuts
from megaplan.spec.models import Spec

DEVICES = {"a100": "a100-80gb", "h100": "h100-sxm"}
"""Device of each platform that is not named after a device."""
STALE_BEFORE = "2025-11"
"""The month from which measurements are of the software that is priced: October's experts and native cross entropy are others."""


def launch_text(arguments: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> str:
    """A launch in the form of Megatron-LM's own tests: YAML of variables and arguments."""
    flags = {f"--{key.replace('_', '-')}": value for key, value in arguments.items() if value is not None}
    return str(yaml.safe_dump({"ENV_VARS": dict(environment or {}), "MODEL_ARGS": flags}, sort_keys=False))


def spec_of_launch(
    arguments: Mapping[str, Any],
    gpus: int | None,
    vocab_size: int | None,
    platform: str,
    *,
    environment: Mapping[str, str] | None = None,
    month: str | None = None,
) -> Spec:
    """The spec that `megaplan import megatron --gpus … --set device.name=…` makes.

    Args:
        arguments: Launch arguments, underscores for dashes.
        gpus: Number of the job's GPUs; None for the fewest.
        vocab_size: Padded vocabulary; None for that of the tokenizer.
        platform: A device, such as `h100`; a prefix `dgx_` is dropped.
        environment: Variables of the launch.
        month: Month of the container image, as `2026-05`; None for a new one.

    Raises:
        MegaplanError: The launch is refused.
    """
    device = platform.removeprefix("dgx_")
    overrides = [f"device.name={DEVICES.get(device, device)}"]
    set_by_launch = "CUBLAS_WORKSPACE_CONFIG" in (environment or {})
    if device.startswith(("b", "gb")) and month is not None and month < BLACKWELL_LARGE and not set_by_launch:
        overrides.append(f"host.cublas_workspace_kib={SMALL_KIB}")
    given = {**arguments, **({"padded_vocab_size": vocab_size} if vocab_size is not None else {})}
    return import_megatron(launch_text(given, environment), "launch.yaml", overrides, gpus).loaded.spec


def stages_of_spec(spec: Spec) -> tuple[MegatronStage, ...]:
    """The pipeline ranks that the estimate prices."""
    inventory = build_inventory(spec)
    layout = build_layout(spec, inventory, choose_cuts(spec, inventory).spans)
    return stages_of(MegatronRun(spec, inventory), layout)


def stage_of_launch(
    arguments: Mapping[str, Any], gpus: int | None, vocab_size: int | None, platform: str, *, pp_rank: int = -1, **more: Any
) -> MegatronStage:
    """A pipeline rank of `spec_of_launch`, by default the last."""
    return stages_of_spec(spec_of_launch(arguments, gpus, vocab_size, platform, **more))[pp_rank]


def changed(stage: MegatronStage, **values: Any) -> MegatronStage:
    """The same rank and cuts with other values of keys of the spec, `__` for a dot: `model__moe__routing_skew=2.0`."""
    spec = stage.spec
    for key, value in values.items():
        spec = _with(spec, key.split("__"), value)
    return stage._replace(run=MegatronRun(spec, build_inventory(spec)))


def _with(section: Any, path: list[str], value: Any) -> Any:
    first, *rest = path
    return section.model_copy(update={first: _with(getattr(section, first), rest, value) if rest else value})


def refusals(arguments: Mapping[str, Any], gpus: int | None = None, vocab_size: int | None = 1024) -> tuple[str, ...]:
    """Reason why the import refuses a launch; empty if it accepts it."""
    try:
        spec_of_launch(arguments, gpus, vocab_size, "h100")
    except MegaplanError as error:
        return tuple(found.detail for found in error.diagnostics if found.severity is Severity.ERROR)
    return ()


def stale(row: Mapping[str, Any]) -> str | None:
    """Reason, by day and branch, why a measurement is of other software than the priced one; None if it is not."""
    if row["branch"] == "long-term":
        return "the long-term branch runs older software"
    if row["measured"] < STALE_BEFORE:
        return f"measured on {row['measured']}, on software of October 2025 or older"
    return None


def graphed(arguments: Mapping[str, Any]) -> bool:
    """True if layers run from CUDA graphs: torch counts what their pool holds between replays as free, so no count is what is priced."""
    return arguments.get("cuda_graph_impl", "none") != "none"


def offloaded(arguments: Mapping[str, Any]) -> bool:
    """True if modules keep their inputs on the host: how many of them are on the device at once is approximate."""
    return bool(arguments.get("fine_grained_activation_offloading"))


def unbalanced(arguments: Mapping[str, Any]) -> str | None:
    """Reason why no single number can be quoted for a rank with some of the experts: nothing in the run balances routing; None if it can.

    A balancing loss has the coefficient 0 unless `--moe-aux-loss-coeff` is given. Sinkhorn and the expert bias balance without one.
    """
    get = arguments.get
    if not get("num_experts") or int(get("expert_model_parallel_size") or 1) == 1 or get("moe_expert_capacity_factor"):
        return None
    kind = str(get("moe_router_load_balancing_type", "aux_loss"))
    if kind == "sinkhorn" or get("moe_router_enable_expert_bias") or float(get("moe_aux_loss_coeff") or 0):
        return None
    return f"moe_router_load_balancing_type = {kind} with moe_aux_loss_coeff = 0: nothing balances routing"


def skewed(stage: MegatronStage, skew: float) -> MegatronStage:
    """The rank with so many rows on its experts, over the even share."""
    return changed(stage, model__moe__routing_skew=skew)
