"""Rules of recompute policies and dtypes by family (R-67), and of the device's name."""

from __future__ import annotations

from collections.abc import Iterator

from megaplan.devices import device_names, load_device
from megaplan.errors import Diagnostic, MegaplanError
from megaplan.families.registry import FAMILIES
from megaplan.spec.context import Checked
from megaplan.spec.device import device_of
from megaplan.spec.pattern import Pattern
from megaplan.wording import plural, series


def policy_rules(checked: Checked) -> Iterator[Diagnostic]:
    """Yields MP504, MP506, MP720 and MP721."""
    if checked.pattern is not None:
        yield from _recompute(checked)
        yield from _absent_letters(checked, checked.pattern)
    yield from _device(checked)


def _recompute(checked: Checked) -> Iterator[Diagnostic]:
    if checked.spec.host.kind.block_layers > 1:  # its checkpoints are of whole blocks, and run a dispatch again
        return
    for letter, family in FAMILIES.items():
        policy = checked.spec.recompute.of(letter)
        if checked.has(letter) and policy == "full" and family.full_refused is not None:
            written = letter in checked.spec.recompute.blocks
            key = f"recompute.blocks.{letter}" if written else "recompute.default"
            detail = f"{key} = {policy}, and {plural(checked.count(letter), 'layer')} of {letter} refuse it: {family.full_refused}"
            yield checked.error("MP720", detail, key, f"blocks: {{{letter}: selective}}")


def _absent_letters(checked: Checked, pattern: Pattern) -> Iterator[Diagnostic]:
    for section, letters in (("recompute.blocks", checked.spec.recompute.blocks), ("precision.families", checked.spec.precision.families)):
        for letter, value in letters.items():
            if not checked.has(letter):
                present = series(list(pattern.counts()), "and")
                detail = f"{section}.{letter} = {value}, and the pattern's letters are {present}"
                yield checked.error("MP721", detail, f"{section}.{letter}", f"remove {section}.{letter}")


def _device(checked: Checked) -> Iterator[Diagnostic]:
    device = checked.spec.device
    if device.name not in device_names():
        try:
            load_device(device.name)
        except MegaplanError as error:
            yield from (checked.error(found.code, found.detail, "device.name", *found.hints[:-1]) for found in error.diagnostics)
        return
    peaks, precision = device_of(device).peak_flops, checked.spec.precision
    for key, dtype in (("params", precision.params), *((f"families.{letter}", dtype) for letter, dtype in precision.families.items())):
        if dtype not in peaks:
            detail = f"precision.{key} = {dtype}, and {device.name} multiplies {series(list(peaks), 'and')}"
            yield checked.error(
                "MP506", detail, f"precision.{key}", f"{key.rpartition('.')[2]}: bf16", f"peak_flops: {{{dtype}: 312000000000000}}"
            )
