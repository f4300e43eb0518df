"""Topics of `explain`: diagnostic codes, budget columns, mesh axes, the cost model's formulas, terms of the glossary, and keys."""

import re
from collections.abc import Iterator

from megaplan.budget.axes import AXES
from megaplan.budget.formulas import FORMULAS
from megaplan.cli.error_pages import page_lines
from megaplan.cli.key_topics import key_lines, keys_named, spec_keys
from megaplan.cli.lora_topics import LORA
from megaplan.cli.low_precision_topics import LOW_PRECISION
from megaplan.cli.problems import unknown_name
from megaplan.cli.terms import terms
from megaplan.columns import Column
from megaplan.cost.formulas import FORMULAS as LAYER_COSTS
from megaplan.cost.step.formulas import FORMULAS as STEP_TERMS
from megaplan.diagnostics import codes, refuse
from megaplan.hosts.registry import HOSTS
from megaplan.post_training.columns import COLUMNS as POST_TRAINING
from megaplan.terminal.output import StyledLine
from megaplan.terminal.table import wrap

COSTS = LAYER_COSTS | STEP_TERMS
OF_HOSTS: dict[str, tuple[str, ...]] = {name: host.topic.value for name, host in HOSTS.items() if host.topic is not None}
OF_POST_TRAINING = {name: (text,) for name, text in POST_TRAINING.items() if name not in FORMULAS}
TEXTS = LOW_PRECISION | LORA | OF_HOSTS | OF_POST_TRAINING
_SYNONYMS = {
    name: topic
    for topic, names in (
        ("recompute", "activation_checkpointing gradient_checkpointing checkpointing remat ac"),
        ("dp_shard", "fsdp fsdp2 zero zero1 zero2 zero3 dp data_parallel"),
        ("dp_replicate", "hsdp"),
        ("sharding.mode", "ddp"),
        ("tp", "tensor_parallel"),
        ("sp", "sequence_parallel"),
        ("pp", "pipeline_parallel"),
        ("vpp", "virtual_pipeline interleaving"),
        ("cp", "context_parallel"),
        ("ep", "expert_parallel"),
        ("cuda_graphs", "cuda_graph graphs"),
        ("kv_cache", "kv"),
        ("reserved", "reserved_memory"),
        ("allocated", "allocated_memory"),
        ("flops_per_token", "flops"),
        ("MP501", "oom"),
    )
    for name in names.split()
}
"""Names that other frameworks and texts use, and the topic of each."""


def topic_lines(topic: str) -> Iterator[StyledLine]:
    """Lines as (text, style) that explain `topic`; `list` lists all topics.

    Raises:
        MegaplanError: MP483, with the topics that have the name in theirs, or the nearest.
    """
    plain = re.sub(r"[\s-]+", "_", topic.strip().lower())
    name = plain.removesuffix("_bytes").removeprefix("mesh.").removesuffix("ism")
    name = _SYNONYMS.get(name if name in _SYNONYMS else plain.replace("_", ""), name)
    if name == "list":
        return _list()
    if known := _known(name, topic.strip()):
        return known
    if keys := keys_named(plain) or keys_named(name):
        return _plain([line for key in keys for line in key_lines(key)])
    names = (*topic_names(), *spec_keys())
    if holds := [each for each in names if plain in each.lower()]:
        raise refuse("MP483", f"{topic!r} is unknown", *(f"megaplan explain {each}" for each in (*holds[:3], "list")))
    raise unknown_name("MP483", topic, names, "megaplan explain {}")


def _known(name: str, topic: str) -> Iterator[StyledLine] | None:
    """The lines of a code, a column, an axis, a cost, a text or a term; None for another name."""
    if name.upper() in codes():
        return page_lines(name.upper())
    if name in FORMULAS:
        return _plain([name, *_indented(column_lines(name))])
    if name in AXES or name in COSTS:
        return _axis(name) if name in AXES else _cost(name)
    if name in TEXTS or name in terms():
        title, texts = (name, TEXTS[name]) if name in TEXTS else (topic, (terms()[name],))
        return _plain([title, *(f"  {line}" for text in texts for line in wrap(text, width=76))])
    return None


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
        ("keys of a spec", (key for key in spec_keys() if "." not in key)),
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
