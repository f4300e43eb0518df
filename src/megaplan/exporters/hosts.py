"""Exporters by framework: hosts, and other frameworks."""

from collections.abc import Callable
from dataclasses import replace

from megaplan.exporters.deepspeed import export_deepspeed
from megaplan.exporters.fsdp2 import export_fsdp2
from megaplan.exporters.nanotron import export_nanotron
from megaplan.exporters.nemo_rl import export_nemo_rl
from megaplan.exporters.values import Exported, Loss, Source
from megaplan.exporters.verl import export_verl
from megaplan.hosts.registry import HOSTS

EXCHANGE = "mesh.context_exchange"


def _with_exchange(export: Callable[[Source], Exported]) -> Callable[[Source], Exported]:
    """The exporter, extended by a report of the exchange of latents, which none of these frameworks has."""

    def exported(source: Source) -> Exported:
        found, exchange = export(source), source.spec.mesh.context_exchange
        if exchange == "heads" or any(loss.key == EXCHANGE for loss in found.losses):
            return found
        detail = f"mesh.context_exchange = {exchange}: keys and values of all heads are exchanged"
        return replace(found, losses=(*found.losses, Loss(EXCHANGE, detail, "context_exchange: heads")))

    return exported


_OWN: dict[str, Callable[[Source], Exported]] = {
    **{name: host.export for name, host in HOSTS.items() if host.export is not None},
    "fsdp2": export_fsdp2,
    "deepspeed": export_deepspeed,
    "nanotron": export_nanotron,
    "verl": export_verl,
    "nemo-rl": export_nemo_rl,
}
EXPORTERS = {name: _with_exchange(export) for name, export in _OWN.items()}
