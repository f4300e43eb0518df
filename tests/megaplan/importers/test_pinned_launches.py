"""Estimates of launches of Megatron-Core and torchtitan, and of each with an argument left out or changed, match the committed ones.

The launches are Megatron's own measured runs beside the forms that the importers' tests know. Tests of the host hold the bytes of measured
runs to the measurements; this shows that they stay. `MEGAPLAN_UPDATE_GOLDEN=1 pytest tests/megaplan/importers/test_pinned_launches.py`
writes the table anew.
"""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from accuracy_megatron.launches import launch_text
from megatron_goldens import STATED
from pinned_estimates import ESTIMATED, codes_of, digest, estimated
from pinned_rows import PinnedRows
from recorded_launches import SCRIPTS, plain_script
from small_launches import DELTA
from test_megatron_bridge import BRIDGE
from torchtitan_jobs import NEW, OLD

from megaplan.errors import MegaplanError
from megaplan.importers.megatron.spec import import_megatron
from megaplan.importers.torchtitan.spec import import_torchtitan

FIELDS = ("launch", "change", "imported", *ESTIMATED)
CHANGES = 5
"""Drawn changes of a launch, beside the launch itself."""
FP8 = {"fp8_format": "hybrid", "fp8_recipe": "tensorwise"}
SHARDED: dict[str, Any] = {
    **{"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params", "init_model_with_meta_device": True},
    **{"megatron_fsdp_main_params_dtype": "fp32", "megatron_fsdp_main_grads_dtype": "fp32", "megatron_fsdp_grad_comm_dtype": "fp32"},
    **{"num_experts": None, "no_gradient_accumulation_fusion": True},
}
RARE: dict[str, dict[str, Any]] = {
    "delta": {},
    "delta tp": {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_model_parallel_size": 4},
    "delta fp8": FP8,
    "delta recomputed": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "latent": {"moe_latent_size": 64, "expert_model_parallel_size": 2},
    "latent fp8": {"moe_latent_size": 64, **FP8},
    "double buffer": {**SHARDED, "fsdp_double_buffer": True},
}
"""Changes of a small launch with gated delta nets: what no measured run has."""
Changed = Iterator[tuple[str, Callable[[], dict[str, Any]]]]
"""Names of changes, each with a function that imports the changed arguments."""


def changes_of_arguments(arguments: dict[str, Any], draw: random.Random) -> Iterator[tuple[str, dict[str, Any]]]:
    """An omitted argument, an inverted flag, a doubled or halved number."""
    yield "", arguments
    for key in sorted(draw.sample(sorted(arguments), min(CHANGES, len(arguments)))):
        value = arguments[key]
        if isinstance(value, bool):
            yield f"{key} turned", arguments | {key: not value}
        elif isinstance(value, int) and draw.random() < 0.7:
            changed = 2 * value if draw.random() < 0.5 else value // 2
            yield f"{key} {changed}", arguments | {key: changed}
        else:
            yield f"without {key}", {name: other for name, other in arguments.items() if name != key}


def of_measured(row: dict[str, Any]) -> Changed:
    for change, arguments in changes_of_arguments(row["arguments"], random.Random(row["name"])):
        given = {**arguments, "padded_vocab_size": row["padded_vocab_size"]}
        text = launch_text(given, row["environment"])
        yield change, lambda text=text: import_megatron(text, "launch.yaml", [], row["gpus"]).document


def of_lines(text: str, take: Callable[[str], dict[str, Any]], seed: str = "") -> Changed:
    """A text, and without some of the lines that hold an option or a value; drawn by it, or by a seed where it has folders or dates."""
    yield "", lambda: take(text)
    lines = text.splitlines(keepends=True)
    holding = [index for index, line in enumerate(lines) if "--" in line or "=" in line or ": " in line]
    for index in sorted(random.Random(seed or text).sample(holding, min(CHANGES, len(holding)))):
        left = "".join(lines[:index] + lines[index + 1 :])
        yield f"without line {index + 1}", lambda left=left: take(left)


def rare(name: str) -> dict[str, Any]:
    return {"name": name, "arguments": DELTA | RARE[name], "environment": {}, "gpus": 8, "padded_vocab_size": 32000}


LAUNCHES: dict[str, Callable[[], Changed]] = {
    **{f"{row['name']} {row['platform']} {row['measured']}": lambda row=row: of_measured(row) for row in STATED},
    **{name: lambda name=name: of_measured(rare(name)) for name in RARE},
    **{
        path.name: lambda path=path: of_lines(plain_script(path.stem), lambda text: import_megatron(text, path.name).document, path.name)
        for path in sorted(SCRIPTS.glob("*.sh"))
    },
    "run_config.yaml": lambda: of_lines(BRIDGE, lambda text: import_megatron(text, "run_config.yaml", gpus=8).document),
    "old.toml": lambda: of_lines(OLD, lambda text: import_torchtitan(text, "old.toml", gpus=16).document),
    "new.toml": lambda: of_lines(NEW, lambda text: import_torchtitan(text, "new.toml").document),
}


def row_of(launch: str, change: str, take: Callable[[], dict[str, Any]]) -> dict[str, str]:
    row = {"launch": launch, "change": change, "imported": ""}
    try:
        document = take()
    except MegaplanError as error:
        return {**row, **dict.fromkeys(ESTIMATED, ""), "refused": codes_of(error)}
    return {**row, "imported": digest(document), **estimated(document)}


@pytest.fixture(scope="module")
def table() -> Iterator[PinnedRows]:
    found = PinnedRows("launches.csv", FIELDS, num_keys=2)
    yield found
    found.write(sorted((launch, change) for launch in LAUNCHES for change, _ in LAUNCHES[launch]()))


@pytest.mark.parametrize("launch", LAUNCHES)
def test_a_launch_and_its_changes(launch: str, table: PinnedRows) -> None:
    moved = []
    for change, take in LAUNCHES[launch]():
        row = row_of(launch, change, take)
        moved += [f"{change}: {text}" for text in table.differences(row)]
    assert not moved, "\n".join(moved)


def test_most_changes_are_estimated() -> None:
    rows = PinnedRows("launches.csv", FIELDS, num_keys=2).rows.values()
    assert {row["launch"] for row in rows} == set(LAUNCHES)
    assert sum(1 for row in rows if row["peak_bytes"]) > 0.7 * len(rows)
