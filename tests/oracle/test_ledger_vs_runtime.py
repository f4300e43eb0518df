"""The saved-activation ledger against megarun's modules: what they keep, and what is alive at the peaks of forward and backward."""

from types import ModuleType
from typing import Any

import pytest
import torch
from saved_storages import saved_storages
from torch import nn

from megakernels import cross_entropy, use_kernels
from megaplan.hosts.megarun.ledger import block_bytes, block_ledger
from megaplan.hosts.megarun.parts import BlockBytes
from megaplan.hosts.values import BlockLedger
from megaplan.inventory.build import build_inventory
from megaplan.inventory.tensors import Inventory
from megaplan.layout.build import build_layout
from megaplan.spec.local import local_dims
from megaplan.spec.models import Spec
from megarun.dtypes import TORCH_DTYPES
from megarun.engine.build import build_stage, materialise
from megarun.engine.initialise import initialise
from megarun.model.rotary import Rotary
from megarun.model.stage import Stage
from megarun.parallel.apply.recompute import recompute_stage
from megarun.parallel.groups.shapes import residual_shape

pytestmark = [pytest.mark.runtime, pytest.mark.requirement("R-50")]

KINDS = (
    "gqa",
    "mla",
    "indexed",
    "mamba2",
    "mamba3",
    "moe",
    "gathering_moe",
    "m2rnn",
    "mlp",
    "gated_delta",
    "kda",
    "short_convolution",
    "mamba1",
)
CASES = [pytest.param(kind, seed, marks=[pytest.mark.slow] if seed > 2 else []) for kind in KINDS for seed in range(5)]
POLICIES = [(kind, "selective") for kind in KINDS] + [
    (kind, "full") for kind in KINDS if kind not in ("mamba1", "mamba2", "mamba3", "moe", "gathering_moe", "gated_delta", "kda")
]
RECOMPUTED = [
    pytest.param(kind, policy, seed, marks=[pytest.mark.slow] if seed > 1 else []) for kind, policy in POLICIES for seed in range(5)
]
LOW_IN_CI = {
    *(("mlp", "selective"), ("gqa", "none"), ("mamba2", "selective"), ("kda", "selective"), ("mla", "full"), ("moe", "selective")),
    ("gathering_moe", "none"),
}
STREAMS = ({"count": 3}, {"count": 2, "mixing": "independent"})
LOW = [
    pytest.param(kind, policy, name, seed, marks=[] if seed == 1 and (kind, policy) in LOW_IN_CI else pytest.mark.slow)
    for kind, policy in [*((kind, "none") for kind in KINDS), *POLICIES]
    for name in ("fp8_current", "fp8_rowwise")
    for seed in range(3)
]


class Alone(nn.Module):
    """A layer with its stage's rotary tables, and the document starts of packed rows, as its own buffers."""

    def __init__(self, stage: Stage, index: int, starts: torch.Tensor | None = None) -> None:
        super().__init__()
        self.block = stage.layers[str(index)]
        self.register_buffer("starts", starts)
        self.rotates = stage.attention is not None
        if self.rotates:
            self.register_buffer("cos", stage.rope_cos)
            self.register_buffer("sin", stage.rope_sin)

    def forward(self, x: torch.Tensor, *earlier: torch.Tensor) -> torch.Tensor:
        read = x if self.block.depth is None else (x, *earlier)
        return self.block(read, Rotary(self.cos, self.sin) if self.rotates else None, self.starts)


class Labelled(nn.Module):
    """A stage with the labels of its tokens, which are an input."""

    def __init__(self, stage: Stage, labels: torch.Tensor) -> None:
        super().__init__()
        self.stage = stage
        self.register_buffer("labels", labels)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.stage(tokens, labels=self.labels)


class HeadAndLoss(nn.Module):
    """The head of a stage and the summed loss of all-zero labels, which are an input."""

    def __init__(self, stage: Stage, labels: torch.Tensor) -> None:
        super().__init__()
        self.weight = stage.head.weight if hasattr(stage, "head") else stage.embedding.weight
        self.register_buffer("labels", labels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cross_entropy(nn.functional.linear(x, self.weight).flatten(0, 1), self.labels)


def built(
    random_specs: ModuleType, kind: str, seed: int, policy: str = "none", recipe: str | None = None, more: dict[str, Any] | None = None
) -> tuple[Spec, Any, Stage]:
    values = random_specs.random_spec(kind, seed, policy)
    values["model"] |= more or {}
    if recipe is not None:
        values["precision"] = {**values["precision"], "recipe": {"name": recipe}}
        if "moe" in values["model"]:
            fill_up(values["model"])
    spec = Spec.model_validate(values)
    inventory = build_inventory(spec)
    stage = build_stage(spec, inventory, build_layout(spec, inventory, [(0, 2)]).slots[0])
    recompute_stage(stage, spec, inventory)
    use_kernels(spec.host.kernels)
    materialise(stage, torch.device("cpu"))
    initialise(stage, inventory, 0)
    if spec.precision.params != spec.precision.master:
        raise ValueError("a stage without FSDP2 computes in its master dtype")
    return spec, inventory, stage


def fill_up(model: dict[str, Any]) -> None:
    """Widths of experts to multiples of 16: their products in eight bits take no others."""
    model["hidden_size"] = -(-model["hidden_size"] // 16) * 16
    widths = [name for name in ("ffn_hidden_size", "latent_size") if model["moe"].get(name)]
    model["moe"] |= {name: -(-model["moe"][name] // 16) * 16 for name in widths}


def kept_of(ledger: BlockLedger) -> list[tuple[int, str]]:
    return sorted((tensor.bytes, str(TORCH_DTYPES[tensor.dtype])) for tensor in ledger.saved)


def residual(spec: Spec) -> torch.Tensor:
    return torch.randn(residual_shape(spec), dtype=TORCH_DTYPES[spec.precision.params], requires_grad=True)


def document_starts(spec: Spec, *, packed: bool) -> torch.Tensor | None:
    """Two documents in every row, int32 [B, T]; None without packing."""
    length = spec.batch.seq_length
    row = torch.where(torch.arange(length) < length // 3, 0, length // 3).to(torch.int32)
    return row.expand(spec.batch.micro_batch_size, -1).contiguous() if packed else None


def check_kept(spec: Spec, inventory: Inventory, stage: Stage, index: int, *, packed: bool) -> BlockLedger:
    """Document starts are an input of the microbatch, kept by whoever reads them and by no block's ledger."""
    ledger = block_ledger(spec, f"layers.{index}", inventory.layers[index])
    reads = inventory.layers[index].reads
    inputs = [residual(spec) for _ in range(1 if reads is None else 1 + reads.earlier)]
    found = saved_storages(Alone(stage, index, document_starts(spec, packed=packed)), tuple(inputs))
    assert sorted((s.nbytes, str(s.dtype)) for s in found.kept) == kept_of(ledger)
    assert found.output_bytes == ledger.output.bytes
    assert found.live_bytes == sum(tensor.bytes for tensor in ledger.saved) + ledger.output.bytes
    return ledger


@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
@pytest.mark.parametrize(("kind", "seed"), CASES)
def test_a_layer_keeps_what_its_ledger_says(kind: str, seed: int, packed: bool, random_specs: ModuleType) -> None:
    """Storage by storage with its dtype, and to the byte of what the allocator holds after a forward; packed rows keep no more."""
    spec, inventory, stage = built(random_specs, kind, seed)
    for index in range(2):
        check_kept(spec, inventory, stage, index, packed=packed)


@pytest.mark.requirement("R-67")
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
@pytest.mark.parametrize(("kind", "policy", "seed"), RECOMPUTED)
def test_a_recomputed_layer_keeps_what_its_ledger_says(kind: str, policy: str, seed: int, packed: bool, random_specs: ModuleType) -> None:
    """Under every policy of every kind: less than without it, a checkpoint's cache included, and never in the model's last layer."""
    spec, inventory, stage = built(random_specs, kind, seed, policy)
    recomputed, last = (sum(t.bytes for t in check_kept(spec, inventory, stage, index, packed=packed).saved) for index in range(2))
    assert recomputed < last
    assert recomputed == 0 or policy == "selective"


@pytest.mark.parametrize(("kind", "seed"), [(kind, seed) for kind in KINDS for seed in range(2)])
def test_a_stage_keeps_the_sum_of_its_blocks(kind: str, seed: int, random_specs: ModuleType) -> None:
    """Embedding, layers, final norm and head together, inputs of blocks counted once; the loss adds its log-sum-exp."""
    spec, inventory, stage = built(random_specs, kind, seed)
    names = ["embedding", "layers.0", "layers.1", "final_norm"]
    ledgers = [block_ledger(spec, name, inventory.block(name)) for name in names]
    head = block_ledger(spec, "head", inventory.block("embedding" if inventory.tied else "head"))
    tokens = torch.randint(0, spec.model.vocab_size, (spec.batch.micro_batch_size, spec.batch.seq_length))
    found = saved_storages(Labelled(stage, tokens.clone()), (tokens,))
    streams = 4 * ledgers[0].output.bytes  # what the two layers, the final norm and the head read
    expected = sum(tensor.bytes for ledger in ledgers for tensor in ledger.saved) + streams
    *logits, log_sum_exp = head.saved
    output = logits[0] if logits else head.output  # a stage that makes its loss keeps what the loss adds too
    expected += 0 if logits else log_sum_exp.bytes
    assert found.saved_bytes == expected
    assert found.output_bytes == output.bytes
    assert log_sum_exp.bytes == tokens.numel() * 4
    assert found.live_bytes == expected + output.bytes


def expected_peaks(sums: BlockBytes) -> list[tuple[int, int]]:
    return [(sums.forward_bytes, sums.backward_bytes), (sums.forward_bytes, sums.accumulating_bytes)]


@pytest.mark.parametrize(("kind", "seed"), CASES)
def test_the_working_set_is_what_a_layer_has_alive_at_its_peaks(
    kind: str, seed: int, random_specs: ModuleType, live_storages: ModuleType
) -> None:
    """Derived from the order of operations, to the byte: first microbatch and later ones, forward and backward."""
    spec, inventory, stage = built(random_specs, kind, seed)
    for index in range(2):
        sums = block_bytes(spec, local_dims(spec), f"layers.{index}", inventory.layers[index])
        assert live_storages.peaks(Alone(stage, index), residual(spec)) == expected_peaks(sums)


@pytest.mark.requirement("R-67")
@pytest.mark.parametrize(("kind", "policy", "seed"), RECOMPUTED)
def test_the_working_set_of_recompute(kind: str, policy: str, seed: int, random_specs: ModuleType, live_storages: ModuleType) -> None:
    """Recomputed storages beside what is alive in backward, from the order of operations, to the byte."""
    spec, inventory, stage = built(random_specs, kind, seed, policy)
    sums = block_bytes(spec, local_dims(spec), "layers.0", inventory.layers[0])
    assert live_storages.peaks(Alone(stage, 0), residual(spec)) == expected_peaks(sums)


@pytest.mark.parametrize(("kind", "policy", "name", "seed"), LOW)
def test_linears_in_eight_bits(kind: str, policy: str, name: str, seed: int, random_specs: ModuleType, live_storages: ModuleType) -> None:
    """At odd sizes, except for experts': copies and scales that are kept, and the peaks with what operations state of their insides."""
    spec, inventory, stage = built(random_specs, kind, seed, policy, name)
    for index in range(2):
        check_kept(spec, inventory, stage, index, packed=False)
        sums = block_bytes(spec, local_dims(spec), f"layers.{index}", inventory.layers[index])
        assert live_storages.peaks(Alone(stage, index), residual(spec)) == expected_peaks(sums)


@pytest.mark.parametrize("streams", STREAMS, ids=["mixed", "separate"])
@pytest.mark.parametrize(("kind", "policy"), [*((kind, "none") for kind in KINDS), *POLICIES])
def test_a_layer_on_several_streams(
    kind: str, policy: str, streams: dict[str, Any], random_specs: ModuleType, live_storages: ModuleType
) -> None:
    """All streams in and out, the numbers of each token, and the peaks with what the connections hold inside themselves."""
    spec, inventory, stage = built(random_specs, kind, 0, policy, more={"streams": streams})
    for index in range(2):
        check_kept(spec, inventory, stage, index, packed=False)
        sums = block_bytes(spec, local_dims(spec), f"layers.{index}", inventory.layers[index])
        assert live_storages.peaks(Alone(stage, index), residual(spec), held=False) == expected_peaks(sums)


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize(("kind", "policy"), [*((kind, "none") for kind in KINDS), *POLICIES])
def test_a_layer_that_reads_earlier_values(kind: str, policy: str, group: int, random_specs: ModuleType) -> None:
    """Earlier values are inputs; a layer that begins a group returns its result itself."""
    spec, inventory, stage = built(random_specs, kind, 0, policy, more={"attention_residuals": {"group_layers": group}})
    for index in range(2):
        check_kept(spec, inventory, stage, index, packed=False)


@pytest.mark.parametrize("seed", range(3))
def test_the_working_set_of_head_and_loss(seed: int, random_specs: ModuleType, live_storages: ModuleType) -> None:
    """Logits, their gradient, the head's input and weight gradients."""
    spec, inventory, stage = built(random_specs, "mlp", seed)
    x = residual(spec)
    module = HeadAndLoss(stage, torch.zeros(x.shape[0] * x.shape[1], dtype=torch.int64))
    sums = block_bytes(spec, local_dims(spec), "head", inventory.block("embedding" if inventory.tied else "head"))
    assert live_storages.peaks(module, x) == expected_peaks(sums)
