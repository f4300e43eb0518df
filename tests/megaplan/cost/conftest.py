"""Small specs of one family each, with sizes that show in the formulas."""

import copy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megaplan.cost import times as cost_times
from megaplan.cost.times import model_times
from megaplan.cost.values import ModelTimes
from megaplan.inventory.build import build_inventory
from megaplan.spec.models import Spec
from megaplan.spec.rules import check_rules

sys.path.insert(0, str(Path(__file__).parent))  # by_hand

SECTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "A": ("attention", {"kind": "gqa", "num_heads": 32, "num_kv_heads": 8, "head_dim": 128}),
    "M": ("mamba", {"kind": "mamba2", "expand": 2, "head_dim": 64, "state_dim": 128, "num_groups": 8, "chunk_size": 256}),
    "E": ("moe", {"num_experts": 16, "top_k": 4, "ffn_hidden_size": 1024, "shared_ffn_hidden_size": 2048, "activation": "relu2"}),
    "R": ("recurrent", {"kind": "m2rnn", "num_heads": 64, "key_dim": 64, "value_dim": 16, "save_every": 64}),
    "D": ("mlp", {"ffn_hidden_size": 14336, "activation": "swiglu"}),
}

MakeSpec = Callable[..., Spec]
Times = Callable[..., ModelTimes]


def make(pattern: str, num_layers: int | None = None, **sections: Any) -> Spec:
    """A checked spec of these letters; `model` adds to the model's section, every other name replaces its own."""
    model: dict[str, Any] = {"pattern": pattern, "num_layers": num_layers or len(pattern), "hidden_size": 4096, "vocab_size": 32768}
    for letter in set(pattern):
        name, section = SECTIONS[letter]
        model[name] = copy.deepcopy(section)
    model |= sections.pop("model", {})
    document = {"format": "megaplan.spec/1", "name": "m", "model": model, "batch": {"micro_batch_size": 2, "seq_length": 4096}}
    document["host"] = {"kernels": "reference"}
    spec = Spec.model_validate({**document, **sections})
    errors = [found for found in check_rules(spec) if found.severity == "error"]
    assert not errors, errors
    return spec


@pytest.fixture(scope="session")
def make_spec() -> MakeSpec:
    """`make_spec("AE", mesh={"tp": 2})`."""
    return make


@pytest.fixture(scope="session")
def times_of() -> Times:
    """`times_of("AE", mesh={"tp": 2})`: the times of that spec."""

    def times(pattern: str, **sections: Any) -> ModelTimes:
        spec = make(pattern, **sections)
        return model_times(spec, build_inventory(spec))

    return times


@pytest.fixture(scope="module")
def one_kernel_an_op() -> Iterator[None]:
    """Every op runs as one ideal kernel: plain torch is tested in `test_plain.py`, several kernels in `test_kernels.py`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cost_times._Timer, "_passes", lambda _, ops: [cost_times._Passes(op, None, None, None) for op in ops])
        yield
