"""Cells of linear attention: gated delta nets with more value heads than key heads, and Kimi delta attention."""

from feature_cells import WINDOWED
from parity_cells import C2, C4, FEW_WORDS, GENTLE, LONG, RESHARD, SELECTIVE, T2, T4, V2, Cell, pattern
from parity_model import KDA

_KDA = {"linear_attention": KDA}
_LIGHTNING = {"linear_attention": {"kind": "lightning", "num_heads": 4, "head_dim": 6, "chunk_size": 5, "gated_norm_eps": 1e-4}}
_MLSTM = {"linear_attention": {"kind": "mlstm", "num_heads": 4, "key_dim": 5, "value_dim": 6, "chunk_size": 5, "gate_soft_cap": 4.0}}
LINEAR_CELLS = [
    Cell("1f1b-pp2-delta", {"pp": 2}, spec=pattern("GD", 4)),
    Cell("zbv-pp2-kda-experts", V2, "zbv", pattern("GE", 4, **_KDA)),
    Cell("delta-dp2-ep2-reshard", {"dp_shard": 2, "ep": 2}, spec=pattern("GAGE", 4) | RESHARD),
    Cell("tp2-delta", T2, spec=pattern("G", 2) | GENTLE),
    Cell("tp2-kda", T2, spec=pattern("G", 2, **_KDA)),
    Cell("tp4-delta-selective", T4, spec=pattern("GD", 4) | SELECTIVE),
    Cell("cp2-delta", C2, spec=pattern("G", 2) | GENTLE),
    Cell("cp2-kda", C2, spec=pattern("G", 2, **_KDA), ci=True),
    Cell("cp4-delta-selective", C4, spec=pattern("GAD", 3) | LONG | SELECTIVE | GENTLE),
    Cell("cp2-tp2-dp2-kda-selective", C2 | T2 | {"dp_shard": 2}, spec=pattern("GAD", 3, **_KDA) | SELECTIVE),
    Cell("cp2-zbv-kda", C2 | V2, "zbv", pattern("GD", 4, **_KDA)),
    Cell("zbv-pp2-lightning-experts", V2, "zbv", pattern("GEAE", 4, **_LIGHTNING)),
    Cell("tp2-lightning", T2, spec=pattern("GD", 4, **_LIGHTNING)),
    Cell("tp4-lightning-selective", T4, spec=pattern("GD", 4, **_LIGHTNING) | SELECTIVE),
    Cell("cp2-tp2-lightning-selective", C2 | T2, spec=pattern("GAG", 3, **_LIGHTNING) | SELECTIVE, ci=True),
    Cell("packed-cp2-lightning", C2, spec=FEW_WORDS | pattern("G", 2, **_LIGHTNING)),
    Cell("zbv-pp2-mlstm-experts", V2, "zbv", pattern("GEAE", 4, **_MLSTM)),
    Cell("tp2-mlstm-selective", T2, spec=pattern("GD", 4, **_MLSTM) | SELECTIVE, ci=True),
    Cell("tp4-mlstm", T4, spec=pattern("GD", 4, **_MLSTM)),
    Cell("packed-dp2-mlstm", {"dp_shard": 2}, spec=FEW_WORDS | pattern("G", 2, **_MLSTM)),
    Cell("packed-delta-windows", {"dp_shard": 2}, spec=FEW_WORDS | WINDOWED | pattern("GAD", 3)),
    Cell("packed-cp2-kda", C2, spec=FEW_WORDS | pattern("G", 2, **_KDA)),
    Cell("packed-cp4-delta", C4, spec=FEW_WORDS | LONG | pattern("G", 2)),
]
