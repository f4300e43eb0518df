"""The layouts and policies of a spec on a number of devices; illegal ones are counted by the rule that they break."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import islice, product
from typing import Any

from megaplan.errors import Diagnostic, Severity
from megaplan.exploration.values import ONE_RANK, Illegal, LayoutChoice, MemoryPolicy, kept_parts, takes_grads, without_manual_cuts
from megaplan.families.checks import divisors
from megaplan.families.registry import FAMILIES
from megaplan.schedules import MAX_REPLAYED, num_actions, num_copies
from megaplan.schedules.registry import SCHEDULES, schedule_problems
from megaplan.spec.models import LatentAttention, Mesh, Section, Spec
from megaplan.spec.pattern import parse_pattern
from megaplan.spec.pools import uneven_pools
from megaplan.spec.rules import check_rules

VARIED = ("recompute", "schedule", "batch", "precision", "kernels")
DEFAULT_VARIED = ("recompute", "schedule", "batch")
SLOTS = (1, 2, 3, 4, 6, 8)
"""Largest number of slots per rank of a looped schedule: more shorten the idle time by less than the accuracy of the time."""
KINDS = ("1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev")
"""Schedules in addition to the spec's own. GPipe and looped BFS hold more microbatches than 1F1B and interleaved 1F1B and idle as long;
DualPipe, which holds the parameters twice, is searched only if the spec or a fixed value names it."""
FIXABLE = {
    **{f"mesh.{name}": name for name in ("pp", "vpp", "tp", "cp", "ep", "etp", "dp_replicate", "dp_shard")},
    **{"mesh.vocab_parallel": "vocab_parallel", "schedule.kind": "kind", "batch.micro_batch_size": "micro_batch"},
    **{"sharding.reshard_after_forward": "reshard", "host.kernels": "kernels", "host.distributed_optimizer": "distributed"},
    **{"recompute.default": "recompute", "host.recompute_num_layers": "full_layers", "precision.grads": "grads"},
    **{f"recompute.blocks.{letter}": f"recompute.{letter}" for letter in FAMILIES},
}
"""Keys that `--fix` accepts, and their names in a layout."""
HOST_KEYS = ("kernels", "distributed_optimizer", "recompute_num_layers", "recompute_modules")
"""Keys of `host` that a search decides, if the host reads them."""
FEW_SHARDS = 256
"""Data ranks up to which copies of shards are not usual."""
PLAIN = "1f1b"
"""The schedule of a first answer."""
UNSCHEDULED = ("zbv", 2)
"""Schedule kind and slots per rank of a mesh until it is assigned one."""


class Space:
    """Every legal layout of a model on `devices` devices with the spec's global batch.

    Attributes:
        asked: The spec as it was given.
        base: The spec, without manual cuts.
        letters: One letter per layer.
        illegal: Layouts that were left out, by code and key; complete after `layouts` was called.
        by_modules: The host recomputes modules and groups of layers, as Megatron-Core does, instead of policies by letter.
    """

    def __init__(self, spec: Spec, devices: int, fixed: dict[str, Any], varied: Sequence[str]) -> None:
        """`fixed` has values by the names of `FIXABLE`; `varied` are words of `VARIED`."""
        self.devices, self.fixed, self.varied = devices, fixed, frozenset(varied)
        self.letters = parse_pattern(spec.model.pattern, spec.model.num_layers).layers
        self.asked, self.base = spec, without_manual_cuts(spec, self.letters)
        self.global_batch = spec.global_batch_size
        self.illegal: dict[tuple[str, str], Illegal] = {}
        self._groups: dict[tuple[int, ...], list[Diagnostic]] = {}  # errors of each
        self._hosted: dict[LayoutChoice, Diagnostic | None] = {}
        self._slots: dict[tuple[int, int], list[int]] = {}
        self._sections: dict[tuple[Hashable, ...], Section] = {}
        self._policies: dict[int, list[MemoryPolicy]] = {}
        self._host = spec.host.kind
        self.by_modules = "recompute_modules" in self._host.keys
        self._whole_blocks = self._host.block_layers > 1
        self._recomputed = list(self._recomputes())

    def keep_recomputes(self, kept: Sequence[tuple[tuple[str, str], ...]]) -> None:
        """Restrict policies by letter to these; see `exploration.recompute`."""
        self._recomputed = [found for found in self._recomputed if found[0] in kept]
        self._policies.clear()

    @property
    def recomputes(self) -> list[tuple[tuple[str, str], ...]]:
        """Every policy by letter."""
        return sorted({found[0] for found in self._recomputed})

    def meshes(self) -> list[LayoutChoice]:
        """All meshes and micro-batches, in a fixed order; each represents the layouts that differ in schedule."""
        return sorted(self._meshes())

    def has_more_meshes(self, number: int) -> bool:
        """True if there are more than a number of meshes; only that number is listed."""
        before = dict(self.illegal)  # counts are of all meshes
        found, self.illegal = next(islice(self._meshes(), number, None), None) is not None, before
        return found

    def usual_meshes(self) -> list[LayoutChoice]:
        """Meshes that most runs have, from which a first answer is taken.

        Tensor ranks are within a node, sequences and single experts are not sharded, and state has replicas only with more data ranks than
        `FEW_SHARDS`. A fixed value is kept.
        """
        before = dict(self.illegal)  # counts are of all meshes
        found, self.illegal = sorted(self._meshes(usual=True)), before
        return found

    def plain_layout(self, mesh: LayoutChoice) -> LayoutChoice | None:
        """A mesh with its simplest legal schedule: 1F1B, or the first one that the space has; None if no schedule is legal."""
        found = [
            mesh._replace(kind=kind, vpp=vpp)
            for kind, vpp in self.schedules(mesh.pp)
            if self._schedule_breaks(kind, mesh.pp, vpp, mesh.num_microbatches) is None
        ]
        return next((layout for layout in found if layout.kind == PLAIN), found[0] if found else None)

    def layouts_of(self, mesh: LayoutChoice) -> list[LayoutChoice]:
        """The legal schedules of a mesh."""
        count = mesh.num_microbatches
        return [
            mesh._replace(kind=kind, vpp=vpp) for kind, vpp in self.schedules(mesh.pp) if self._schedule_is_legal(kind, mesh.pp, vpp, count)
        ]

    def slots_of(self, mesh: LayoutChoice) -> list[int]:
        """Slots per rank under the legal schedules of a mesh."""
        pp, count = key = mesh.pp, mesh.num_microbatches
        if key not in self._slots:
            self._slots[key] = sorted({vpp for kind, vpp in self.schedules(pp) if self._schedule_breaks(kind, pp, vpp, count) is None})
        return self._slots[key]

    def layouts(self) -> list[LayoutChoice]:
        """All layouts."""
        return [layout for mesh in self.meshes() for layout in self.layouts_of(mesh)]

    def policies(self, layout: LayoutChoice) -> list[MemoryPolicy]:
        """All policies that a layout may have; they depend only on its tensor ranks, and the list must not be modified."""
        if layout.tp not in self._policies:
            self._policies[layout.tp] = self._policies_of(layout)
        return self._policies[layout.tp]

    def _policies_of(self, layout: LayoutChoice) -> list[MemoryPolicy]:
        host, recomputes = self._host, self._recomputed
        reshards = self._choice("reshard", (False, True)) if host.reshards and not self.base.interleaves_pairs else [False]
        freely = layout.tp > 1 and not host.vocab_with_tp
        vocabs = self._choice("vocab_parallel", (False, True)) if freely else [layout.tp > 1]
        kernels = [name == "triton" for name in self._kernels()] if "kernels" in host.keys else [False]
        may_copy = "distributed_optimizer" in host.keys and "distributed" in self.fixed
        sharded = self._choice("distributed", (False, True)) if may_copy else [True]
        legal = [name for name in ("fp32", "bf16") if takes_grads(self.base, name)]
        grads = self._choice("grads", legal) if "precision" in self.varied else [str(self.base.precision.grads)]
        return [
            MemoryPolicy(recompute, reshard, vocab, triton, distributed, layers, modules, grad)
            for (recompute, layers, modules), reshard, vocab, triton, distributed, grad in product(
                recomputes, reshards, vocabs, kernels, sharded, grads
            )
            if not vocab or self.base.model.vocab_size % layout.tp == 0
        ]

    def spec_of(self, layout: LayoutChoice, policy: MemoryPolicy) -> Spec:
        """The spec of a layout with a policy; it is legal if both are."""
        base = self.base
        mesh = Mesh.model_construct(
            None,
            **{name: getattr(layout, name) for name in ("pp", "vpp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "etp")},
            vocab_parallel=policy.vocab_parallel,
            **{name: getattr(base.mesh, name) for name in Mesh.options},
        )
        changes: dict[str, Any] = {
            "mesh": mesh,
            "schedule": self._section("schedule", kind=layout.kind, num_microbatches=layout.num_microbatches, steps_per_update=1),
            "batch": self._section("batch", micro_batch_size=layout.micro_batch),
            "recompute": self._recompute(policy),
            "sharding": self._section("sharding", reshard_after_forward=policy.reshard, reshard_size=kept_parts(base, layout, policy)),
        }
        if self.by_modules:
            layers, modules = policy.full_layers or None, policy.modules
            changes["host"] = self._section(
                "host", distributed_optimizer=policy.distributed, recompute_num_layers=layers, recompute_modules=modules
            )
        elif "kernels" in self._host.keys:
            changes["host"] = self._section("host", kernels="triton" if policy.triton else "reference")
        if policy.grads != str(base.precision.grads):
            changes["precision"] = self._section("precision", **policy.gradients)
        return base.model_copy(update=changes)

    def _section(self, name: str, **update: Hashable) -> Section:
        """A section of the spec with some values replaced; specs share it, because a section never changes."""
        key = name, *update.values()
        found = self._sections.get(key)
        if found is None:
            found = self._sections[key] = getattr(self.base, name).model_copy(update=update)
        return found

    def _recompute(self, policy: MemoryPolicy) -> Section:
        """The section `recompute` with the policy of each letter; specs with the same policies share it."""
        key = "recompute", policy.recompute
        found = self._sections.get(key)
        if found is None:
            default, blocks = (policy.recompute[0][1], {}) if self._whole_blocks and policy.recompute else ("none", policy.rerun)
            found = self._sections[key] = self.base.recompute.model_copy(update={"default": default, "blocks": blocks})
        return found

    def _meshes(self, *, usual: bool = False) -> Iterator[LayoutChoice]:
        devices = self.devices
        most = {"tp": self.base.device.per_node, "cp": 1, "etp": 1} if usual else {}
        most = {name: value for name, value in most.items() if name not in self.fixed}
        for tp, cp in product(divisors(devices), divisors(devices)):
            if tp > most.get("tp", tp) or cp > most.get("cp", cp):
                continue
            if devices % (tp * cp) or not self._allows(tp=tp, cp=cp) or not self._group_is_legal(tp, cp, 1, 1, 1):
                continue
            for pp in divisors(devices // (tp * cp)):
                if not self._takes(pp):
                    continue
                data = devices // (tp * cp * pp)
                for dp_shard, (ep, etp) in product(self._shards(data, cp, usual=usual), self._expert_degrees()):
                    if etp > most.get("etp", etp):
                        continue
                    if not self._allows(dp_shard=dp_shard, dp_replicate=data // dp_shard, ep=ep, etp=etp):
                        continue
                    if not self._group_is_legal(tp, cp, dp_shard, ep, etp):
                        continue
                    for micro in self._micro_batches(data):
                        count = self.global_batch // (micro * data)
                        kind, vpp = UNSCHEDULED if pp > 1 else ("1f1b", 1)
                        yield LayoutChoice(pp, vpp, kind, tp, cp, ep, etp, data // dp_shard, dp_shard, micro, count)

    def _takes(self, pp: int) -> bool:
        """True if the host runs this number of pipeline ranks, pairs can take turns if required, and each pool holds whole stages."""
        alone = pp == 1 and self.base.interleaves_pairs
        if alone or not self._allows(pp=pp) or not self._host_runs(pp > 1, ONE_RANK._replace(pp=2, num_microbatches=2)):
            return False
        uneven = next(uneven_pools(self.base, self.devices, pp), None)
        if uneven is not None:
            self._count(uneven[0], "MP509", uneven[1])
        return uneven is None

    def _shards(self, data: int, cp: int, *, usual: bool = False) -> list[int]:
        """Data ranks over which state is sharded: for hosts with a distributed optimizer all of them, unless one is given.

        Copies of its shards need more memory, and no term of the step's time is shorter with them.
        """
        found = sorted({part for each in divisors(data) for part in (each, data // each)})  # `divisors` ends at 1,024
        if not self.fixed.keys() & {"dp_shard", "dp_replicate"} and (usual or "distributed_optimizer" in self._host.keys):
            nodes = [self.base.device.per_node * number for number in (1, 2, 4, 8)] if usual and data > FEW_SHARDS else []
            found = [shard for shard in found if shard == data or (shard in nodes and "distributed_optimizer" not in self._host.keys)]
        return [shard for shard in found if self._host_runs(shard * cp == 1 < data, ONE_RANK._replace(dp_replicate=2))]

    def _micro_batches(self, data: int) -> list[int]:
        """Sequences of a microbatch that give the same global batch."""
        if self.global_batch % data:
            self._count(
                "batch.micro_batch_size",
                "MP314",
                f"{self.global_batch} sequences of the global batch, {data} data ranks, and {self.global_batch} % {data} = "
                f"{self.global_batch % data}",
            )
            return []
        if "batch" not in self.varied and "micro_batch" not in self.fixed:
            own = self.base.batch.micro_batch_size
            return [own] if self.global_batch // data % own == 0 else []
        return [micro for micro in divisors(self.global_batch // data) if self._allows(micro_batch=micro)]

    def schedules(self, pp: int) -> Iterator[tuple[str, int]]:
        """Kinds and slots per rank; only kinds with pairs if pairs take turns."""
        own = (self.base.schedule.kind, *(("paired_1f1b",) if self.base.interleaves_pairs else ()))
        kinds = [kind for kind in SCHEDULES if kind in (self._host.schedules or (*KINDS, *own)) or kind == self.fixed.get("kind")]
        if "schedule" not in self.varied and "kind" not in self.fixed:
            kinds = [self.base.schedule.kind]
        if pp == 1:  # no schedule: microbatches accumulate
            if self._allows(vpp=1):
                yield "1f1b", 1
            return
        for kind in kinds:
            schedule = SCHEDULES[kind]
            if not self._allows(kind=kind) or (self.base.interleaves_pairs and not schedule.pairs):
                continue
            slots = {"single": (1,), "mirror": (1,), "v": (2,), "loop": SLOTS}[schedule.placement]
            wanted = self.fixed.get("vpp")
            slots = (wanted,) if wanted is not None and schedule.placement == "loop" else slots
            yield from ((kind, vpp) for vpp in slots if vpp >= schedule.least_vpp and self._allows(vpp=vpp))

    def _expert_degrees(self) -> list[tuple[int, int]]:
        moe = self.base.model.moe
        if moe is None or "E" not in self.letters:
            return [(1, 1)]
        eps = [ep for ep in divisors(moe.num_experts) if self.devices % ep == 0 and (ep > 1 or not self.base.interleaves_pairs)]
        etps = [etp for etp in divisors(moe.ffn_hidden_size) if self.devices % etp == 0]
        return [(ep, etp) for ep, etp in product(eps, etps) if self.devices % (ep * etp) == 0]

    def _recomputes(self) -> Iterator[tuple[tuple[tuple[str, str], ...], int, tuple[str, ...]]]:
        """Policies by letter, and recomputed groups of layers and modules."""
        letters = [letter for letter in FAMILIES if letter in self.letters]
        base, host = self.base.recompute, self.base.host
        if "recompute" not in self.varied:
            own = host.recompute_num_layers or 0, tuple(host.recompute_modules)
            yield tuple((letter, self.fixed.get(f"recompute.{letter}", base.of(letter))) for letter in letters), *own
            return
        options = []
        for letter in letters:
            allowed: tuple[str, ...] = ("none", "selective") if FAMILIES[letter].full_refused is not None else ("none", "selective", "full")
            if self.by_modules:
                allowed = ("none", "selective") if letter == "A" else ("none",)
            fixed = self.fixed.get(f"recompute.{letter}", self.fixed.get("recompute"))
            options.append([name for name in allowed if fixed is None or name == fixed])
        for names in product(*options):
            if self._whole_blocks and len(set(names)) > 1:
                continue
            for modules in self._modules():
                yield tuple(zip(letters, names, strict=True)), 0, modules
        full = self.fixed.get("full_layers", 1)
        if self.by_modules and full:
            yield tuple((letter, "none") for letter in letters), int(full), ()

    def _modules(self) -> list[tuple[str, ...]]:
        """Sets of modules of selective recompute: none, each single module, and all that the model has."""
        if not self.by_modules:
            return [()]
        host, latent = self.base.host, isinstance(self.base.model.attention, LatentAttention)
        has = {"layernorm": True, "mla_up_proj": latent, "mlp": "D" in self.letters, "moe_act": "E" in self.letters}
        has["moe"] = has["moe_act"] and not host.moe_overlap
        names = [name for name, applies in has.items() if applies]
        return [(), *((name,) for name in names), *([tuple(name for name in names if name != "moe")] if len(names) > 1 else [])]

    def _kernels(self) -> list[str]:
        if "kernels" in self.varied or "kernels" in self.fixed:
            return self._choice("kernels", ("reference", "triton"))
        return [self.base.host.kernels]

    def _choice(self, name: str, values: Sequence[Any]) -> list[Any]:
        return [value for value in values if name not in self.fixed or self.fixed[name] == value]

    def _allows(self, **values: object) -> bool:
        return all(name not in self.fixed or self.fixed[name] == value for name, value in values.items())

    def _host_runs(self, has: bool, layout: LayoutChoice) -> bool:
        """True unless a mesh has a feature that the host does not run, by MP902 of a layout with that feature alone."""
        if not has:
            return True
        if layout not in self._hosted:
            found = self._broken(layout, 1)
            self._hosted[layout] = next((item for item in found if item.code == "MP902" and item.severity is Severity.ERROR), None)
        if (item := self._hosted[layout]) is not None:
            self._count(item.location.key or "mesh", item.code, item.detail)
        return item is None

    def _plain_policy(self, tp: int) -> MemoryPolicy:
        plain = MemoryPolicy((), reshard=False, vocab_parallel=False, triton=False, distributed=True, full_layers=0, modules=(), grads="")
        return plain._replace(vocab_parallel=self._host.vocab_with_tp and tp > 1, grads=str(self.base.precision.grads))

    def _group_is_legal(self, tp: int, cp: int, dp_shard: int, ep: int, etp: int) -> bool:
        """True if the rules of the mesh and the host allow these degrees; the rules depend on no others."""
        key = (tp, cp, dp_shard * cp * tp % (ep * etp) > 0, ep, etp)
        if key not in self._groups:
            layout = LayoutChoice(1, 1, "1f1b", tp, cp, ep, etp, 1, dp_shard, 1, 1)
            self._groups[key] = [item for item in self._broken(layout, tp) if item.severity is Severity.ERROR]
        for item in self._groups[key][:1]:
            self._count(item.location.key or "mesh", item.code, item.detail)
        return not self._groups[key]

    def _broken(self, layout: LayoutChoice, tp: int) -> Sequence[Diagnostic]:
        """Findings about a layout, without the rules of pools (whole stages) and of pairs in turns, which are checked elsewhere."""
        spec = self.spec_of(layout, self._plain_policy(tp))
        turns = {"host": spec.host.model_copy(update={"moe_overlap": False})} if spec.interleaves_pairs else {}
        return check_rules(spec.model_copy(update={"pools": (), **turns}))

    def _schedule_is_legal(self, kind: str, pp: int, vpp: int, count: int) -> bool:
        broken = self._schedule_breaks(kind, pp, vpp, count)
        if broken is not None:
            self._count(*broken)
        return broken is None

    def _schedule_breaks(self, kind: str, pp: int, vpp: int, count: int) -> tuple[str, str, str] | None:
        """Key, code and detail of the rule that a schedule breaks on this number of ranks."""
        places, layers = len(self.allowed_cuts) + 1, len(self.letters)
        if pp * vpp > places:
            detail = f"mesh.pp · mesh.vpp = {pp} · {vpp} = {pp * vpp} slots, {layers} layers in {places} pieces, and {pp * vpp} > {places}"
            return "mesh.pp", "MP212", detail
        for problem in schedule_problems(kind, pp, vpp, count, planned=True):
            return problem.key, problem.code, problem.detail
        if self.base.pools and num_copies(SCHEDULES[kind].placement) > 1:
            return "schedule.kind", "MP510", f"schedule.kind = {kind}, whose two copies of a stage would be on two types of devices"
        if self.base.pools and (actions := num_actions(pp, vpp, count)) > MAX_REPLAYED:
            return "schedule.num_microbatches", "MP510", f"the schedule has {actions:,} actions; at most {MAX_REPLAYED:,} are replayed"
        group = self.base.host.microbatch_group_size or pp
        if "microbatch_group_size" in self._host.keys and kind == "interleaved_1f1b" and count % group:
            detail = f"schedule.num_microbatches = {count}, but Megatron interleaves groups of {group}, so it must be a multiple"
            return "schedule.num_microbatches", "MP902", detail
        return None

    @property
    def allowed_cuts(self) -> tuple[int, ...]:
        """Cuts that a split may have."""
        from megaplan.partition.constraints import constraints_of  # noqa: PLC0415

        if not hasattr(self, "_cuts"):
            self._cuts = constraints_of(self.base).allowed_cuts(len(self.letters))
        return self._cuts

    def _count(self, key: str, code: str, detail: str) -> None:
        known = self.illegal.get((code, key), Illegal(key, code, detail, 0))
        self.illegal[code, key] = replace(known, count=known.count + 1)
