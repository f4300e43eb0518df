"""The facts of operations compared with counts of the runtime's own code, at random sizes.

A stage is built with sizes drawn from a seed and runs forward and backward without values. The roofline counts each operation of
megakernels on it: operands of the launches that its CUDA code makes, or its torch operations. The cost model composes the facts for the
same block. A wrong fact and a wrong size that is passed to it both fail.
"""

import random
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import pytest

pytest.importorskip("triton")
from counted_runs import counted_runs
from rooflines.own import NAMESPACE
from rooflines.work import Work

from megakernels.facts import EXACT
from megaplan.cost.blocks import layer_works, rank_workload
from megaplan.families.attention.variants import attention_place
from megaplan.inventory.build import build_inventory
from megaplan.inventory.tensors import Inventory
from megaplan.spec.models import Spec

pytestmark = pytest.mark.runtime
Counts = dict[str, list[float]]
"""Bytes, FLOPs in bf16's, and launches of each operation of megakernels."""
ATTENTION = ("attention", "indexer", "masked")
NAMES = {
    **{"conv1d": "causal_conv1d", "conv_qk": "causal_conv1d", "conv_v": "causal_conv1d", "gated_norm": "gated_rms_norm", "ssd": "ssd"},
    **{"scan": "mamba3", "m2rnn": "m2rnn", "gated_conv": "gated_conv1d", "selective_scan": "selective_scan", "delta_rule": "gated_delta"},
    **{"rope": "rope", "mla_kv": "mla_kv", "activation": "swiglu", "gate": "swiglu"},
    **dict.fromkeys(("route", "dispatch", "experts", "combine"), "experts"),
}
"""Operations of the cost model, and the operations of megakernels that they are."""
Band = tuple[float | None, float | None, float | None]
"""Relative differences of bytes, FLOPs and launches that are allowed; None for a count that is not compared."""
RATIO: Band = (0.35, 0.1, 0.0)
"""Facts with one ratio to ideal bytes at all sizes: narrow rows have more partial sums, short ones read more of their tables."""
KERNELS: dict[str, Band] = {
    **dict.fromkeys(("gated_rms_norm_backward", "rope", "rope_backward"), RATIO),
    **dict.fromkeys(("indexed_attention_choice", "indexed_attention_choice_backward"), (0.45, 0.1, 0.0)),
    "causal_conv1d_backward": (0.1, 0.1, 0.4),  # a launch less without a bias
    "m2rnn_backward": (None, 0.1, None),  # one ratio for all numbers of saved states
    **dict.fromkeys(("experts", "experts_backward"), (0.45, 0.01, 0.15)),  # bytes follow the rows of the largest expert
    **dict.fromkeys(("gated_delta", "gated_delta_backward"), (None, 0.3, None)),  # priced as one ideal kernel each way
}
PLAIN: dict[str, Band] = {
    **dict.fromkeys(("attention", "attention_backward"), (0.01, 0.0, 0.0)),
    **dict.fromkeys(("chosen_attention", "chosen_attention_backward"), (0.05, 0.0, 0.12)),
    **dict.fromkeys(("indexed_attention_choice", "indexed_attention_choice_backward"), (0.05, 0.0, 0.12)),
    **dict.fromkeys(("experts", "experts_backward"), (0.3, 0.0, 0.3)),
}
JOINS = {"ssd_backward", "mamba3_backward"}
"""Operations whose facts include the concatenation of their gradients, which autograd makes."""
EXPERTS = ("route", "dispatch_plan", "dispatch", "experts_gated", "combine", "routed_experts_gated")
"""Operations of megakernels for the experts of a block; the cost model divides their work otherwise."""


Drawn = tuple[str, dict[str, Any]]
"""The pattern of a model with one kind of block, and its section."""


def grouped(draw: random.Random) -> Drawn:
    groups = draw.choice([1, 2, 4])
    heads = {"num_heads": groups * draw.choice([1, 2, 4]), "num_kv_heads": groups, "head_dim": draw.choice([32, 64, 96, 128, 256])}
    options = {"window_size": draw.choice([None, draw.randint(100, 400)]), "score_cap": draw.choice([None, None, 30.0])}
    return "A", {"attention": {"kind": "gqa", **heads, **options}}


def latent(draw: random.Random) -> Drawn:
    return "A", {"attention": latent_sizes(draw) | {"window_size": draw.choice([None, draw.randint(100, 400)])}}


def indexed(draw: random.Random) -> Drawn:
    """Layer 0 chooses; layer 1 takes the choice over."""
    indexer = {"num_heads": draw.choice([4, 8, 16]), "head_dim": draw.choice([64, 128]), "top_k": 32 * draw.randint(2, 12)}
    return "AA", {"attention": latent_sizes(draw) | {"indexer": indexer | {"layers": [0], "shared_layers": [1]}}}


def latent_sizes(draw: random.Random) -> dict[str, Any]:
    ranks = {"q_lora_rank": 64, "kv_lora_rank": draw.choice([64, 96])}
    widths = {"qk_nope_head_dim": draw.choice([64, 128]), "qk_rope_head_dim": 32, "v_head_dim": draw.choice([64, 128])}
    return {"kind": "mla", "num_heads": draw.choice([4, 6, 8]), **ranks, **widths}


def mamba1(draw: random.Random) -> Drawn:
    return "M", {"mamba": {"kind": "mamba1", "state_dim": draw.choice([8, 16]), "save_every": draw.choice([128, 256])}}


def mamba2(draw: random.Random) -> Drawn:
    groups = draw.choice([1, 2, 4])
    heads = {"num_heads": groups * draw.choice([16, 24]), "head_dim": draw.choice([64, 128]), "num_groups": groups}
    return "M", {"mamba": {"kind": "mamba2", **heads, "state_dim": draw.choice([64, 128]), "chunk_size": draw.choice([64, 128, 256])}}


def mamba3(draw: random.Random) -> Drawn:
    """Several inputs per state, with angles, as the facts count."""
    heads = {"head_dim": 64, "num_groups": draw.choice([2, 4]), "mimo_rank": draw.choice([2, 4])}
    sizes = {"state_dim": 128, "num_angles": draw.choice([16, 32]), "save_every": draw.choice([256, 512])}
    return "M", {"mamba": {"kind": "mamba3", **heads, **sizes}}


def m2rnn(draw: random.Random) -> Drawn:
    sizes = {"num_heads": draw.randint(40, 64), "key_dim": 64, "value_dim": 16}
    return "R", {"recurrent": {"kind": "m2rnn", **sizes, "save_every": draw.choice([32, 64, 128])}}


def delta(draw: random.Random) -> Drawn:
    heads = draw.choice([2, 4])
    sizes = {"num_key_heads": heads, "num_value_heads": heads * draw.choice([1, 2]), "key_dim": draw.choice([64, 128])}
    return "G", {"linear_attention": {"kind": "gated_delta", **sizes, "value_dim": draw.choice([64, 128])}}


def kda(draw: random.Random) -> Drawn:
    return "G", {"linear_attention": {"kind": "kda", "num_heads": draw.choice([2, 4]), "head_dim": draw.choice([64, 128])}}


def convolution(draw: random.Random) -> Drawn:
    return "C", {"short_convolution": {"bias": draw.random() < 0.5, "conv_kernel": draw.randint(2, 4)}}


def experts(draw: random.Random) -> Drawn:
    count, width = draw.choice([8, 16, 32]), 128 * draw.randint(2, 9)
    return "E", {"moe": {"num_experts": count, "top_k": draw.randint(1, 6), "ffn_hidden_size": width}}


def dense(draw: random.Random) -> Drawn:
    return "D", {"mlp": {"ffn_hidden_size": 128 * draw.randint(4, 30)}}


KINDS = {each.__name__: each for each in (grouped, latent, indexed, mamba1, mamba2, mamba3, m2rnn, delta, kda, convolution, experts, dense)}


def spec_of(kind: str, seed: int, kernels: str) -> Spec:
    draw = random.Random(f"{kind}/{seed}")
    pattern, sections = KINDS[kind](draw)
    model = {"pattern": pattern, "num_layers": len(pattern), "hidden_size": 128 * draw.randint(3, 9), "vocab_size": 512}
    batch = {"micro_batch_size": draw.randint(1, 3), "seq_length": 512 * draw.randint(1, 3)}
    precision = dict.fromkeys(("params", "grads", "master", "moments", "reduce"), "bf16")
    packing = {"data": {"packing": "documents"}} if pattern[0] == "A" and draw.random() < 0.4 else {}
    rest = {"batch": batch, "precision": precision, "host": {"kernels": kernels}, **packing}
    return Spec.model_validate({"format": "megaplan.spec/1", "name": "drawn", "model": model | sections, **rest})


def counted(spec: Spec, inventory: Inventory) -> Counts:
    """Counts of the runtime's operations; bytes of plain torch leave out products, and FLOPs those of a library, which ignore windows."""
    found: Counts = defaultdict(lambda: [0.0, 0.0, 0.0])
    for done in counted_runs(spec, inventory):
        by_kernels = done.inside in ("triton", "library")
        values = (
            done.num_bytes if by_kernels else sum(kernel.num_bytes for kernel in done.kernels if not kernel.products),
            flops_of(done),
            done.launches,
        )
        name, side = done.op.removeprefix(f"{NAMESPACE}.").removesuffix("_backward"), "_backward" * done.op.endswith("_backward")
        add(found[("experts" if name in EXPERTS else name) + side], values)
    for name in JOINS & found.keys():
        add(found[name], found["cat"])
    return found


def flops_of(done: Work) -> float:
    if done.inside == "library":
        return 0
    flops = done.product_flops
    return flops.get("bf16", 0) + EXACT / 3 * flops.get("tf32", 0) if done.inside == "triton" else sum(flops.values())


def stated(spec: Spec, inventory: Inventory) -> Counts:
    """The same by the facts."""
    found: Counts = defaultdict(lambda: [0.0, 0.0, 0.0])
    for index, block in enumerate(inventory.layers):
        load = rank_workload(spec, spec.precision.of(block.family))
        ops = layer_works(load, spec.model, block)
        core, latents = next((op.name for op in ops if op.name in ATTENTION[1:]), "attention"), any(op.name == "kv_down" for op in ops)
        for op in ops:
            name = {"attention": "attention", "masked": "chosen_attention", "indexer": "indexed_attention"}[core]
            if op.name not in ATTENTION:
                if op.name not in NAMES or op.facts is None or (op.name == "rope" and block.family == "A" and latents):
                    continue
                name = {("G", "gated_norm"): "head_gated_norm"}.get((block.family, op.name), NAMES[op.name])
            elif core == "indexer" and attention_place(spec.model.attention, index).role == "source":
                name += "_choice"
            facts = op.facts.kernels if spec.host.uses_triton else op.facts.plain
            matrices = op.weights * load.itemsize if spec.host.uses_triton else 0  # read; backward writes as many gradients
            for side, times, done in zip(("", "_backward"), (1, 2), facts(op.work, load.num_tokens) or (), strict=False):
                add(found[name + side], (done.num_bytes + times * matrices, done.flops, done.launches))
    return found


def add(total: list[float], values: Iterable[float]) -> None:
    total[:] = [before + value for before, value in zip(total, values, strict=True)]


def compare(kind: str, seed: int, kernels: str, bands: dict[str, Band], default: Band) -> None:
    spec = spec_of(kind, seed, kernels)
    inventory = build_inventory(spec)
    ours, theirs = stated(spec, inventory), counted(spec, inventory)
    assert ours
    for name, (num_bytes, flops, launches) in ours.items():
        of_bytes, of_flops, of_launches = bands.get(name, default)
        assert of_bytes is None or num_bytes == pytest.approx(theirs[name][0], rel=of_bytes), name
        assert of_flops is None or not theirs[name][1] or flops == pytest.approx(theirs[name][1], rel=of_flops), name
        assert of_launches is None or launches == pytest.approx(theirs[name][2], rel=of_launches), name


LOOPS = {"mamba1", "mamba2", "mamba3", "m2rnn", "delta", "kda"}
"""Kinds whose plain torch runs thousands of operations."""


def cases(always: Iterable[str]) -> list[Any]:
    """Kinds and seeds; a run without the slow set has the first seed of the kinds in `always`."""
    return [
        pytest.param(kind, seed, marks=() if seed == 0 and kind in always else pytest.mark.slow) for kind in KINDS for seed in range(12)
    ]


@pytest.mark.parametrize(("kind", "seed"), cases(KINDS))
def test_facts_of_kernels_are_what_is_counted(kind: str, seed: int) -> None:
    """Bytes to a tenth, launches exactly, where `KERNELS` does not say otherwise."""
    compare(kind, seed, "triton", KERNELS, (0.1, 0.1, 0.0))


@pytest.mark.parametrize(("kind", "seed"), cases(KINDS.keys() - LOOPS))
def test_facts_of_plain_torch_are_what_is_counted(kind: str, seed: int) -> None:
    """Attention follows from its loop; other operations have one ratio to their ideal bytes each, which sizes move by up to a third."""
    compare(kind, seed, "reference", PLAIN, (0.35, None, 0.3))
