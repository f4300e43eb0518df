"""`draw_near_legal(seed)`: a random spec with one thing wrong, or one thing moved over its edge, for the refusals."""

from collections.abc import Callable
from typing import Any

from megaplan.families.registry import FAMILIES
from random_plans.choices import SMALL, Draw, Scope
from random_plans.draw import draw

Spec = dict[str, Any]
WRONG_VALUES: tuple[Any, ...] = (None, True, 0, -1, 1.5, 2**48 + 1, "", "x", "1", [], {}, [0], [None], {"kind": "x"}, float("nan"))
AXES = ("pp", "vpp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "etp")
WORDS = {
    "schedule.kind": ("gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev", "dualpipe", "afab"),
    "split.mode": ("equal", "weighted", "manual", "best"),
    "recompute.default": ("none", "selective", "full", "all"),
    "host.name": ("megarun", "megatron", "nemo"),
    "device.name": ("h200", "h100", ""),
    "precision.params": ("fp32", "bf16", "fp16", "fp8", "fp64"),
    "host.hidden_dropout": (0.1, -0.1),
    "host.features": (["cuda_graphs"], ["x"]),
    "training.rate_schedule": ({"kind": "wsd", "decay_steps": 10**9}, {"kind": "cosine", "warmup_steps": 10**9}, {"kind": "wsd"}),
}


def draw_near_legal(seed: int) -> Spec:
    """Plain values one change away from a drawn spec; most are refused, none may be answered with anything except diagnostics."""
    choice = Draw(f"near/{seed}")
    spec = draw(seed, Scope.ANY, SMALL)
    choice.choice(CHANGES)(choice, spec)
    return spec


def _set(spec: Spec, key: str, value: Any) -> None:
    *path, last = key.split(".")
    for step in path:
        if not isinstance(spec.get(step), dict):
            spec[step] = {}
        spec = spec[step]
    spec[last] = value


def _places(values: Any) -> list[tuple[Any, Any]]:
    """Every container inside a spec with each of its keys."""
    items = list(values.items()) if isinstance(values, dict) else list(enumerate(values)) if isinstance(values, list) else []
    return [place for key, value in items for place in [(values, key), *_places(value)]]


def _a_degree(choice: Draw, spec: Spec) -> None:
    _set(spec, f"mesh.{choice.choice(AXES)}", choice.choice([2, 3, 4, 5, 7, 64, 2**20]))


def _a_count(choice: Draw, spec: Spec) -> None:
    key = choice.choice(["schedule.num_microbatches", "batch.seq_length", "batch.micro_batch_size", "model.num_layers", "model.vocab_size"])
    _set(spec, key, choice.choice([1, 2, 3, 7, 97, 65_535]))


def _a_word(choice: Draw, spec: Spec) -> None:
    key = choice.choice(sorted(WORDS))
    _set(spec, key, choice.choice(WORDS[key]))


def _a_number(choice: Draw, spec: Spec) -> None:
    """One integer of the model, one off, doubled or at an edge."""
    places = [(parent, key) for parent, key in _places(spec["model"]) if type(parent[key]) is int]
    parent, key = choice.choice(places)
    parent[key] = choice.choice([parent[key] + 1, parent[key] - 1, 2 * parent[key], 1, 0, 2**31])


def _a_value(choice: Draw, spec: Spec) -> None:
    parent, key = choice.choice(_places(spec))
    parent[key] = choice.choice(WRONG_VALUES)


def _a_key_less(choice: Draw, spec: Spec) -> None:
    parent, key = choice.choice(_places(spec))
    del parent[key]


def _a_key_more(choice: Draw, spec: Spec) -> None:
    parents = [spec, *(parent[key] for parent, key in _places(spec) if isinstance(parent[key], dict))]
    choice.choice(parents)[choice.choice(["hidden", "num_layer", "kind", "name", "layers", ""])] = 1


def _the_pattern(choice: Draw, spec: Spec) -> None:
    text = spec["model"]["pattern"]
    at = choice.randrange(len(text) + 1)
    spec["model"]["pattern"] = choice.choice([text[:at] + choice.choice("AMERD|*G- ") + text[at:], text[at:], text.replace("A", "M"), "|"])


def _a_section(choice: Draw, spec: Spec) -> None:
    """A section without its letter, a letter without its section, or another kind's keys."""
    name = choice.choice([family.section for family in FAMILIES.values()])
    other = draw(choice.randrange(1000), Scope.ANY, SMALL)["model"].get(name)
    if name in spec["model"] and (other is None or choice.chance(0.3)):
        del spec["model"][name]
    elif other is not None:
        spec["model"][name] = other


def _the_cuts(choice: Draw, spec: Spec) -> None:
    layers = spec["model"]["num_layers"]
    cut = choice.randint(0, layers + 1)
    changes: dict[str, Any] = {
        "spans": [[0, cut], [cut, layers]],
        "pin": [cut],
        "forbid": list(range(1, cut)),
        "together": [[max(0, cut - 2), cut]],
        "reason": " ",
    }
    key = choice.choice(sorted(changes))
    _set(spec, f"split.{key}", changes[key])


def _a_layer_list(choice: Draw, spec: Spec) -> None:
    key = choice.choice(["nope_layers", "full_layers", "indexer.layers"])
    _set(spec, f"model.attention.{key}", choice.choice([[0], [1, 0], [99], [0, 0], list(range(spec["model"]["num_layers"]))]))


CHANGES: tuple[Callable[[Draw, Spec], None], ...] = (
    *(_a_degree, _a_count, _a_word, _a_number, _a_value, _a_key_less, _a_key_more, _the_pattern, _a_section, _the_cuts, _a_layer_list),
)
