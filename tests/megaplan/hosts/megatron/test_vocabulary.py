"""The table of Megatron's launch arguments: every row names existing things, and its conversion works both ways."""

from collections.abc import Iterator
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from megaplan.hosts.megatron.argument import FEATURE, Argument, Kind
from megaplan.hosts.megatron.not_carried import IGNORED, IGNORED_PREFIXES
from megaplan.hosts.megatron.vocabulary import TABLE
from megaplan.importers.megatron.arguments import Arguments
from megaplan.importers.megatron.launch import read_given
from megaplan.spec.models import Spec

SAMPLES: dict[Kind, tuple[Any, ...]] = {
    Kind.SWITCH: (True, False),
    Kind.COUNT: (2, 7),
    Kind.WHOLE: (0, 3),
    Kind.NUMBER: (0.5, 3.0),
    Kind.TEXT: ("flash",),
}
DIRECT = [row for row in TABLE if row.direct]


def models_of(annotation: Any) -> Iterator[type[BaseModel]]:
    """The sections that a field may hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for each in get_args(annotation):
        yield from models_of(each)


def keys_of(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted key of a section."""
    for name, field in section.model_fields.items():
        yield f"{prefix}{name}"
        for model in models_of(field.annotation):
            yield from keys_of(model, f"{prefix}{name}.")


def test_every_argument_stands_once_and_is_not_also_ignored() -> None:
    names = [row.name for row in TABLE]
    assert len(names) == len(set(names))
    assert not set(names) & IGNORED
    read_all_the_same = {"ckpt_format", "data_parallel_sharding_strategy", "tokenizer_type", "tokenizer_model"} | {
        "use_fused_weighted_squared_relu"
    }
    assert {name for name in names if name.startswith(IGNORED_PREFIXES)} == read_all_the_same


def test_every_key_is_one_of_the_spec() -> None:
    assert {row.key for row in TABLE if row.key} <= set(keys_of(Spec))


def test_every_feature_is_one_that_the_spec_names() -> None:
    named = {word for row in TABLE if row.conversion is FEATURE for word in (row.means,)}
    assert named <= {str(word) for each in get_args(type_of("host.features")) for word in get_args(each)}


def type_of(key: str) -> Any:
    section, name = key.split(".")
    (model,) = models_of(Spec.model_fields[section].annotation)
    return model.model_fields[name].annotation


@pytest.mark.parametrize("row", DIRECT, ids=lambda row: row.name)
def test_a_value_that_is_written_is_read_back(row: Argument) -> None:
    for value in row.words or SAMPLES[row.kind]:
        key = row.conversion.read(value)
        written = row.conversion.write(key)
        again = row.default if written is None else written
        assert row.conversion.read(again) == key, (value, written)


def test_an_argument_outside_the_table_cannot_be_read() -> None:
    with pytest.raises(KeyError, match="num_wheels"):
        Arguments(read_given("--num-layers 4", "launch.sh"), "launch.sh").value("num_wheels")
