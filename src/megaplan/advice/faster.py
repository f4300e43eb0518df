"""Advice for a spec that fits: the changes that shorten its modelled step the most on the same number of GPUs.

Changes of one edit and of two are priced in the order of their bound on time until the work limit is reached, or none of the rest can be
among the best. The results fit, and are shorter than the spec's step by a noticeable amount.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from megaplan.advice.changes import Edit, changed, moves, schedules, texts, together
from megaplan.advice.pricing import Price, Pricer
from megaplan.families.checks import divisors
from megaplan.families.registry import FAMILIES
from megaplan.results import Result, Row
from megaplan.spec.models import LatentAttention, Spec
from megaplan.spec.pattern import parse_pattern
from megaplan.wording import plural

MOST = 4
"""Number of changes that are shown."""
FASTER_WORK = 480_000
"""Work limit for all prices of one spec, in steps of about a microsecond."""
USEFUL = 14
"""Number of edits that are combined in pairs: those with the smallest bounds."""
LEAST = 100
"""Smallest relative gain that is shown."""


class Faster(NamedTuple):
    """A change, priced as the command would price it.

    Attributes:
        overrides: Texts for `--set`, to be appended to those of the spec.
        price: Cuts and peak under the change.
        step_ns: The modelled step, as the command prints it.
        gained: Relative reduction of the spec's step.
    """

    overrides: tuple[str, ...]
    price: Price
    step_ns: int
    gained: float


class Advice(Result, tuple[Faster, ...]):
    """Changes that shorten a step on the same number of GPUs, fastest first; empty if none does."""

    __slots__ = ()

    def _summary(self) -> Sequence[str]:
        return (f"{plural(len(self), 'change')} for a faster step" if self else "no change that was tried makes the step faster",)

    def _rows(self) -> Sequence[Row]:
        return [
            {
                "set": " ".join(each["set"]),
                "step_seconds": each["step_seconds"],
                "change_share": each["change"],
                "peak_bytes": each["peak_bytes"],
                "headroom_bytes": each["headroom_bytes"],
            }
            for each in self.to_dict()["advice"]
        ]

    def to_dict(self) -> dict[str, Any]:
        """The part `advice` of the document that `megaplan estimate --advice --json` prints."""
        return {
            "advice": [
                {
                    "set": list(change.overrides),
                    "step_seconds": round(change.step_ns / 1e9, 9),
                    "change": round(-change.gained, 6),
                    "peak_bytes": change.price.peak_bytes,
                    "headroom_bytes": -change.price.over_bytes,
                }
                for change in self
            ]
        }


class _Candidate(NamedTuple):
    bound_ns: int
    overrides: tuple[str, ...]
    edits: tuple[Edit, ...]
    spec: Spec


def faster(spec: Spec, before_ns: int, pricer: Pricer) -> list[Faster]:
    """The best changes, fastest first.

    Args:
        spec: A spec that fits.
        before_ns: Step of the spec.
        pricer: Prices changes as the command would, within its work limit.
    """
    singles = _candidates(spec, ((edit,) for edit in faster_edits(spec)), pricer, set())
    useful = [candidate.edits[0] for candidate in sorted(singles)[:USEFUL]]
    pairs = _candidates(spec, together(useful, 2), pricer, {candidate.overrides for candidate in singles})
    found: list[Faster] = []
    for candidate in sorted([*singles, *pairs]):
        longest = found[-1].step_ns if len(found) == MOST else before_ns - before_ns // LEAST
        if candidate.bound_ns >= longest or pricer.work.left <= 0:
            break
        price = pricer.price(candidate.spec)
        if price is None or price.over_bytes > 0:
            continue
        step = pricer.step_ns(candidate.spec, price.spans)
        if step is not None and step < longest:
            found = sorted([*found, Faster(candidate.overrides, price, step, 1 - step / before_ns)], key=_rank)[:MOST]
    return found


def _rank(found: Faster) -> tuple[object, ...]:
    return found.step_ns, len(found.overrides), found.price.peak_bytes, found.overrides


def _candidates(spec: Spec, changes: Iterable[tuple[Edit, ...]], pricer: Pricer, seen: set[tuple[str, ...]]) -> list[_Candidate]:
    """Legal changes that their bounds do not rule out."""
    found, usable = [], pricer.usable_bytes(spec)
    for edits in changes:
        after = changed(spec, edits)
        if after is None or pricer.work.left <= 0:
            continue
        key = texts(spec, after)
        if not key or key in seen:
            continue
        seen.add(key)
        if pricer.legal(after) and pricer.floor_bytes(after) <= usable:
            found.append(_Candidate(pricer.bound_ns(after), key, edits, after))
    return found


def faster_edits(spec: Spec) -> list[Edit]:
    """Every edit that may shorten the step: exchanged degrees, schedule, micro-batch, and settings that use more memory for less time."""
    return [*moves(spec), *schedules(spec), *_batches(spec), *_policies(spec)]


def _batches(spec: Spec) -> Iterator[Edit]:
    data = spec.mesh.dp_shard * spec.mesh.dp_replicate
    own = spec.batch.micro_batch_size
    for size in divisors(spec.global_batch_size // data):
        if size != own:
            yield Edit("batch", (("batch.micro_batch_size", size),))


def _policies(spec: Spec) -> Iterator[Edit]:
    """Less recompute, parameters that stay gathered, state on the device, and kernels instead of plain torch."""
    letters = [letter for letter in FAMILIES if letter in parse_pattern(spec.model.pattern, spec.model.num_layers).layers]
    again = [letter for letter in letters if spec.recompute.of(letter) != "none"]
    for letter in again:
        yield Edit(f"recompute.{letter}", ((f"recompute.blocks.{letter}", "none"),))
    if len(again) > 1:
        yield Edit("recompute", tuple((f"recompute.blocks.{letter}", "none") for letter in again))
    yield from _of_host(spec)
    host = spec.host
    if host.kind.reshards and spec.sharding.reshard_after_forward:
        parts = (("sharding.reshard_size", None),) if spec.sharding.kept_over else ()
        yield Edit("reshard", (("sharding.reshard_after_forward", False), *parts))
    if host.has_kernels and not host.uses_triton:
        yield Edit("kernels", (("host.kernels", "triton"),))
    if spec.mesh.cp > 1 and isinstance(spec.model.attention, LatentAttention):
        yield Edit("latents", (("mesh.context_exchange", "heads" if spec.mesh.gathers_latents else "latents"),))
    if spec.mesh.tp > 1 and not host.kind.vocab_with_tp:
        yield Edit("vocabulary", (("mesh.vocab_parallel", not spec.mesh.vocab_parallel),))


def _of_host(spec: Spec) -> Iterator[Edit]:
    """Less recompute by the host's own keys, and state on the device."""
    host = spec.host
    if host.recompute_num_layers is not None:
        yield Edit("recompute", (("host.recompute_num_layers", None),))
    if host.recompute_modules:
        yield Edit("modules", (("host.recompute_modules", ()),))
    if host.kind.trained and host.optimizer_offload is not None:
        yield Edit("state", (("host.optimizer_offload", None),))
    if host.activation_offload:
        yield Edit("kept", (("host.activation_offload", ()),))
