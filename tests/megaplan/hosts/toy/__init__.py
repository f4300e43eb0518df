"""A host whose ranks hold whole fp32 copies of their stage and keep nothing. A test puts this folder into a copy of megaplan."""

from megaplan.columns import Column
from megaplan.hosts.kind import HostKind, Later

HOST = HostKind(
    name="toy",
    keys=frozenset({"copies"}),
    holds=dict.fromkeys(Column, "nothing at all") | {Column.REPLICATED_PARAMS: "whole copies in fp32"},
    describe=lambda host: f"{host.copies} copies",
    budget=Later("megaplan.budget.toy:toy_budget"),
    kept=Later("megaplan.budget.toy:toy_kept_bytes"),
    limits=Later("megaplan.hosts.toy.limits:toy_rules"),
    export=Later("megaplan.exporters.toy:export_toy"),
    import_=Later("megaplan.cli.import_toy:import_toy"),
)
