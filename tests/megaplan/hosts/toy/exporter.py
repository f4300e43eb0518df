"""A launch of the toy host: its number of copies, and the pattern."""

from megaplan.hosts.toy import HOST

from megaplan.exporters.values import Exported, Source, complete


def export_toy(source: Source) -> Exported:
    """One line."""
    copies = source.spec.host.copies if source.is_of(HOST.name) else 1
    return complete(source, f"toy --copies {copies} --pattern {source.letters}\n", {"host.name", "host.copies"}, [])
