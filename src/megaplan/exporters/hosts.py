"""Exporters by the name of their framework: those of the hosts, and of frameworks that are no host here."""

from __future__ import annotations

from collections.abc import Callable

from megaplan.exporters.deepspeed import export_deepspeed
from megaplan.exporters.fsdp2 import export_fsdp2
from megaplan.exporters.maxtext import export_maxtext
from megaplan.exporters.nanotron import export_nanotron
from megaplan.exporters.nemo_rl import export_nemo_rl
from megaplan.exporters.values import Exported, Source
from megaplan.exporters.verl import export_verl
from megaplan.hosts.registry import HOSTS

EXPORTERS: dict[str, Callable[[Source], Exported]] = {
    **{name: host.export for name, host in HOSTS.items() if host.export is not None},
    "fsdp2": export_fsdp2,
    "deepspeed": export_deepspeed,
    "nanotron": export_nanotron,
    "maxtext": export_maxtext,
    "verl": export_verl,
    "nemo-rl": export_nemo_rl,
}
