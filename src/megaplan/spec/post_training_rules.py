"""Rules of the section `post_training`: lengths, pools, and the engine's degrees."""

from collections.abc import Iterator
from math import ceil

from megaplan.devices import device_names
from megaplan.errors import Diagnostic
from megaplan.families.checks import divisors, remainder, use_one_of
from megaplan.spec.context import Checked
from megaplan.spec.host import DeviceRef, device_of
from megaplan.spec.mesh_rules import sharded_by_blocks
from megaplan.spec.post_training import PostTraining
from megaplan.wording import series

KEY = "post_training"
RISING = ("p50", "p90", "p99")
GROUP_HEADS = "attention.num_kv_heads"


def post_training_rules(checked: Checked) -> Iterator[Diagnostic]:
    """Yields MP850 and MP218."""
    plan: PostTraining | None = checked.spec.post_training
    if plan is None:
        return
    yield from _lengths(checked, plan)
    yield from _pools(checked, plan)
    yield from _degrees(checked, plan)


def _lengths(checked: Checked, plan: PostTraining) -> Iterator[Diagnostic]:
    given, prompt, row = plan.rollout.response, plan.rollout.prompt, checked.spec.batch.seq_length
    here = f"{KEY}.rollout.response"
    limit = given.max if given.max is not None else int(row - prompt)
    if limit < 1 or prompt + limit > row:
        room = max(1, int(row - prompt))
        detail = f"a prompt of {prompt:g} and a response of {limit:,} tokens, and batch.seq_length is {row:,}"
        yield checked.error("MP850", detail, here, f"--set {here}.max={room}", f"--set batch.seq_length={int(prompt) + max(limit, 1)}")
        return
    points = {name: value for name in RISING if (value := getattr(given, name)) is not None}
    values = list(points.values())
    if given.mean is None and not points:
        yield checked.error("MP850", "the response has no mean and no percentile", here, f"--set {here}.mean={limit // 2}")
    if given.mean is not None and len(points) > 1:
        names = " and ".join(points)
        detail = f"mean is given with {names}, and with a mean one percentile gives the spread"
        yield checked.error("MP850", detail, here, f"--set {here}.mean=null")
    if values != sorted(values):
        detail = f"percentiles must not decrease: {', '.join(f'{name} {value:g}' for name, value in points.items())}"
        rising = " ".join(f"--set {here}.{name}={value:g}" for name, value in zip(points, sorted(values), strict=True))
        yield checked.error("MP850", detail, here, rising)
    for name, value in ({"mean": given.mean} if given.mean is not None else {}).items() | points.items():
        if value > limit:
            longer = [] if prompt + value <= row else [f"--set batch.seq_length={ceil(prompt + value)}"]
            hint = " ".join((f"--set {here}.max={ceil(value)}", *longer))
            yield checked.error("MP850", f"{name} = {value:g} is above the limit of {limit:,} tokens", f"{here}.{name}", hint)


def _pools(checked: Checked, plan: PostTraining) -> Iterator[Diagnostic]:
    rollout, world = plan.rollout, checked.spec.mesh.world_size
    pool = rollout.gpus or world
    ranks = rollout.pp * max(rollout.tp, rollout.ep or 1)
    if pool % ranks:
        detail = f"{pool} devices of the rollout, and a group has {ranks}"
        yield checked.error("MP850", detail, f"{KEY}.rollout.gpus", f"--set {KEY}.rollout.gpus={-(-pool // ranks) * ranks}")
    if rollout.ep is not None and rollout.ep % rollout.tp:
        detail = f"rollout.ep = {rollout.ep} is not a multiple of rollout.tp = {rollout.tp}"
        yield checked.error("MP850", detail, f"{KEY}.rollout.ep", f"--set {KEY}.rollout.ep=null")
    if plan.placement == "colocated" and pool > world:
        detail = f"{pool} devices of a colocated rollout, and the training has {world}"
        yield checked.error("MP850", detail, f"{KEY}.rollout.gpus", f"--set {KEY}.placement=split")
    if plan.placement == "colocated" and plan.staleness:
        detail = f"staleness = {plan.staleness}, but colocated parts work one after the other"
        yield checked.error("MP850", detail, f"{KEY}.staleness", f"--set {KEY}.placement=split", f"--set {KEY}.staleness=0")
    if plan.placement == "split" and plan.sync.how == "ipc":
        detail = "sync.how = ipc, and the pools are on different devices"
        yield checked.error("MP850", detail, f"{KEY}.sync.how", f"--set {KEY}.sync.how=broadcast")
    if rollout.device is not None:
        yield from _device(checked, rollout.device, colocated=plan.placement == "colocated")
    if plan.policy.updates > plan.prompts * plan.samples:
        detail = f"{plan.policy.updates} updates of {plan.prompts * plan.samples} responses"
        yield checked.error("MP850", detail, f"{KEY}.policy.updates", f"--set {KEY}.policy.updates=1")
    for name in ("reference", "reward", "critic"):
        if name in plan.offload and getattr(plan, name) is None:
            yield checked.warning("MP850", f"offload has {name}, but the plan has none", f"{KEY}.offload")


def _device(checked: Checked, device: DeviceRef, *, colocated: bool) -> Iterator[Diagnostic]:
    """Yields MP850, MP504 and MP506 about the device of the rollout."""
    here = f"{KEY}.rollout.device"
    if colocated:
        detail = f"rollout.device = {device.name}, but a colocated rollout is on the devices of training"
        yield checked.error("MP850", detail, here, f"--set {KEY}.placement=split", f"--set {here}=null")
    if device.name not in device_names():
        detail = f"{here}.name = {device.name}; the data file has {', '.join(device_names())}"
        yield checked.error("MP504", detail, f"{here}.name", "megaplan devices")
        return
    rollout = checked.spec.post_training.rollout if checked.spec.post_training is not None else None
    peaks, dtype = device_of(device).peak_flops, (None if rollout is None else rollout.dtype) or checked.spec.precision.params
    if dtype not in peaks:
        detail = f"the rollout multiplies in {dtype}, and {device.name} multiplies {series(list(peaks), 'and')}"
        yield checked.error("MP506", detail, f"{KEY}.rollout.dtype", f"--set {KEY}.rollout.dtype=bf16")


def _degrees(checked: Checked, plan: PostTraining) -> Iterator[Diagnostic]:
    rollout, moe = plan.rollout, checked.spec.model.moe
    if rollout.pp > checked.spec.model.num_layers:
        detail = f"rollout.pp = {rollout.pp}, but the model has {checked.spec.model.num_layers} layers"
        yield checked.error("MP218", detail, f"{KEY}.rollout.pp", f"--set {KEY}.rollout.pp=1")
    for name, count in sharded_by_blocks(checked.spec).items():
        if name == GROUP_HEADS:
            if max(count, rollout.tp) % min(count, rollout.tp):
                yield checked.error(
                    "MP218", f"rollout.tp = {rollout.tp} and {name} = {count}: one must divide the other", f"{KEY}.rollout.tp"
                )
        elif count % rollout.tp:
            yield checked.error("MP218", remainder(name, count, "rollout.tp", rollout.tp), f"{KEY}.rollout.tp", use_one_of(divisors(count)))
    if rollout.ep is not None and moe is not None and moe.num_experts % rollout.ep:
        detail = remainder("moe.num_experts", moe.num_experts, "rollout.ep", rollout.ep)
        yield checked.error("MP218", detail, f"{KEY}.rollout.ep", use_one_of(divisors(moe.num_experts)))
