"""Megatron-LM's launch arguments: one row an argument, read by the importer, the exporter and the reference page.

Source: `megatron/training/arguments.py` and the config classes that its parser is made from, at d98e8a64.
"""

from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any

from megaplan.hosts.megatron.argument import FEATURE, Argument
from megaplan.hosts.megatron.not_carried import NOT_CARRIED
from megaplan.hosts.megatron.rows_model import LAYERS, MODEL, MOE
from megaplan.hosts.megatron.rows_refused import REFUSED
from megaplan.hosts.megatron.rows_run import FSDP, HOST, RUN, STATE

TABLE: tuple[Argument, ...] = (*LAYERS, *MODEL, *MOE, *RUN, *STATE, *HOST, *REFUSED, *NOT_CARRIED)
"""In the order in which they are written."""
ARGUMENTS = MappingProxyType({row.name: row for row in TABLE})
FEATURES = tuple(row for row in TABLE if row.conversion is FEATURE)


def section_rows(section: str) -> Iterator[Argument]:
    """The rows that decide a key of this section alone."""
    return (row for row in TABLE if row.direct and row.key.rpartition(".")[0] == section)


def other_fsdp(value_of: Callable[[str], Any]) -> list[str]:
    """Differences of Megatron-FSDP's own arguments from the priced setting: all is sharded, with fp32 masters.

    Args:
        value_of: An argument's value, or None if absent.
    """
    found = ((row, value_of(row.name)) for row in FSDP)
    given = ((row, row.default if value is None else value) for row, value in found)
    return [f"{row.name} = {value}: {row.note}" for row, value in given if (value or row.means) and value != row.means]
