"""Rules of the `host` section: keys of another host, and settings that the host does not support."""

from __future__ import annotations

from collections.abc import Iterator

from megaplan.errors import Diagnostic
from megaplan.hosts.registry import HOSTS
from megaplan.spec.context import Checked


def host_rules(checked: Checked) -> Iterator[Diagnostic]:
    """Yields MP901, MP695, MP931, and the host's own MP902 … MP905."""
    host, kind = checked.spec.host, checked.spec.host.kind
    for key in sorted(host.model_fields_set - kind.keys - {"name"}):
        other = next(other.name for other in HOSTS.values() if key in other.keys)
        detail = f"host.{key} is a key of host {other}, and host.name = {kind.name}"
        yield checked.error("MP901", detail, f"host.{key}", f"remove host.{key}", f"host: {{name: {other}}}")
    if host.graphs not in kind.graphs and "cuda_graphs" in kind.keys:
        detail = f"host.cuda_graphs = {host.graphs}, and host.name = {kind.name} has {', '.join(kind.graphs)}"
        yield checked.error("MP695", detail, "host.cuda_graphs", f"cuda_graphs: {kind.graphs[0]}", "remove host.cuda_graphs")
    if checked.spec.device.step_factor is not None and kind.step is None:
        detail = f"device.step_factor = {checked.spec.device.step_factor:g}, host.name = {kind.name}: its steps have no fitted constants"
        yield checked.error("MP931", detail, "device.step_factor", "step_factor: null", "device: {reached: {bf16: 0.6}}")
    if kind.limits is not None:
        yield from kind.limits(checked)
