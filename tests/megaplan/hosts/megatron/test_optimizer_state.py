"""Optimizer state by every pair of arguments, against Megatron's conditions written out as they allocate."""

import json
from collections.abc import Iterator
from itertools import combinations, product
from random import Random
from typing import Any

import pytest

import megaplan
from megaplan.budget.peaks import StagePeaks
from megaplan.budget.values import RankBudget
from megaplan.columns import Column, Phase
from megaplan.errors import MegaplanError
from megaplan.hosts.megatron.state import adam_bytes
from megaplan.hosts.values import HostBytes
from megaplan.importers.megatron.spec import import_megatron
from megaplan.inventory.build import build_inventory
from megaplan.layout.build import build_layout
from megaplan.spec.models import Spec

BASE = (
    "--num-layers 2 --hidden-size 256 --ffn-hidden-size 512 --num-attention-heads 4 --seq-length 256 --max-position-embeddings 256 "
    "--vocab-size 1024 --micro-batch-size 1"
)
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
VALUES: dict[str, tuple[Any, ...]] = {
    "params": ("bf16", "fp16", "fp32"),
    "distributed": (True, False),
    "aware": (True, False),
    "master": ("fp32", "fp16"),
    "first": ("fp32", "bf16", "fp16", "fp8"),
    "second": ("fp32", "bf16", "fp16", "fp8"),
    "grads": ("", "--grad-reduce-in-bf16", "--main-grads-dtype bf16", "--accumulate-allreduce-grads-in-fp32"),
    "recipe": ("", "delayed", "tensorwise", "blockwise", "mxfp8"),
    "low": ("", "fp8", "fp8 gathered", "fp4", "fp4 gathered"),
    "offload": (0.0, 0.5, 1.0),
}
STATE = Column.MATRIX_OPTIMIZER, Column.OTHER_OPTIMIZER
USUAL = {name: values[0] for name, values in VALUES.items()}


def pairs() -> Iterator[dict[str, Any]]:
    """Every pair of values of two arguments, with and without the precision-aware optimizer; the others at their first value."""
    seen = set()
    for (one, some), (two, others) in combinations(VALUES.items(), 2):
        for first, second, aware in product(some, others, (True, False)):
            case = {**USUAL, "aware": aware, one: first, two: second}
            if (key := tuple(case.values())) not in seen:
                seen.add(key)
                yield case


def launch(case: dict[str, Any]) -> str:
    """The case as arguments."""
    words = [BASE, *[f"--{case['params']}"] * (case["params"] != "fp32"), case["grads"]]
    words += ["--use-distributed-optimizer"] * case["distributed"] + ["--use-precision-aware-optimizer"] * case["aware"]
    words += [f"--main-params-dtype {case['master']} --exp-avg-dtype {case['first']} --exp-avg-sq-dtype {case['second']}"]
    words += [f"--fp8-recipe {case['recipe']}"] if case["recipe"] else []
    bits, *gathered = case["low"].split() or [""]
    words += [f"--{bits}-format {'e4m3' if bits == 'fp8' else 'e2m1'}"] if bits else []
    words += [f"--{bits}-param-gather"] if gathered else []
    words += [f"--optimizer-cpu-offload --optimizer-offload-fraction {case['offload']}"] if case["offload"] else []
    return " ".join(words)


class RefusedByMegatronError(Exception):
    """An assertion of Megatron, or a shard that is not there."""


def allocated(case: dict[str, Any]) -> tuple[float, float, float]:
    """Bytes an element on the device by Megatron's own steps: master, moments, fp32 copy of the gradient.

    Raises:
        RefusedByMegatronError: Megatron stops before its first step.
    """
    aware, offload, recipe = case["aware"], bool(case["offload"]), case["recipe"] or "delayed"
    types = [case["master"], case["first"], case["second"]]
    main_grads = "bf16" if "main-grads" in case["grads"] else "fp32"
    if not aware and (offload or set(types) != {"fp32"} or main_grads != "fp32"):
        raise RefusedByMegatronError  # OptimizerConfig.__post_init__ and validate_args
    gathered = "gathered" in case["low"]
    if not case["distributed"] and (aware or gathered):
        raise RefusedByMegatronError
    if offload and "fp8 gathered" in case["low"] and recipe != "delayed":
        raise RefusedByMegatronError
    if case["params"] == "fp32":
        if aware or case["low"]:
            raise RefusedByMegatronError  # no masters for the kernel to hold, and recipes are priced with 16-bit weights
        return 0, 8, 0
    if case["params"] == "bf16":
        fp32_buffer = case["grads"] in ("", "--accumulate-allreduce-grads-in-fp32")
    else:
        fp32_buffer = case["grads"] == "--accumulate-allreduce-grads-in-fp32"
        if case["grads"] == "--grad-reduce-in-bf16":
            raise RefusedByMegatronError
    by_kernel = aware and (case["master"] != "fp32" or recipe == "delayed" or offload)
    if by_kernel and gathered and (case["low"].startswith("fp4") or recipe != "delayed"):
        raise RefusedByMegatronError  # shard_model_param is None, and it is what the kernel steps
    copy = 0 if (by_kernel and not offload) or fp32_buffer else 4
    here = 1 - case["offload"]
    if offload:  # HybridDeviceOptimizer: fp32 clones, and states of torch's or the kernel's default type
        return 4 * here, 8 * here, copy * here
    if not by_kernel:
        return 4, BYTES[case["first"]] + BYTES[case["second"]], copy
    remainder = case["params"] == "bf16" and case["master"] == "fp32"
    return 2 if remainder else BYTES[case["master"]], BYTES[case["first"]] + BYTES[case["second"]], copy


def imported(case: dict[str, Any]) -> Spec:
    return import_megatron(launch(case), "launch", ["device.name=b200"], 8).loaded.spec


def expected(case: dict[str, Any]) -> tuple[float, float, float] | None:
    """Bytes by Megatron's steps; None where it stops."""
    try:
        return allocated(case)
    except RefusedByMegatronError:
        return None


def found(case: dict[str, Any]) -> tuple[float, float, float] | None:
    """Bytes of the imported launch; None where the import refuses it."""
    try:
        spec = imported(case)
    except MegaplanError:
        return None
    state, here = adam_bytes(spec), 1 - (spec.host.optimizer_offload or 0)
    return state.master * here, state.moments * here, state.gradient * here


def test_every_pair_of_arguments_has_megatrons_bytes_or_its_refusal() -> None:
    cases = list(pairs())
    both = [(launch(case).removeprefix(BASE), found(case), expected(case)) for case in cases]
    assert [each for each in both if each[1] != each[2]] == []
    assert len(both) > 400
    assert 100 < sum(size is not None for _, size, _ in both) < len(both) - 100


def graphed_job(more: str, percent: int, *, expandable: bool) -> megaplan.Estimate:
    words = f"{BASE} --bf16 --use-distributed-optimizer --grad-reduce-in-bf16 {more}"
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} if expandable else {}
    changes = [f"host.fragmentation_percent={percent}"]
    return megaplan.estimate(import_megatron(words, "launch", changes, 8, environment=environment).document)


def graphed_step(more: str = "", *, expandable: bool) -> RankBudget:
    return graphed_job(more, 0, expandable=expandable).worst


def test_the_pool_of_a_steps_graph_is_reserved_with_what_the_optimizer_makes() -> None:
    eager, graph = graphed_step(expandable=True), graphed_step("--cuda-graph-impl full_iteration", expandable=True)
    activations = eager.cells[Phase.FORWARD_BACKWARD][Column.ACTIVATIONS]
    assert graph.allocated_bytes == eager.allocated_bytes
    assert graph.cells[Phase.OPTIMIZER][Column.OVERHEAD] >= activations
    assert graph.cells[Phase.FORWARD_BACKWARD] == eager.cells[Phase.FORWARD_BACKWARD]
    without = graphed_step("--cuda-graph-impl full_iteration", expandable=False)
    assert without.cells[Phase.FORWARD_BACKWARD][Column.OVERHEAD] >= activations
    assert without.peak_bytes > graph.peak_bytes


@pytest.mark.parametrize("seed", range(8))
def test_segments_that_do_not_grow_keep_the_steps_before_graphs_of_layers_were_captured(seed: int) -> None:
    """The percentage of reserved above allocated memory counts if it is larger, since the bound includes it."""
    draw = Random(seed)
    modules = " ".join(sorted(draw.sample(["attn", "mlp"], draw.randint(1, 2))))
    more = f"--cuda-graph-impl transformer_engine --cuda-graph-scope {modules} --num-layers {draw.randint(2, 9)}"
    percent = draw.randint(0, 40)
    kept = graphed_step(more, expandable=True).cells[Phase.OPTIMIZER][Column.OVERHEAD]
    assert kept > 0
    for expandable in (True, False):
        found = graphed_job(more, percent, expandable=expandable)
        cells = found.worst.cells[Phase.FORWARD_BACKWARD]
        allocated = sum(cells.values()) - cells[Column.OVERHEAD]
        assert cells[Column.OVERHEAD] == max(allocated * percent // 100, 0 if expandable else kept)
        spec = found.job.spec
        inventory = build_inventory(spec)
        spans = ((0, spec.model.num_layers),)
        assert StagePeaks(spec, inventory).of(build_layout(spec, inventory, spans), range(1)) == [found.peak_bytes]


def test_what_is_offloaded_is_in_the_memory_of_the_node() -> None:
    words = f"{BASE} --bf16 --use-distributed-optimizer --use-precision-aware-optimizer"
    plain = megaplan.estimate(import_megatron(words, "launch", [], 8).document)
    half = megaplan.estimate(import_megatron(f"{words} --optimizer-cpu-offload --optimizer-offload-fraction 0.5", "launch", [], 8).document)
    elements = plain.parameters // 8
    assert plain.host_bytes_per_node == 0
    assert half.worst.host == (8 * (elements // 2), 8 * (elements // 2))
    assert half.host_bytes_per_node == 8 * half.worst.host.total
    layers = megaplan.estimate(import_megatron(f"{BASE} --bf16 --cpu-offloading --cpu-offloading-num-layers 1", "launch", [], 8).document)
    assert layers.worst.host.pinned > 0
    assert layers.worst.host.pageable == 0


@pytest.mark.parametrize("grads", ["fp32", "bf16"])
@pytest.mark.parametrize("fraction", [0.25, 0.37, 1.0])
def test_masters_stay_without_the_precision_aware_optimizer(fraction: float, grads: str) -> None:
    """Megatron-Bridge offloads without it: the optimizer on the host steps copies of the fp32 masters, whose gradients stay as well."""
    model = {"num_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "ffn_hidden_size": 512, "seq_length": 512, "vocab_size": 1024}
    run: dict[str, Any] = {"model": model, "train": {"global_batch_size": 8, "micro_batch_size": 1}}
    run["ddp"] = {"grad_reduce_in_fp32": grads == "fp32", "use_distributed_optimizer": True}
    run["mixed_precision"] = {"bf16": True, "grad_reduce_in_fp32": grads == "fp32"}

    def state(**optimizer: Any) -> tuple[int, HostBytes, int]:
        text = json.dumps(run | {"optimizer": {"optimizer": "adam", "use_distributed_optimizer": True, **optimizer}})
        found = megaplan.estimate(import_megatron(text, "run.json", ["device.name=h100-sxm"], 8).document)
        rank = found.worst
        return sum(rank.cells[Phase.OPTIMIZER][column] for column in (*STATE, Column.GRADIENTS)), rank.host, found.parameters // 8

    (whole, nothing, elements), (here, there, _) = state(), state(optimizer_cpu_offload=True, optimizer_offload_fraction=fraction)
    assert nothing == (0, 0)
    assert whole - here == pytest.approx(8 * fraction * elements, rel=1e-3)
    assert there == pytest.approx((8 * fraction * elements, 8 * fraction * elements), rel=1e-3)


def test_lion_and_sgd_keep_one_moment() -> None:
    """`_OPTIMIZER_STATE_KEYS` of Megatron's `distrib_optimizer.py`; torch's SGD keeps a buffer where it has momentum."""
    words = f"{BASE} --bf16 --use-distributed-optimizer"
    adam = megaplan.estimate(import_megatron(words, "launch", [], 1).document)
    for name in ("lion", "sgd"):
        spec = import_megatron(f"{words} --optimizer {name}", "launch", [], 1).loaded.spec
        assert (spec.optimizer.matrix, spec.host.optimizer) == ("adamw", name)
        assert adam_bytes(spec) == (4, 4, 0, 0)
        found = megaplan.estimate(import_megatron(f"{words} --optimizer {name}", "launch", [], 1).document)
        held = [sum(rank.cells[Phase.FORWARD_BACKWARD][column] for column in STATE) for rank in (adam.worst, found.worst)]
        assert held[0] - held[1] == 4 * adam.parameters
        assert found.step_seconds < adam.step_seconds
    for refused in ("--optimizer sgd --sgd-momentum 0", "--optimizer lion --use-precision-aware-optimizer"):
        with pytest.raises(MegaplanError):
            import_megatron(f"{words} {refused}", "launch", [], 1)
