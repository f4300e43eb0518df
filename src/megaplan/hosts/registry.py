"""The hosts by name. A new host is a folder, whose `__init__.py` has its value, and a line here."""

from typing import TYPE_CHECKING, Literal

from megaplan.hosts.kind import HostKind
from megaplan.hosts.maxtext import HOST as MAXTEXT
from megaplan.hosts.megarun import HOST as MEGARUN
from megaplan.hosts.megatron import HOST as MEGATRON
from megaplan.hosts.torchtitan import HOST as TORCHTITAN

HOSTS: dict[str, HostKind] = {host.name: host for host in (MEGARUN, MEGATRON, TORCHTITAN, MAXTEXT)}
if TYPE_CHECKING:
    HostName = str
else:
    HostName = Literal[tuple(HOSTS)]
