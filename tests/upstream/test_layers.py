"""Norms, activations, convolution, experts, losses and Muon's iteration beside transformers and torch."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from upstream_checks import compare, normal, note, rms_ratio

pytest.importorskip("transformers")
from transformers.activations import ACT2FN
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.nemotron_h import modeling_nemotron_h as nemotron
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen

from megakernels import (
    causal_conv1d,
    combine,
    cross_entropy,
    dispatch,
    dispatch_plan,
    experts,
    gated_rms_norm,
    gelu,
    linear_cross_entropy,
    relu2,
    rms_norm,
    route,
    routed_experts,
    swiglu,
)
from megarun.optim.muon import orthogonalise

LENGTHS = pytest.mark.parametrize("length", [1, 37])


@LENGTHS
def test_rms_norm(length: int) -> None:
    module = LlamaRMSNorm(21, eps=1e-5)
    compare(
        "rms_norm",
        "transformers LlamaRMSNorm",
        lambda x, weight: rms_norm(x, weight, 1e-5),
        lambda x, weight: torch.func.functional_call(module, {"weight": weight}, (x,)),
        {"x": normal(0, 2, length, 21), "weight": normal(1, 21)},
    )


@LENGTHS
@pytest.mark.parametrize("groups", [1, 3])
def test_gated_rms_norm(length: int, groups: int) -> None:
    module = nemotron.NemotronHRMSNormGated(21, 21 // groups, eps=1e-5)
    compare(
        f"gated_rms_norm {groups} groups",
        "transformers NemotronHRMSNormGated",
        lambda x, gate, weight: gated_rms_norm(x, gate, weight, 1e-5, groups),
        lambda x, gate, weight: torch.func.functional_call(module, {"weight": weight}, (x, gate)),
        {"x": normal(0, 2, length, 21), "gate": normal(1, 2, length, 21), "weight": normal(2, 21)},
    )


@pytest.mark.parametrize(("ours", "name"), [(relu2, "relu2"), (gelu, "gelu_pytorch_tanh")])
def test_activations(ours: Callable[[Tensor], Tensor], name: str) -> None:
    theirs = ACT2FN[name]
    compare(ours.__name__, f"transformers ACT2FN {name}", ours, lambda x: theirs(x), {"x": normal(0, 3, 21)})  # noqa: PLW0108  their argument is input


def test_swiglu() -> None:
    silu = ACT2FN["silu"]
    compare(
        "swiglu", "transformers ACT2FN silu", swiglu, lambda gate, up: silu(gate) * up, {"gate": normal(0, 3, 21), "up": normal(1, 3, 21)}
    )


@LENGTHS
@pytest.mark.parametrize(("taps", "activation"), [(4, "silu"), (3, None)])
def test_causal_convolution(length: int, taps: int, activation: str | None) -> None:
    compare(
        f"causal_conv1d {taps} taps {activation}",
        "transformers NemotronH causal_conv1d_fn",
        lambda x, weight, bias: causal_conv1d(x, weight, bias, activation is not None),
        lambda x, weight, bias: nemotron.causal_conv1d_fn(x.mT, weight, bias, activation).mT,
        {"x": normal(0, 2, length, 11), "weight": normal(1, 11, taps), "bias": normal(2, 11)},
    )


@LENGTHS
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_mixture_of_experts(length: int, normalize: bool, whole: bool) -> None:
    """Router, experts and the sum of slots, in one operation or in three."""
    num_experts, top_k, hidden, width = 5, 2, 12, 7
    config = qwen.Qwen3MoeConfig(
        hidden_size=hidden, moe_intermediate_size=width, num_experts=num_experts, num_experts_per_tok=top_k, norm_topk_prob=normalize
    )
    config._experts_implementation = "eager"
    module = qwen.Qwen3MoeSparseMoeBlock(config)

    def ours(x: Tensor, router: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, indices, _ = route(rows, router, top_k, normalize)
        order, counts = dispatch_plan(indices, num_experts)
        if whole:
            return routed_experts(rows, weights, order, counts, gate, up, down, "swiglu").view_as(x)
        return combine(experts(dispatch(rows, order, top_k), weights, order, counts, gate, up, down, "swiglu"), order, top_k).view_as(x)

    def theirs(x: Tensor, router: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        given = {"gate.weight": router, "experts.gate_up_proj": torch.cat([gate, up], 1), "experts.down_proj": down}
        return torch.func.functional_call(module, given, (x,))

    inputs = {"x": normal(0, 2, length, hidden), "router": normal(1, num_experts, hidden)}
    inputs |= {name: normal(index, num_experts, width, hidden) / 3 for index, name in ((2, "gate"), (3, "up"))}
    compare(
        f"moe normalize {normalize}" + (" routed_experts" if whole else ""),
        "transformers Qwen3MoeSparseMoeBlock",
        ours,
        theirs,
        inputs | {"down": normal(4, num_experts, hidden, width) / 3},
    )


LABELS = torch.where(torch.arange(37) % 5 == 3, -100, torch.arange(37) * 7 % 23)


def test_cross_entropy() -> None:
    compare(
        "cross_entropy",
        "transformers ForCausalLMLoss",
        lambda logits: cross_entropy(logits, LABELS),
        lambda logits: ForCausalLMLoss(logits, LABELS, 23, num_items_in_batch=torch.tensor(1), shift_labels=LABELS),
        {"logits": normal(0, 37, 23) * 3},
    )


def test_linear_cross_entropy() -> None:
    inputs = {"x": normal(0, 37, 12), "weight": normal(1, 23, 12)}
    ours = lambda x, weight: linear_cross_entropy(x, weight, LABELS)  # noqa: E731
    compare(
        "linear_cross_entropy",
        "torch.nn.functional.cross_entropy of linear",
        ours,
        lambda x, weight: functional.cross_entropy(functional.linear(x, weight), LABELS, reduction="sum"),
        inputs,
    )
    if hasattr(functional, "linear_cross_entropy"):
        compare(
            "linear_cross_entropy",
            "torch.nn.functional.linear_cross_entropy",
            ours,
            lambda x, weight: functional.linear_cross_entropy(x, weight, LABELS, reduction="sum", ignore_index=-100),
            inputs,
        )


@pytest.mark.parametrize("shape", [(9, 21), (21, 9), (8, 8)])
def test_newton_schulz(shape: tuple[int, int]) -> None:
    """torch iterates in bf16, so ours does here; bf16 keeps eight bits, which five iterations amplify."""
    muon = pytest.importorskip("torch.optim._muon")
    matrix = normal(0, *shape)
    found = orthogonalise(matrix[None].bfloat16(), 5)[0]
    expected = muon._zeropower_via_newtonschulz(matrix, (3.4445, -4.775, 2.0315), 5, 1e-7)
    note(f"newton_schulz {shape[0]}x{shape[1]} bf16", "torch.optim.Muon", {"output": rms_ratio(found, expected)}, 2e-2)
