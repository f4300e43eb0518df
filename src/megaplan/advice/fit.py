"""MP501: the ranks that do not fit, the excess, and the changes that help."""

import shlex
from collections.abc import Sequence

from megaplan.advice.advise import WORK, Advice, Adviser
from megaplan.advice.pricing import Price, Pricer, Work
from megaplan.budget.fit import DOES_NOT_FIT, cuts, largest_micro_batch
from megaplan.budget.values import Budget
from megaplan.diagnostics import diagnostic
from megaplan.errors import Diagnostic, Location, Severity
from megaplan.inventory.tensors import Inventory
from megaplan.layout.ranks import Layout, runs_label, runs_of
from megaplan.spec.models import Spec
from megaplan.units import format_bytes


def misfit(
    subject: tuple[Spec, Inventory, Layout],
    budget: Budget,
    pricer: Pricer,
    of_cuts: Sequence[Diagnostic],
    severity: Severity,
    sized: Sequence[str] | None = None,
) -> Diagnostic:
    """MP501 with changes that fit.

    Args:
        subject: Name of the estimated job.
        budget: Budget of the job, in which a rank does not fit.
        pricer: Prices changes of the spec as the command would; its work limit is set here.
        of_cuts: Diagnostics from choosing the cuts; MP501 among them names the slot and says whether any split needs less memory.
        severity: Warning if an estimate was asked for, where "no" is an answer and not a failure.
        sized: Changes of the layout that was chosen for the command's GPUs, which its hints state; None if it states no GPUs.
    """
    spec, inventory, layout = subject
    worst, size = budget.worst, spec.batch.micro_batch_size
    detail = [
        f"{runs_label(runs_of(worst.ranks))}: peak {format_bytes(worst.peak_bytes)} in {worst.peak_phase}, "
        f"usable {format_bytes(worst.usable_bytes)}, over by {format_bytes(-worst.headroom_bytes)}",
        *(item.detail for item in of_cuts if item.code == DOES_NOT_FIT),
        *(f"cut {cut.column} = {format_bytes(cut.column_bytes)} by {format_bytes(cut.excess_bytes)}" for cut in cuts(worst)[:3]),
    ]
    if size > 1 and largest_micro_batch(spec, inventory, layout) is None:
        detail.append("with these cuts even batch.micro_batch_size = 1 does not fit")
    spans = layout.spans
    pricer.work = Work(WORK)
    found = Adviser(spec, Price(spans, worst.peak_bytes, -worst.headroom_bytes), pricer).find()
    return diagnostic(DOES_NOT_FIT, "\n".join(detail), Location(), [_hint(advice, spec, sized) for advice in found], severity)


def _hint(advice: Advice, spec: Spec, sized: Sequence[str] | None) -> str:
    """Options to append to the command, and its result with them."""
    keys = {text.partition("=")[0] for text in advice.overrides}
    texts = *(text for text in sized or () if text.partition("=")[0] not in keys), *advice.overrides
    options = " ".join(f"--set {shlex.quote(text)}" for text in texts)
    if sized is not None and advice.devices is not None:
        options += f" --gpus {advice.devices}"
    price = advice.price
    peak = f"peak {format_bytes(price.peak_bytes)}"
    fits = f"leaves {format_bytes(-price.over_bytes)}" if price.over_bytes <= 0 else f"still over by {format_bytes(price.over_bytes)}"
    more = "" if advice.devices is None else f", on {advice.devices:,} GPUs instead of {spec.mesh.world_size:,}"
    return f"{options}   # {peak}, {fits}, modelled step {round(100 * advice.lost):+d} %{more}"
