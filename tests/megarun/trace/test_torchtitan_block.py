"""Tensors that autograd saves of a transformer block as torchtitan writes it, compared with the planner's ledger of that host."""

import torch
from torch.nn import functional

from megaplan.hosts.torchtitan.blocks import transformer_blocks
from megaplan.hosts.torchtitan.ledger import block_ledger
from megaplan.inventory.build import build_inventory
from megaplan.spec.load import load_spec_text

BATCH, TOKENS, HIDDEN, HEADS, GROUPS, WIDTH, FFN = 2, 128, 256, 8, 4, 32, 640
SPEC = f"""
format: megaplan.spec/1
name: small
model:
  pattern: AD
  num_layers: 2
  hidden_size: {HIDDEN}
  vocab_size: 512
  attention: {{kind: gqa, num_heads: {HEADS}, num_kv_heads: {GROUPS}, head_dim: {WIDTH}}}
  mlp: {{ffn_hidden_size: {FFN}, activation: swiglu}}
batch: {{micro_batch_size: {BATCH}, seq_length: {TOKENS}}}
optimizer: {{matrix: adamw}}
host: {{name: torchtitan, repeat_kv: true}}
"""


class FusedNorm(torch.autograd.Function):
    """CUDA's fused RMSNorm: it keeps its input and one fp32 number a row. The CPU's is made of operations that keep more."""

    @staticmethod
    def forward(ctx, values, scale):
        rstd = values.float().pow(2).mean(-1, keepdim=True).rsqrt()
        ctx.save_for_backward(values, rstd)
        return (values.float() * rstd).to(values.dtype) * scale

    @staticmethod
    def backward(_ctx, gradient):
        return gradient, None


def turned(values, angles):
    pairs = torch.view_as_complex(values.float().reshape(*values.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * angles.view(1, TOKENS, 1, -1)).flatten(3).type_as(values)


def repeated(values):
    share = HEADS // GROUPS
    return values.unsqueeze(3).expand(BATCH, TOKENS, GROUPS, share, WIDTH).reshape(BATCH, TOKENS, HEADS, WIDTH)


def block(stream, angles, weights):
    normed = FusedNorm.apply(stream, weights["norm"])
    shape = BATCH, TOKENS, -1, WIDTH
    q, k, v = (functional.linear(normed, weights[name]).view(shape) for name in "qkv")
    q, k = turned(q, angles), turned(k, angles)
    heads = [part.transpose(1, 2) for part in (q, repeated(k), repeated(v))]
    made = functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).contiguous().view(BATCH, TOKENS, -1)
    middle = stream + functional.linear(made, weights["o"])
    inner = FusedNorm.apply(middle, weights["mlp_norm"])
    product = functional.silu(functional.linear(inner, weights["gate"])) * functional.linear(inner, weights["up"])
    return middle + functional.linear(product, weights["down"])


def test_autograd_saves_what_the_ledger_lists():
    shapes = {"norm": (HIDDEN,), "mlp_norm": (HIDDEN,), "q": (HEADS * WIDTH, HIDDEN), "k": (GROUPS * WIDTH, HIDDEN)}
    shapes |= {
        "v": (GROUPS * WIDTH, HIDDEN),
        "o": (HIDDEN, HEADS * WIDTH),
        "gate": (FFN, HIDDEN),
        "up": (FFN, HIDDEN),
        "down": (HIDDEN, FFN),
    }
    weights = {name: torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for name, shape in shapes.items()}
    stream = torch.randn(BATCH, TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    angles = torch.polar(torch.ones(TOKENS, WIDTH // 2), torch.randn(TOKENS, WIDTH // 2))
    known = {tensor.untyped_storage().data_ptr() for tensor in (stream, angles, *weights.values())}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        block(stream, angles, weights)
    spec = load_spec_text(SPEC, "small.yaml").spec
    listed = block_ledger(spec, "layers.0", transformer_blocks(build_inventory(spec)).layers[0]).saved
    assert sorted(storage.nbytes() for storage in saved.values()) == sorted(tensor.bytes for tensor in listed)
