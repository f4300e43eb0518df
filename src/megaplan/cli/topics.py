"""Topics of `explain`: diagnostic codes, budget columns, mesh axes, the cost model's formulas, and terms of the glossary."""

from __future__ import annotations

from collections.abc import Iterator

from megaplan.budget.axes import AXES
from megaplan.budget.formulas import FORMULAS
from megaplan.cli.error_pages import page_lines
from megaplan.cli.lora_topics import LORA
from megaplan.cli.low_precision_topics import LOW_PRECISION
from megaplan.cli.problems import unknown_name
from megaplan.cli.terms import terms
from megaplan.columns import Column
from megaplan.cost.formulas import FORMULAS as LAYER_COSTS
from megaplan.cost.step.formulas import FORMULAS as STEP_TERMS
from megaplan.diagnostics import codes
from megaplan.hosts.registry import HOSTS
from megaplan.post_training.columns import COLUMNS as POST_TRAINING
from megaplan.terminal.output import StyledLine
from megaplan.terminal.table import wrap

COSTS = LAYER_COSTS | STEP_TERMS
OF_HOSTS: dict[str, tuple[str, ...]] = {name: host.topic.value for name, host in HOSTS.items() if host.topic is not None}
OF_POST_TRAINING = {name: (text,) for name, text in POST_TRAINING.items() if name not in FORMULAS}
TEXTS = LOW_PRECISION | LORA | OF_HOSTS | OF_POST_TRAINING
_SPELLINGS = {"sequence_parallel": "sp"}


def topic_lines(topic: str) -> Iterator[StyledLine]:
    """Lines as (text, style) that explain `topic`; `list` lists all topics.

    Raises:
        MegaplanError: MP483, with the nearest names.
    """
    code, name = topic.strip().upper(), topic.strip().lower().replace("-", "_").removeprefix("mesh.").removesuffix("_bytes")
    name = _SPELLINGS.get(name, name)
    if name == "list":
        return _list()
    if code in codes():
        return page_lines(code)
    if name in FORMULAS:
        return _plain([name, *_indented(column_lines(name))])
    if name in AXES:
        return _axis(name)
    if name in COSTS:
        return _cost(name)
    if name in TEXTS or name in terms():
        title, texts = (name, TEXTS[name]) if name in TEXTS else (topic.strip(), (terms()[name],))
        return _plain([title, *(f"  {line}" for text in texts for line in wrap(text, width=76))])
    raise unknown_name("MP483", topic, topic_names(), "megaplan explain {}")


def topic_names() -> list[str]:
    """All topics."""
    return [*AXES, *map(str, FORMULAS), *COSTS, *TEXTS, *codes(), *terms()]


def column_lines(column: str | Column) -> list[str]:
    """A column's formula, without its name."""
    formula = FORMULAS[column]
    return [
        *wrap(formula.holds, width=76),
        *_field("formula", formula.formula),
        *_field("units", f"{formula.units}, {formula.basis}"),
        *_field("source", formula.source),
        *_field("example", formula.example),
    ]


def _list() -> Iterator[StyledLine]:
    for title, names in (
        ("columns", map(str, FORMULAS)),
        ("axes", AXES),
        ("costs", COSTS),
        ("precision", LOW_PRECISION),
        ("adapters", LORA),
        ("hosts", OF_HOSTS),
        ("post-training", OF_POST_TRAINING),
        ("codes", codes()),
        ("terms", terms()),
    ):
        yield title, "bold"
        yield from _plain(wrap("  " + ", ".join(names), indent="  "))


def _axis(name: str) -> Iterator[StyledLine]:
    axis = AXES[name]
    yield f"{name}: {axis.title}", "bold"
    yield from _plain(_indented([*_field("shards", axis.shards), *_field("cannot fix", axis.cannot_fix), *_field("costs", axis.costs)]))


def _cost(name: str) -> Iterator[StyledLine]:
    cost = COSTS[name]
    yield f"{name}: {cost.summary}", "bold"
    fields = [
        *_field("formula", cost.formula),
        *_field("units", cost.unit),
        *_field("source", cost.source),
        *_field("example", cost.example),
    ]
    yield from _plain(_indented(fields))


def _field(name: str, text: str) -> list[str]:
    return wrap(f"{name}: {text}", indent="  ", width=76)


def _indented(lines: list[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def _plain(lines: list[str] | Iterator[str]) -> Iterator[StyledLine]:
    return ((line, "") for line in lines)
