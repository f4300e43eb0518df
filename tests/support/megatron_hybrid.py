"""A small hybrid that Megatron-Core has the layers of, and with changes."""

from megaplan.spec.load import load_spec_text
from megaplan.spec.models import Spec

MODEL = """
model:
  pattern: MEMAMEMD
  num_layers: 16
  hidden_size: 256
  vocab_size: 1024
  attention: {kind: gqa, num_heads: 8, num_kv_heads: 4, head_dim: 32}
  mamba: {kind: mamba2, head_dim: 32, state_dim: 64, num_groups: 4, chunk_size: 128}
  moe: {num_experts: 8, top_k: 2, ffn_hidden_size: 384, shared_ffn_hidden_size: 128}
  mlp: {ffn_hidden_size: 640}
"""
TEXT = f"""
format: megaplan.spec/1
name: host{MODEL}mesh: {{pp: 2, dp_shard: 4, ep: 2}}
schedule: {{num_microbatches: 8}}
batch: {{micro_batch_size: 2, seq_length: 512}}
optimizer: {{matrix: adamw}}
split: {{mode: equal}}
host: {{name: megatron, attention_mask: false, hidden_dropout: 0.0}}
"""


def spec_of(*overrides: str) -> Spec:
    return load_spec_text(TEXT, "host.yaml", overrides).spec


DENSE_GPT = (
    "model.pattern=AD",
    "model.moe=null",
    "model.mamba=null",
    "host.model=gpt",
    "mesh={pp: 1, dp_shard: 4, tp: 2, vocab_parallel: true}",
)
WHOLE = "sharding.reshard_after_forward=true"
