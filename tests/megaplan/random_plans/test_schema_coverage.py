"""Every key of the spec, and every word that it may have, is drawn: a new key that no draw writes is a failure here."""

import itertools
from collections.abc import Iterator
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from pydantic import BaseModel
from random_plans.draw import draw

from megaplan.errors import MegaplanError
from megaplan.spec.later import LaterSection
from megaplan.spec.load import spec_from_document
from megaplan.spec.models import Spec

pytestmark = pytest.mark.random_seeds
NUM_DRAWS = 4000
NEVER_DRAWN = {
    "training.rate_schedule[constant].kind": "one word",
    "optimizer.other": "one word",
    "host.features": "MP903: a plan that names a feature without a price is refused",
    "host.optimizer": "hosts/megatron/test_optimizer_state.py has the state of each",
    "host.exp_avg_sq_dtype": "hosts/megatron/test_optimizer_state.py has every pair of the optimizer's arguments",
    "host.optimizer_recipe": "hosts/megatron/test_optimizer_state.py has every pair of the optimizer's arguments",
    "device.step_factor": "cli/test_unseen_node.py has it: only hosts with fitted constants take it",
    "post_training.rollout.device.step_factor": "as device.step_factor",
    "host.moe_shared_overlap": "exporters/test_round_trip.py draws it",
}
"""Keys, and `key=word`, that no draw has another value for than the default, with the reason."""


def sections(annotation: Any) -> Iterator[type[BaseModel]]:
    """The classes of section that an annotation allows."""
    if isinstance(annotation, type) and issubclass(annotation, LaterSection):
        yield annotation.model()
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) is Annotated:
        yield from sections(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, UnionType):
        for option in get_args(annotation):
            yield from sections(option)


def words(annotation: Any) -> Iterator[str]:
    """The words that a value, its elements, or its keys and values may have."""
    if get_origin(annotation) is Literal:
        yield from map(str, get_args(annotation))
    elif annotation is bool:
        yield from ("True", "False")
    elif not isinstance(annotation, type) or get_args(annotation):
        for option in get_args(annotation):
            yield from words(option)


def named(path: str, own: type[BaseModel], among: list[type[BaseModel]]) -> str:
    """The path of a section; of one of several kinds with its kind."""
    return f"{path}[{get_args(own.model_fields['kind'].annotation)[0]}]" if len(among) > 1 else path


def wanted(own: type[BaseModel] = Spec, path: str = "") -> Iterator[str]:
    """Every key, and `key=word` for every word."""
    for name, field in own.model_fields.items():
        key = f"{path}.{name}".lstrip(".")
        inside = list(sections(field.annotation))
        if not inside or field.default is None:
            yield key
        for section in inside:
            yield from wanted(section, named(key, section, inside))
        if not inside:
            yield from (f"{key}={word}" for word in dict.fromkeys(words(Annotated[field.annotation, None])))


def drawn(value: BaseModel, path: str = "") -> Iterator[str]:
    """Keys that have another value than their default, and the words that stand there."""
    for name, field in type(value).model_fields.items():
        key, own = f"{path}.{name}".lstrip("."), getattr(value, name)
        if own != field.get_default(call_default_factory=True):
            yield key
        if isinstance(own, BaseModel):
            yield from drawn(own, named(key, type(own), list(sections(field.annotation))))
        elif isinstance(own, dict):
            yield from (f"{key}={word}" for word in itertools.chain(own.keys(), own.values()))
        elif isinstance(own, tuple):
            yield from (f"{key}={word}" for word in own)
        else:
            yield f"{key}={own}"


@cache
def seen() -> frozenset[str]:
    """Keys and values that the draws have, up to the draw that has the last of them: 2,000 at most."""
    found: set[str] = set()
    missing = {key for key in wanted() if key.partition("=")[0] not in NEVER_DRAWN}
    for seed in range(NUM_DRAWS):
        try:
            new = set(drawn(spec_from_document(draw(seed))))
        except MegaplanError:
            continue
        found |= new
        missing -= new
        if not missing:
            break
    return frozenset(found)


def test_every_key_and_word_is_drawn() -> None:
    missing = [key for key in wanted() if key not in seen() and key.partition("=")[0] not in NEVER_DRAWN]
    assert missing == []


def test_exceptions_are_keys_that_nothing_draws() -> None:
    keys = set(wanted())
    assert set(NEVER_DRAWN) <= keys
    assert [key for key in NEVER_DRAWN if key in seen()] == []


@pytest.mark.parametrize("key", ["model.attention[mla].indexer", "mesh.etp", "host.kernels=triton", "recompute.blocks=full"])
def test_what_is_wanted_has_the_names_that_draws_have(key: str) -> None:
    assert key in set(wanted())
    assert key in seen()
