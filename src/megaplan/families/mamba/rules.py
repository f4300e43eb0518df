"""Rules of `model.mamba`: heads, groups, angles and steps."""

from collections.abc import Iterator

from megaplan.errors import Diagnostic
from megaplan.families.checks import CheckedSpec, divisors, remainder, use_one_of
from megaplan.families.mamba.section import Mamba1, Mamba2, Mamba3


def mamba_rules(checked: CheckedSpec, mamba: Mamba1 | Mamba2 | Mamba3) -> Iterator[Diagnostic]:
    """Yields MP702, MP703, MP711 and MP714; Mamba-1 has no heads."""
    if isinstance(mamba, Mamba1):
        return
    yield from _heads(checked, mamba)
    if isinstance(mamba, Mamba3):
        yield from _angles(checked, mamba)
    else:
        yield from _time_steps(checked, mamba)


def mamba_width(mamba: Mamba2 | Mamba3, hidden_size: int) -> tuple[str, int] | None:
    """Equation of the head count of M blocks, and the count; None if it is not a whole number."""
    if isinstance(mamba, Mamba2) and mamba.num_heads is not None:
        return "mamba.num_heads", mamba.num_heads
    if (mamba.expand * hidden_size) % mamba.head_dim:
        return None
    return "mamba.expand · hidden_size / mamba.head_dim", mamba.expand * hidden_size // mamba.head_dim


def _heads(checked: CheckedSpec, mamba: Mamba2 | Mamba3) -> Iterator[Diagnostic]:
    width = mamba_width(mamba, checked.hidden_size)
    if width is None:
        inner = mamba.expand * checked.hidden_size
        detail = (
            f"mamba.expand · hidden_size = {mamba.expand} · {checked.hidden_size} = {inner}, mamba.head_dim = {mamba.head_dim}, "
            f"and {inner} % {mamba.head_dim} = {inner % mamba.head_dim}"
        )
        own_count = ("or give mamba.num_heads",) if isinstance(mamba, Mamba2) else ()
        yield checked.error("MP702", detail, "model.mamba.head_dim", use_one_of(divisors(inner)), *own_count)
        return
    name, heads = width
    if heads % mamba.num_groups:
        detail = remainder(name, heads, "mamba.num_groups", mamba.num_groups)
        yield checked.error("MP703", detail, "model.mamba.num_groups", use_one_of(divisors(heads)))


def _angles(checked: CheckedSpec, mamba: Mamba3) -> Iterator[Diagnostic]:
    if 2 * mamba.num_angles > mamba.state_dim:
        turned = f"2 · {mamba.num_angles} > {mamba.state_dim}"
        detail = f"mamba.num_angles = {mamba.num_angles}, mamba.state_dim = {mamba.state_dim}, and {turned}"
        yield checked.error("MP711", detail, "model.mamba.num_angles", f"use at most {mamba.state_dim // 2}")


def _time_steps(checked: CheckedSpec, mamba: Mamba2) -> Iterator[Diagnostic]:
    if mamba.time_step_max is not None and mamba.time_step_min >= mamba.time_step_max:
        least, most = mamba.time_step_min, mamba.time_step_max
        detail = f"mamba.time_step_min = {least:g}, mamba.time_step_max = {most:g}, and {least:g} >= {most:g}"
        yield checked.error("MP714", detail, "model.mamba.time_step_max", "time_step_max: null")
