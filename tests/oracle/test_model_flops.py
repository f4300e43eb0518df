"""Model FLOPs of each kind of block: what torch's own counter sees of a real one, and the stated term of what it cannot see into."""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from megaplan.blocks.work import LayerCost, Works
from megaplan.cost.blocks import end_works, layer_works, whole_workload
from megaplan.cost.model import ModelCosts, model_costs
from megaplan.inventory.build import build_inventory
from megaplan.layout.build import build_layout
from megaplan.spec.models import Spec
from megarun.engine.build import build_stage, materialise
from megarun.engine.initialise import initialise
from megarun.model.mtp import Ends
from megarun.model.rotary import Rotary
from megarun.model.stage import Stage

pytestmark = pytest.mark.runtime
ROWS, LENGTH, HIDDEN, VOCAB = 2, 24, 32, 61
SPEC: dict[str, Any] = {
    "format": "megaplan.spec/1",
    "name": "counted",
    "batch": {"micro_batch_size": ROWS, "seq_length": LENGTH},
    "precision": dict.fromkeys(("params", "grads", "master", "moments", "reduce"), "fp32"),
    "host": {"kernels": "reference"},
}
GQA = {"kind": "gqa", "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
WIDTHS = {"kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
MLA = {"kind": "mla", "num_heads": 4, "q_lora_rank": 8, **WIDTHS}
INDEXED = MLA | {"indexer": {"num_heads": 2, "head_dim": 6, "layers": [0], "top_k": 6}}
MAMBA2 = {"kind": "mamba2", "expand": 2, "head_dim": 16, "state_dim": 8, "num_groups": 2, "chunk_size": 8}
MAMBA3 = {"kind": "mamba3", "expand": 2, "head_dim": 16, "state_dim": 8, "num_groups": 2, "chunk_size": 8, "save_every": 16}
EXPERTS = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 24, "shared_ffn_hidden_size": 16}
M2RNN = {"kind": "m2rnn", "num_heads": 3, "key_dim": 4, "value_dim": 4, "save_every": 8}
ENDS = {"attention": GQA, "mlp": {"ffn_hidden_size": 40}}
STATES = {"mamba": MAMBA2, "moe": EXPERTS, "mlp": {"ffn_hidden_size": 40}}

# A product forward is two backward, of inputs and of weights or of both inputs. Visible pairs of 24 positions: 300; 147 in a window of 7,
# 129 of 6. A pair and head is 2·D of q kᵀ and 2·Dv of p v; a token has its 24th part.
PASSES, PAIRS, PAIRS_OF_7, PAIRS_OF_6 = 3, 300, 147, 129
TAPS = PASSES * 2 * 4  # a channel of a convolution of four


def attention(pairs: int, score_width: int, value_width: int = 8) -> int:
    return PASSES * 2 * pairs * 4 * (score_width + value_width) // LENGTH


def scan(rows: int, tile: int, group_scores: int) -> int:
    """FLOPs of 4 heads of width 16, state 8, `rows` a position, `tile` at once: scores, their product with x, and the state in and out."""
    return PASSES * (group_scores * 2 * rows * tile * 8 + 4 * rows * (2 * tile * 16 + 4 * 8 * 16))


class Kind(NamedTuple):
    """A block that is counted.

    Attributes:
        model: Sections of a spec.
        core: FLOPs per token inside its operations, forward and backward, repeated ones left out.
        part: Place of the block: a layer, or one of the ends.
    """

    model: dict[str, Any]
    core: int
    part: str = "layer"


KINDS = {
    "A mha": Kind({"pattern": "A", "attention": GQA | {"num_kv_heads": 4}}, attention(PAIRS, 8)),
    "A gqa": Kind({"pattern": "A", "attention": GQA | {"qk_norm": True, "bias": True}}, attention(PAIRS, 8)),
    "A gqa, window": Kind({"pattern": "A", "attention": GQA | {"window_size": 7}}, attention(PAIRS_OF_7, 8)),
    "A mla": Kind({"pattern": "A", "attention": MLA}, attention(PAIRS, 8 + 4)),
    "A mla, direct": Kind({"pattern": "A", "attention": MLA | {"q_lora_rank": None}}, attention(PAIRS, 8 + 4)),
    # two heads' scores of width 6 and their weighted sum, of every visible pair
    "A mla, indexer": Kind({"pattern": "A", "attention": INDEXED}, attention(PAIRS_OF_6, 8 + 4) + PASSES * 2 * PAIRS * 2 * 7 // LENGTH),
    "M mamba2": Kind({"pattern": "M", "mamba": MAMBA2}, TAPS * (64 + 2 * 2 * 8) + scan(1, 8, group_scores=2)),
    "M mamba3": Kind({"pattern": "M", "mamba": MAMBA3}, scan(1, 8, group_scores=4)),
    "M mamba3, angles": Kind({"pattern": "M", "mamba": MAMBA3 | {"num_angles": 3}}, scan(1, 8, group_scores=4)),
    "M mamba3, MIMO": Kind({"pattern": "M", "mamba": MAMBA3 | {"mimo_rank": 2, "num_angles": 3}}, scan(2, 16, group_scores=4)),
    # router, and two experts of three matrices, or of two
    "E": Kind({"pattern": "E", "moe": EXPERTS}, PASSES * 2 * HIDDEN * (4 + 2 * 3 * 24)),
    "E relu2": Kind({"pattern": "E", "moe": EXPERTS | {"activation": "relu2"}}, PASSES * 2 * HIDDEN * (4 + 2 * 2 * 24)),
    "D": Kind({"pattern": "D", "mlp": {"ffn_hidden_size": 40}}, 0),
    "D gelu": Kind({"pattern": "D", "mlp": {"ffn_hidden_size": 40, "activation": "gelu"}}, 0),
    # H W, and with its gradients three of them; k vᵀ and qᵀ H, and four products of their size backward
    "R": Kind({"pattern": "R", "recurrent": M2RNN}, TAPS * (2 * 4 + 3 * 4) + 3 * (PASSES * 2 * 4 * 4 * 4 + 6 * 2 * 4 * 4)),
    "head": Kind({"pattern": "AD", **ENDS}, 0, "head"),
    "head, tied": Kind({"pattern": "AD", "tie_embeddings": True, **ENDS}, 0, "head"),
    "MTP depth": Kind({"pattern": "AD", **ENDS, "features": {"mtp": {"depth": 1, "ffn_hidden_size": 20}}}, attention(PAIRS, 8), "mtp"),
    "MTP depth of M, E, D": Kind(
        {"pattern": "MED", **STATES, "features": {"mtp": {"depth": 1, "pattern": "MED", "ffn_hidden_size": 20}}},
        TAPS * (64 + 2 * 2 * 8) + scan(1, 8, group_scores=2) + PASSES * 2 * HIDDEN * (4 + 2 * 3 * 24),
        "mtp",
    ),
    "n-gram": Kind({"pattern": "AD", **ENDS, "features": {"ngram": {"num_tables": 4, "num_rows": 90, "dim": 4}}}, 0, "ngram"),
    "structure": Kind({"pattern": "AD", **ENDS, "features": {"structure": {"num_categories": 7, "bottleneck": 6}}}, 0, "structure"),
}


def run(stage: Stage, part: str) -> Tensor:
    """Forward of a part, on inputs that have gradients."""
    x = torch.randn(ROWS, LENGTH, HIDDEN, requires_grad=True)
    tokens = torch.randint(0, VOCAB, (ROWS, LENGTH))
    rotary = Rotary(stage.rope_cos, stage.rope_sin) if stage.attention is not None else None
    parts: dict[str, Callable[[], Any]] = {
        "layer": lambda: stage.layers["0"](x, rotary, None),
        "head": lambda: stage.loss_of(stage.final_norm(x), tokens),
        "mtp": lambda: stage.mtp["0"](x, tokens, tokens, Ends(stage.embedding.forward, stage.loss_of), rotary, None)[1],
        "ngram": lambda: stage.ngram(x, tokens, tokens[:, None]),
        "structure": lambda: stage.structure(x, tokens % 7),
    }
    found: Tensor = parts[part]()
    return found


def costs(part: str, found: ModelCosts) -> LayerCost:
    """The model's own."""
    return {"layer": found.layers[0], "head": found.head, "mtp": (*found.mtp, found.head)[0]}.get(part, found.side_embeddings)


def ops(part: str, spec: Spec) -> Works:
    """Operations of the cost model that the costs sum."""
    load = whole_workload(spec, spec.precision.params)
    if part == "layer":
        return layer_works(load, spec.model, build_inventory(spec).layers[0])
    ends = end_works(load, spec)
    return {"head": ends.head, "mtp": ends.mtp}.get(part, ends.side_embeddings)


@pytest.mark.parametrize("name", KINDS)
def test_model_flops_are_the_counter_s_and_the_core(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Counter: every matrix product outside the operations, of a real forward and backward."""
    kind = KINDS[name]
    model = {"hidden_size": HIDDEN, "vocab_size": VOCAB, "num_layers": len(kind.model["pattern"])} | kind.model
    spec = Spec.model_validate(SPEC | {"model": model})
    inventory = build_inventory(spec)
    stage = build_stage(spec, inventory, build_layout(spec, inventory, [(0, spec.model.num_layers)]).slots[0])
    materialise(stage, torch.device("cpu"))
    initialise(stage, inventory, 0)
    with FlopCounterMode(display=False) as counter:
        torch.autograd.backward(run(stage, kind.part).square().sum())
    counted, num_tokens = counter.get_total_flops(), ROWS * LENGTH
    found = costs(kind.part, model_costs(spec, inventory)).model_flops
    with capsys.disabled():
        sys.stdout.write(f"{name}: model {found:,} FLOPs per token = {counted // num_tokens:,} counted by torch + {kind.core:,} core\n")
    assert counted == num_tokens * (found - kind.core)
    linears = [op.work for op in ops(kind.part, spec) if op.is_linear]
    assert counted == num_tokens * sum(work.forward + work.input_grad + work.weight_grad for work in linears)
