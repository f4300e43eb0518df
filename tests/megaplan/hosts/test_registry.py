"""The values of the hosts: named functions exist with common signatures, keys have an owner, no other file compares a host's name."""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import megaplan
from megaplan.columns import Column
from megaplan.hosts.kind import Later
from megaplan.hosts.registry import HOSTS
from megaplan.schedules.registry import SCHEDULES
from megaplan.spec.host import Host

PACKAGE = Path(megaplan.__file__).parent
NAMES = "|".join(HOSTS)
ASKS = re.compile(rf"host\.name ==|host\.name in|\.host\.name|name\s*(?:==|!=|in)\s*\(?[\"'](?:{NAMES})[\"']")
CALLED = {"budget", "kept", "explain", "limits", "peaks", "sums", "floors", "step", "export"}
"""Fields that have a function; `import_` is a command, whose options are the host's own, and `topic` a text."""


def named() -> Iterator[tuple[str, str, Any]]:
    """Host, field, and what the field names."""
    for name, host in HOSTS.items():
        yield from ((name, field, value.value) for field, value in host._asdict().items() if isinstance(value, Later))


def num_positional(function: Any) -> int:
    """Arguments that a caller gives by position; of a class those of its constructor."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(parameter.kind in kinds for parameter in inspect.signature(function).parameters.values())


def test_what_hosts_name_is_called_alike() -> None:
    """Every `module:name` exists, and the functions of a field take as many arguments for each host."""
    counts: dict[str, set[int]] = {}
    for _, field, value in named():
        if field in CALLED:
            counts.setdefault(field, set()).add(num_positional(value))
    assert set(counts) == CALLED
    assert {field: found for field, found in counts.items() if len(found) > 1} == {}


def test_keys_of_the_section_have_an_owner() -> None:
    """Every key but the name is read by a host, and no host reads another."""
    assert frozenset[str]().union(*(host.keys for host in HOSTS.values())) == set(Host.model_fields) - {"name"}


@pytest.mark.parametrize("name", HOSTS)
def test_a_value_is_whole(name: str) -> None:
    """It names itself, all columns, and schedules that there are."""
    host = HOSTS[name]
    assert (host.name, set(host.holds)) == (name, set(Column))
    assert set(host.schedules) <= set(SCHEDULES)
    assert host.describe(Host(name=name))


@pytest.mark.parametrize(
    ("text", "asks"),
    [
        ('if spec.host.name == "megarun":', True),
        ('own = host.name in ("megarun", "torchtitan")', True),
        ('found = "x" if name != "megatron" else ""', True),
        ("host = spec.host.kind.name", False),
        ('{"name": "torchtitan"}', False),
    ],
)
def test_a_question_for_a_name_is_found(text: str, asks: bool) -> None:
    """The pattern finds the forms in which code compares a name."""
    assert bool(ASKS.search(text)) is asks


@pytest.mark.skipif(not (Path(__file__).parents[3] / "src").is_dir(), reason="needs the sources")
def test_no_file_outside_hosts_asks_for_a_hosts_name() -> None:
    """Only the exporters' common file does: a target may be the spec's own host."""
    files = [path for path in sorted(PACKAGE.rglob("*.py")) if PACKAGE / "hosts" not in path.parents]
    asking = [path.relative_to(PACKAGE).as_posix() for path in files if ASKS.search(path.read_text(encoding="utf-8"))]
    assert asking == ["exporters/values.py"], "a host is a value: ask a field of `spec.host.kind`"
