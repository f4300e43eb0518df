"""Small searches drawn from a seed, and their results by an exhaustive search without bounds."""

import random
from collections.abc import Iterator
from itertools import product
from typing import Any

import megaplan
from megaplan.budget.peaks import build_budget
from megaplan.budget.values import device_budget
from megaplan.cost.data import copies_ns, data_times, exposed_ns, host_ns
from megaplan.cost.elements import local_elements
from megaplan.cost.rates import rates_of
from megaplan.cost.times import model_times
from megaplan.cost.values import LayerTime
from megaplan.errors import Severity
from megaplan.exploration.evaluate import Evaluator
from megaplan.exploration.space import KINDS, SLOTS, Space
from megaplan.exploration.values import Exact, LayoutChoice, MemoryPolicy
from megaplan.inventory.build import build_inventory
from megaplan.layout.build import build_layout
from megaplan.schedules import Course, SlotTimes, actions, replay, schedule_problems
from megaplan.spec.host import device_of
from megaplan.spec.models import Spec
from megaplan.spec.rules import check_rules

MOST = 240
"""Layouts with a policy of one problem."""
SECTIONS: dict[str, dict[str, Any]] = {
    "A": {"attention": {"kind": "gqa", "num_heads": 8, "num_kv_heads": 4, "head_dim": 16}},
    "D": {"mlp": {"ffn_hidden_size": 256}},
    "E": {"moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 64, "activation": "relu2"}},
    "M": {"mamba": {"kind": "mamba2", "head_dim": 16, "state_dim": 16, "num_groups": 4}},
    "R": {"recurrent": {"kind": "m2rnn", "num_heads": 8, "key_dim": 16, "value_dim": 16, "conv_kernel": 4}},
}


def problem(seed: int, *, mirrored: bool = False, turns: bool = False) -> tuple[Space, int]:
    """A space, and the headroom asked for.

    `mirrored` searches layouts with two copies of the model too, or with its own schedule only; `turns` those whose pairs take turns.
    """
    draw = random.Random(seed)
    while True:
        letters = draw.choice(("AE", "ADE", "AER") if turns else ("AD", "AE", "AM", "AR", "AMD", "ADE", "AER"))
        num_layers = draw.randint(4 if turns else 3, 8)
        devices = draw.choice((8, 8, 12, 16))
        model: dict[str, Any] = {"pattern": letters, "num_layers": max(num_layers, len(letters)), "hidden_size": 128, "vocab_size": 512}
        for letter in letters:
            model |= SECTIONS[letter]
        document = {
            "format": "megaplan.spec/1",
            "name": f"small-{seed}",
            "model": model,
            "mesh": {"pp": 2, "dp_shard": 2} if mirrored else {"dp_shard": 4},
            "sharding": {"reshard_after_forward": False},
            "schedule": {"kind": "dualpipe", "num_microbatches": draw.choice((4, 8))}
            if mirrored
            else {"num_microbatches": draw.choice((2, 4, 6))},
            "batch": {"micro_batch_size": draw.choice((1, 2)), "seq_length": draw.choice((64, 128))},
            "device": {"name": "h200", "per_node": draw.choice((4, 8))},
        }
        if turns:
            document["mesh"] |= {"pp": 2, "ep": 2} if mirrored else {"pp": 2, "vpp": 2, "ep": 2}
            document["schedule"] = {"kind": "dualpipe" if mirrored else "dualpipev", "num_microbatches": draw.choice((4, 8))}
            document["host"] = {"moe_overlap": True}
            name, latency = draw.choice(("h200", "h100-sxm")), draw.choice((20_000, 200_000))  # exchanges as long as computations
            document["device"] |= {"name": name, "collective_latency_ns": latency}
        spec = megaplan.load(document).spec
        vary = [word for word in ("recompute", "schedule", "batch", "kernels") if draw.random() < 0.5]
        fixed: dict[str, Any] = {}
        for name in ("tp", "cp", "pp", "ep", "etp", "dp_shard"):
            if draw.random() < 0.45:
                fixed[name] = draw.choice((2, 2, 4) if turns and name in ("pp", "ep") else (1, 1, 2, 4))
        space = Space(spec, devices, fixed, vary)
        peaks = _peaks(space, draw)
        size = sum(len(space.policies(layout)) for layout in space.layouts())
        if not peaks or not 4 <= size <= MOST or (mirrored and not any(layout.kind == "dualpipe" for layout in space.layouts())):
            continue
        usable = draw.choice((*peaks, max(peaks) * 2))
        reserve = device_budget(device_of(spec.device), devices).reserve_bytes
        device = spec.device.model_copy(update={"capacity": usable + reserve})
        return Space(spec.model_copy(update={"device": device}), devices, fixed, vary), draw.choice((0, 0, usable // 10))


def _peaks(space: Space, draw: random.Random) -> list[int]:
    """Peaks of a few layouts, so that some fit and some do not."""
    evaluator, layouts = Evaluator(space), space.layouts()
    found = []
    for layout in draw.sample(layouts, min(3, len(layouts))):
        exact = evaluator.exact(layout, draw.choice(space.policies(layout)))
        found += [exact.peak_bytes] if isinstance(exact, Exact) else []
    return found


def exhaustive(space: Space, headroom_bytes: int) -> dict[LayoutChoice, Exact]:
    """The best policy of every layout that fits: each spec is checked by the rules, and each value worked out by the public functions."""
    evaluator = Evaluator(space, headroom_bytes)
    found: dict[LayoutChoice, Exact] = {}
    for layout in _layouts(space):
        for policy in space.policies(layout):
            exact = evaluator.exact(layout, policy)
            if not isinstance(exact, Exact):
                continue
            check(space, exact)
            if layout not in found or exact.order("time") < found[layout].order("time"):
                found[layout] = exact
    return found


def _layouts(space: Space) -> Iterator[LayoutChoice]:
    """Every product of degrees, schedules and micro-batches that the rules of a spec let through."""
    devices, batch = space.devices, space.global_batch
    degrees = [degree for degree in range(1, devices + 1) if devices % degree == 0]
    size = space.base.batch.micro_batch_size
    varies = {word: word in space.varied for word in ("schedule", "batch")}
    for pp, tp, cp, shard in product(degrees, repeat=4):
        if devices % (pp * tp * cp * shard):
            continue
        replicate = devices // (pp * tp * cp * shard)
        for ep, etp in product(degrees, degrees):
            for micro in range(1, batch + 1) if varies["batch"] else (size,):
                if batch % (micro * replicate * shard):
                    continue
                count = batch // (micro * replicate * shard)
                own, paired = space.base.schedule.kind, ("paired_1f1b",) if space.base.interleaves_pairs else ()
                kinds = dict.fromkeys((*KINDS, own, *paired)) if varies["schedule"] else (own,)
                for kind, vpp in product(kinds if pp > 1 else ("1f1b",), SLOTS):
                    layout = LayoutChoice(pp, vpp, kind, tp, cp, ep, etp, replicate, shard, micro, count)
                    if _is_legal(space, layout):
                        yield layout


def _is_legal(space: Space, layout: LayoutChoice) -> bool:
    for name, value in space.fixed.items():
        if getattr(layout, name) != value:
            return False
    if schedule_problems(layout.kind, layout.pp, layout.vpp, layout.num_microbatches, planned=True):
        return False
    return not any(item.severity is Severity.ERROR for item in check_rules(space.spec_of(layout, plain_policy(space))))


def plain_policy(space: Space) -> MemoryPolicy:
    """Nothing runs again."""
    return MemoryPolicy((), reshard=False, vocab_parallel=False, triton=False, distributed=True, full_layers=0, modules=(), grads="fp32")


def check(space: Space, exact: Exact) -> None:
    """Memory and time of a result, from the functions that every command uses."""
    spec: Spec = space.spec_of(exact.layout, exact.policy)
    inventory = build_inventory(spec)
    worst = build_budget(spec, inventory, build_layout(spec, inventory, exact.spans)).worst
    assert worst.peak_bytes == exact.peak_bytes
    assert device_budget(device_of(spec.device), spec.mesh.world_size).usable_bytes - worst.peak_bytes == exact.headroom_bytes
    assert step_ns(spec, exact) == exact.step_ns


def step_ns(spec: Spec, exact: Exact) -> int:
    """The replayed step, and the additional time of data ranks, FSDP2's copies and the host."""
    inventory, mesh, count = build_inventory(spec), spec.mesh, spec.schedule.num_microbatches
    times = model_times(spec, inventory)
    slots = times.of_slots(exact.spans) * spec.num_copies
    lengths = SlotTimes(*(tuple(getattr(slot, part) for slot in slots) for part in ("forward_ns", "input_ns", "weight_ns")))
    if spec.interleaves_pairs:
        lengths = lengths._replace(courses=tuple(courses(slot, times.issue_ns) for slot in slots))
    hop_ns = times.widest_ns([stop for _, stop in exact.spans[:-1]])
    step = replay(actions(spec.schedule.kind, mesh.pp, mesh.vpp, count), lengths, p2p=hop_ns, copies=spec.num_copies).makespan
    slots = slots[: mesh.num_slots]
    data = data_times(spec, rates_of(spec), local_elements(inventory, mesh.tp, mesh.ep, mesh.etp))
    total, forward = sum(slot.total_ns for slot in slots), sum(slot.forward_ns for slot in slots)
    step += exposed_ns(spec, data, forward, total) + data.optimizer_ns + copies_ns(spec, data)
    found, pp = rates_of(spec).measured, mesh.pp
    if found is None:
        return step
    launches = (sum(slot.forward_launches for slot in slots), sum(slot.backward_launches for slot in slots))
    forwards, backwards = (forward // pp, launches[0] // pp), ((total - forward) // pp, launches[1] // pp)
    return step + host_ns(spec, found.issue_ns, found.update_ns, data, forwards, backwards)


def courses(slot: LayerTime, issue_ns: int) -> tuple[Course, Course]:
    """A forward and a backward of a slot with their exchanges, and what the host needs for their launches, up to their time."""
    passes = (slot.forward_legs, slot.forward_ns, slot.forward_launches), (slot.backward_legs, slot.backward_ns, slot.backward_launches)
    forward, backward = (Course(legs, length, min(length, launches * issue_ns)) for legs, length, launches in passes)
    return forward, backward
