"""Exporters by the name of their host."""

from __future__ import annotations

from collections.abc import Callable

from megaplan.exporters.deepspeed import export_deepspeed
from megaplan.exporters.fsdp2 import export_fsdp2
from megaplan.exporters.maxtext import export_maxtext
from megaplan.exporters.megatron import export_megatron
from megaplan.exporters.nanotron import export_nanotron
from megaplan.exporters.torchtitan import export_torchtitan
from megaplan.exporters.values import Exported, Source

EXPORTERS: dict[str, Callable[[Source], Exported]] = {
    "megatron": export_megatron,
    "torchtitan": export_torchtitan,
    "fsdp2": export_fsdp2,
    "deepspeed": export_deepspeed,
    "nanotron": export_nanotron,
    "maxtext": export_maxtext,
}
