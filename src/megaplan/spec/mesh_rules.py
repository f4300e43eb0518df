"""Rules of parallel degrees: divisibility (R-30 … R-33), and groups that span nodes (R-37)."""

from collections.abc import Iterator
from math import gcd, lcm

from megaplan.errors import Diagnostic
from megaplan.families.checks import divisors, remainder, use_one_of
from megaplan.families.registry import families_of
from megaplan.schedules.registry import SPLIT_BACKWARD
from megaplan.spec.context import Checked
from megaplan.spec.host import fabric_size
from megaplan.spec.models import LatentAttention, Spec
from megaplan.spec.traffic import crossing_groups, expert_traffic, tensor_traffic
from megaplan.wording import series

MAX_WORLD_SIZE = 2**20


def mesh_rules(checked: Checked) -> Iterator[Diagnostic]:
    """Yields MP201 … MP211, MP213, MP214 and MP215."""
    mesh = checked.spec.mesh
    yield from _tensor(checked)
    yield from _parts(checked)
    yield from _units(checked)
    yield from _experts(checked)
    yield from _context(checked)
    if mesh.world_size > MAX_WORLD_SIZE:
        factors = f"{mesh.pp} · {mesh.dp_replicate} · {mesh.dp_shard} · {mesh.cp} · {mesh.tp}"
        detail = (
            f"pp · dp_replicate · dp_shard · cp · tp = {factors} = {mesh.world_size:,}, and at most {MAX_WORLD_SIZE:,} ranks are planned"
        )
        yield checked.error("MP211", detail, "mesh")
    else:
        yield from _across_nodes(checked)


def sharded_by_tp(spec: Spec) -> dict[str, int]:
    """Counts that `mesh.tp` must divide, by name: heads, groups, MLP widths, the vocabulary under `vocab_parallel`."""
    model, counts = spec.model, sharded_by_blocks(spec)
    if model.features.mtp is not None and "D" in model.features.mtp.letters:
        counts["features.mtp.ffn_hidden_size"] = model.features.mtp.ffn_hidden_size
    if spec.mesh.vocab_parallel:
        counts["vocab_size"] = model.vocab_size
    stated = None if model.towers is None else model.towers.stated
    if spec.mesh.towers == "split" and stated is not None:
        encoder, projection = stated
        names = ("num_heads", *(("num_kv_heads",) if encoder.num_kv_heads else ()), "ffn_hidden_size")
        counts |= {f"towers.vision.encoder.{name}": getattr(encoder, name) for name in names}
        counts["tokens of an image"] = encoder.patches // projection.patches_per_token
    return counts


def sharded_by_blocks(spec: Spec) -> dict[str, int]:
    """Counts of the layers' blocks that a tensor degree must divide, by name."""
    counts = dict[str, int]()
    for family, section in families_of(spec.model):
        counts |= family.sharded(section, spec.model.hidden_size)
    return counts


def _tensor(checked: Checked) -> Iterator[Diagnostic]:
    mesh, batch = checked.spec.mesh, checked.spec.batch
    counts = sharded_by_tp(checked.spec)
    broken = [remainder(name, count, "mesh.tp", mesh.tp) for name, count in counts.items() if count % mesh.tp]
    if broken:
        yield checked.error("MP201", "\n".join(broken), "mesh.tp", use_one_of(divisors(gcd(*counts.values()))))
    positions = batch.seq_length // mesh.cp
    if batch.seq_length % mesh.cp == 0 and positions % mesh.tp and checked.spec.host.sequence_parallel:
        name = "batch.seq_length" if mesh.cp == 1 else "batch.seq_length / mesh.cp"
        hint = _near_multiples(batch.seq_length, lcm(2 * mesh.cp, mesh.cp * mesh.tp) if mesh.cp > 1 else mesh.tp)
        yield checked.error("MP202", remainder(name, positions, "mesh.tp", mesh.tp), "batch.seq_length", hint)


def _experts(checked: Checked) -> Iterator[Diagnostic]:
    mesh, moe = checked.spec.mesh, checked.spec.model.moe
    axis = "mesh.ep" if mesh.ep > 1 else "mesh.etp"
    if mesh.ep * mesh.etp == 1:
        return
    if moe is None or (checked.pattern is not None and not checked.has("E")):
        detail = f"mesh.ep = {mesh.ep}, mesh.etp = {mesh.etp}, but the pattern has no E block to shard"
        yield checked.error("MP204", detail, axis, f"{axis.removeprefix('mesh.')}: 1")
        return
    if moe.num_experts % mesh.ep:
        detail = remainder("moe.num_experts", moe.num_experts, "mesh.ep", mesh.ep)
        yield checked.error("MP203", detail, "mesh.ep", use_one_of(divisors(moe.num_experts)))
    if moe.ffn_hidden_size % mesh.etp:
        detail = remainder("moe.ffn_hidden_size", moe.ffn_hidden_size, "mesh.etp", mesh.etp)
        yield checked.error("MP206", detail, "mesh.etp", use_one_of(divisors(moe.ffn_hidden_size)))
    lent, borrowed = mesh.dp_shard * mesh.cp * mesh.tp, mesh.ep * mesh.etp
    if lent % borrowed:
        detail = (
            f"mesh.dp_shard · mesh.cp · mesh.tp = {mesh.dp_shard} · {mesh.cp} · {mesh.tp} = {lent}, "
            f"mesh.ep · mesh.etp = {mesh.ep} · {mesh.etp} = {borrowed}, and {lent} % {borrowed} = {lent % borrowed}"
        )
        fitting = [ep for ep in divisors(gcd(lent, moe.num_experts)) if lent % (ep * mesh.etp) == 0]
        hints = [f"ep: {series([str(ep) for ep in fitting])}"] if fitting else [f"etp: {series([str(etp) for etp in divisors(lent)])}"]
        yield checked.error("MP205", detail, axis, *hints)


def _context(checked: Checked) -> Iterator[Diagnostic]:
    mesh, seq_length = checked.spec.mesh, checked.spec.batch.seq_length
    if mesh.context_exchange == "latents":
        yield from _latents(checked)
    if mesh.cp == 1:
        return
    model, piece = checked.spec.model, seq_length // (2 * mesh.cp)
    for family, section in families_of(model):
        kernel = family.convolution(section)
        if kernel is not None and piece < kernel - 1:
            detail = (
                f"batch.seq_length = {seq_length}, 2 · mesh.cp = {2 * mesh.cp}, a piece has {piece} positions, and "
                f"{family.section}.conv_kernel = {kernel} reads {kernel - 1} before it"
            )
            yield checked.error("MP207", detail, "mesh.cp", f"use a sequence length of at least {2 * mesh.cp * (kernel - 1)}")
    if seq_length % (2 * mesh.cp):
        detail = (
            f"batch.seq_length = {seq_length}, 2 · mesh.cp = {2 * mesh.cp}, and {seq_length} % {2 * mesh.cp} = {seq_length % (2 * mesh.cp)}"
        )
        hint = _near_multiples(seq_length, lcm(2 * mesh.cp, mesh.cp * mesh.tp))
        yield checked.error("MP208", detail, "batch.seq_length", hint)


def _latents(checked: Checked) -> Iterator[Diagnostic]:
    """Checks that a layer has latents to gather, and that the host can."""
    attention, host = checked.spec.model.attention, checked.spec.host
    reason = None
    if not host.kind.trained:
        reason = f"host.name = {host.kind.name}, which gathers heads"
    elif not isinstance(attention, LatentAttention):
        reason = "no layer has latent attention" if attention is None else f"attention.kind = {attention.kind}"
    elif checked.letters is not None:
        choose = () if attention.indexer is None else (*attention.indexer.layers, *attention.indexer.shared_layers)
        if all(letter != "A" or layer in choose for layer, letter in enumerate(checked.letters)):
            reason = "no A layer attends to all keys"
    if reason is not None:
        yield checked.error("MP213", f"mesh.context_exchange = latents, and {reason}", "mesh.context_exchange", "context_exchange: heads")


def _near_multiples(number: int, step: int) -> str:
    below, above = number // step * step, -(-number // step) * step
    return f"use {below} or {above}" if below else f"use {above}"


def _parts(checked: Checked) -> Iterator[Diagnostic]:
    spec, size = checked.spec, checked.spec.sharding.reshard_size
    if size is None:
        return
    groups = {"mesh.dp_shard": spec.mesh.dp_shard} | (
        {"efsdp" if spec.mesh.experts_travel else "mesh.dp_shard": spec.mesh.efsdp} if spec.model.moe else {}
    )
    broken = [f"{name} = {degree}" for name, degree in groups.items() if degree % size]
    if not spec.sharding.reshard_after_forward or spec.sharding.copies:
        broken = ["sharding.reshard_after_forward = false" if not spec.sharding.copies else "sharding.mode = ddp"]
    if broken:
        fitting = [found for found in divisors(gcd(*groups.values())) if found > 1]
        hints = (
            (use_one_of(fitting),)
            if fitting and spec.sharding.kept_over and not spec.sharding.copies
            else ("remove sharding.reshard_size",)
        )
        yield checked.error("MP214", f"sharding.reshard_size = {size}, and {series(broken, 'and')}", "sharding.reshard_size", *hints)


def _units(checked: Checked) -> Iterator[Diagnostic]:
    """Refuse units whose parameters have two meshes or dtypes, and stages as units if layers gather no parameters."""
    spec, sharding, precision = checked.spec, checked.spec.sharding, checked.spec.precision
    if sharding.wrap == "block":
        return
    mesh, experts = spec.mesh, spec.model.moe is not None and sharding.wraps_stages
    axes = [f"mesh.{axis} = {getattr(mesh, axis)}" for axis in ("cp", "tp", "ep", "etp") if experts and getattr(mesh, axis) > 1]
    broken = [f"{axes[0]}, by which banks of experts have another mesh"] if axes else []
    broken += [f"precision.families of {series(list(precision.families), 'and')}"] if precision.families else []
    of_stages = {
        "sharding.reshard_after_forward = true": sharding.reshard_after_forward,
        f"sharding.prefetch = {sharding.prefetch}": sharding.prefetch is not None,
        "sharding.mode = ddp": sharding.copies,
        "precision.recipe.param_gather = true": precision.recipe is not None and precision.recipe.param_gather,
        "lora": spec.lora is not None,
        "model.towers": spec.model.towers is not None,
        f"schedule.kind = {spec.schedule.kind}": spec.schedule.kind in SPLIT_BACKWARD,
    }
    broken += [name for name, holds in of_stages.items() if holds and sharding.wraps_stages]
    broken += [] if spec.host.kind.trained else [f"host.name = {spec.host.kind.name}"]
    if broken:
        yield checked.error("MP215", f"sharding.wrap = {sharding.wrap}, and {series(broken, 'and')}", "sharding.wrap", "wrap: block")


def _across_nodes(checked: Checked) -> Iterator[Diagnostic]:
    mesh, domain = checked.spec.mesh, fabric_size(checked.spec.device)
    tp_crossing = crossing_groups(mesh.world_size, mesh.tp, domain)
    if tp_crossing:
        detail = _crossing(checked, "mesh.tp", mesh.tp, tp_crossing)
        yield checked.warning("MP209", f"{detail}\n{tensor_traffic(checked)}", "mesh.tp", f"use a tp that divides {_domain(checked)}")
    group = mesh.ep * mesh.etp
    ep_crossing = crossing_groups(mesh.world_size, group, domain)
    if ep_crossing and checked.has("E"):
        detail = _crossing(checked, "mesh.ep · mesh.etp", group, ep_crossing)
        hint = f"use degrees whose product divides {_domain(checked)}"
        yield checked.warning("MP210", f"{detail}\n{expert_traffic(checked)}", "mesh.ep", hint)


def _crossing(checked: Checked, name: str, degree: int, crossing: int) -> str:
    groups = f"{crossing:,} of {checked.spec.mesh.world_size // degree:,} groups"
    return f"{name} = {degree}, {_domain(checked)}, and {groups} have ranks on several nodes"


def _domain(checked: Checked) -> str:
    """The key that decides which devices share the fast fabric, with its value."""
    device, size = checked.spec.device, fabric_size(checked.spec.device)
    return f"device.{'per_node' if size == device.per_node else 'domain'} = {size}"
