"""G blocks beside the layers of transformers: outputs, and gradients of the input and of every parameter."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from upstream_checks import compare, normal, use_plain_torch

pytest.importorskip("transformers")
from transformers import KimiLinearConfig, MiniMaxConfig, OlmoHybridConfig, Qwen3_5TextConfig, xLSTMConfig
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention
from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention
from transformers.models.olmo_hybrid.modeling_olmo_hybrid import OlmoHybridGatedDeltaNet
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.xlstm.modeling_xlstm import xLSTMLayer

from megaplan.spec.models import GatedDeltaNet, KimiDeltaAttention, LightningAttention, MatrixLstm
from megarun.model.lightning import LightningBlock
from megarun.model.linear_attention import LinearAttentionBlock
from megarun.model.matrix_lstm import MatrixLstmBlock
from megarun.model.norm import Block

HIDDEN, EPS = 24, 1e-5
GATED = {"kind": "gated_delta", "num_key_heads": 2, "num_value_heads": 4, "key_dim": 6, "value_dim": 5, "chunk_size": 16, "save_every": 40}
LIGHTNING = {"kind": "lightning", "num_heads": 3, "head_dim": 8, "gated_norm_eps": 1e-6, "chunk_size": 16}
MLSTM = {"kind": "mlstm", "num_heads": 3, "key_dim": 4, "value_dim": 8, "gate_soft_cap": 8.0, "chunk_size": 16}
ARGUMENTS = {"MiniMaxLightningAttention": (None, None)}
"""Arguments behind the input: rotary tables and a mask, which lightning attention does not read."""
COMMON = {"hidden_size": HIDDEN, "rms_norm_eps": EPS, "num_hidden_layers": 1, "layer_types": ["linear_attention"]}
OF_DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip


def convolution(own: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([own["conv_qk.weight"], own["conv_v.weight"]]).unsqueeze(1)


def as_qwen(own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        "in_proj_qkv.weight": torch.cat([own["qk_proj.weight"], own["v_proj.weight"]]), "in_proj_z.weight": own["gate_proj.weight"],
        "in_proj_b.weight": own["beta_proj.weight"], "in_proj_a.weight": own["decay_proj.weight"], "conv1d.weight": convolution(own),
        "dt_bias": own["dt_bias"], "A_log": own["A_log"], "norm.weight": own["gated_norm.weight"],
        "out_proj.weight": own["out_proj.weight"],
    }  # fmt: skip


def as_olmo(own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    q, k = own["qk_proj.weight"].chunk(2)
    return {
        "q_proj.weight": q, "k_proj.weight": k, "v_proj.weight": own["v_proj.weight"], "a_proj.weight": own["decay_proj.weight"],
        "b_proj.weight": own["beta_proj.weight"], "g_proj.weight": own["gate_proj.weight"], "conv1d.weight": convolution(own),
        "dt_bias": own["dt_bias"], "A_log": own["A_log"], "o_norm.weight": own["gated_norm.weight"],
        "o_proj.weight": own["out_proj.weight"],
    }  # fmt: skip


def as_kimi(own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    (q, k), (decay, gate) = own["qk_proj.weight"].chunk(2), own["latent_proj.weight"].chunk(2)
    return {
        "q_proj.weight": q, "k_proj.weight": k, "v_proj.weight": own["v_proj.weight"], "b_proj.weight": own["beta_proj.weight"],
        "forget_gate.f_a_proj.weight": decay, "forget_gate.f_b_proj.weight": own["decay_up.weight"], "conv1d.weight": convolution(own),
        "forget_gate.dt_bias": own["dt_bias"].flatten(), "forget_gate.A_log": own["A_log"].view(1, 1, -1, 1), "g_a_proj.weight": gate,
        "g_b_proj.weight": own["gate_up.weight"], "o_norm.weight": own["gated_norm.weight"], "o_proj.weight": own["out_proj.weight"],
    }  # fmt: skip


def as_minimax(own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        "qkv_proj.weight": own["qkv_proj.weight"], "output_gate.weight": own["gate_proj.weight"],
        "norm.weight": own["gated_norm.weight"], "out_proj.weight": own["out_proj.weight"],
    }  # fmt: skip


def as_xlstm(own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    (q, k), (of_input, of_forget) = own["qk_proj.weight"].chunk(2), own["gates_proj.weight"].chunk(2)
    biases = own["gates_proj.bias"].chunk(2)
    return {
        "q.weight": q, "k.weight": k, "v.weight": own["v_proj.weight"], "ogate_preact.weight": own["gate_proj.weight"],
        "igate_preact.weight": of_input, "igate_preact.bias": biases[0], "fgate_preact.weight": of_forget, "fgate_preact.bias": biases[1],
        "multihead_norm.weight": own["head_norm.weight"], "out_proj.weight": own["out_proj.weight"],
    }  # fmt: skip


def block_of(section: Any) -> Block:
    """Our block; lightning attention as the second mixing layer of four, whose norm has its own epsilon."""
    if isinstance(section, LightningAttention):
        return LightningBlock(section, HIDDEN, EPS, "GE" * 4, 2)
    return MatrixLstmBlock(section, HIDDEN, EPS) if isinstance(section, MatrixLstm) else LinearAttentionBlock(section, HIDDEN, EPS)


def layers() -> dict[str, tuple[Any, nn.Module, Callable[[Mapping[str, Tensor]], dict[str, Tensor]]]]:
    """Our section, their layer, and their parameters from ours."""
    qwen = Qwen3_5TextConfig(**COMMON, **OF_DELTA)
    olmo = OlmoHybridConfig(**COMMON | {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}, **OF_DELTA)
    kimi = KimiLinearConfig(**COMMON, linear_num_heads=3, linear_head_dim=8, mlp_layer_types=["dense"])
    minimax = MiniMaxConfig(hidden_size=HIDDEN, num_attention_heads=3, head_dim=8, num_hidden_layers=4, block_size=16)
    kernels = {"chunkwise_kernel": "chunkwise--native_autograd", "mode": "inference", "chunk_size": 16}
    kernels |= {"autocast_kernel_dtype": "float32", "eps": 1e-12}  # theirs is added to the divisor
    xlstm = xLSTMConfig(hidden_size=HIDDEN, num_heads=3, num_hidden_layers=1, norm_eps=EPS, gate_soft_cap=8.0, **kernels)
    kda = {"kind": "kda", "num_heads": 3, "head_dim": 8, "chunk_size": 16, "save_every": 40}
    return {
        "Qwen3_5GatedDeltaNet": (GatedDeltaNet.model_validate(GATED), Qwen3_5GatedDeltaNet(qwen, 0), as_qwen),
        "OlmoHybridGatedDeltaNet": (
            GatedDeltaNet.model_validate(GATED | {"negative_eigenvalues": True}),
            OlmoHybridGatedDeltaNet(olmo, 0),
            as_olmo,
        ),
        "MiniMaxLightningAttention": (LightningAttention.model_validate(LIGHTNING), MiniMaxLightningAttention(minimax, 1), as_minimax),
        "xLSTMLayer": (MatrixLstm.model_validate(MLSTM), xLSTMLayer(xlstm), as_xlstm),
        "KimiLinearDeltaAttention": (KimiDeltaAttention.model_validate(kda), KimiLinearDeltaAttention(kimi, 0), as_kimi),
    }


def first(found: Any) -> Any:
    """A layer's output; some return states, too."""
    return found[0] if isinstance(found, tuple) else found


@pytest.mark.parametrize("length", [1, 37, 90])
@pytest.mark.parametrize(
    "name", ["Qwen3_5GatedDeltaNet", "OlmoHybridGatedDeltaNet", "KimiLinearDeltaAttention", "MiniMaxLightningAttention", "xLSTMLayer"]
)
def test_a_layer(name: str, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "xLSTMLayer" and length == 1:
        pytest.skip("what one position reads of itself depends on no gate: gradients are rounding")
    section, theirs, renamed = layers()[name]
    use_plain_torch(theirs, monkeypatch)
    block = block_of(section)
    shapes = {key: value.shape for key, value in block.named_parameters() if key != "norm.weight"}
    inputs = {"x": normal(0, 2, length, HIDDEN)}
    for index, (key, shape) in enumerate(shapes.items()):
        scale = 0.3 if len(shape) == 2 else 1.0
        inputs[key.replace(".", "__")] = normal(1 + index, *shape) * scale

    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.block.out_proj(self.block.mix(x))
            return found

    body = Body()

    def own(given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {key.replace("__", "."): value for key, value in given.items()}

    compare(
        f"G block {section.kind}",
        f"transformers {name}",
        lambda x, **given: torch.func.functional_call(body, {f"block.{key}": value for key, value in own(given).items()}, (x,)),
        lambda x, **given: first(torch.func.functional_call(theirs, renamed(own(given)), (x, *ARGUMENTS.get(name, ())))),
        inputs,
    )
