"""Features against the formulas in plain torch."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megakernels import ngram_rows
from megaplan.inventory.build import build_inventory
from megaplan.layout.build import build_layout
from megaplan.spec.models import Spec
from megarun.engine.build import build_stage, materialise
from megarun.engine.initialise import initialise
from megarun.model.rotary import Rotary
from megarun.model.stage import Stage

pytestmark = pytest.mark.runtime
HIDDEN, LENGTH, ROWS = 32, 24, 2


def whole_stage(spec_with: Any, features: dict[str, Any], **more: Any) -> Stage:
    spec = Spec.model_validate(spec_with({"model.pattern": "AD", "model.num_layers": 2, "model.features": features, **more}))
    inventory = build_inventory(spec)
    stage = build_stage(spec, inventory, build_layout(spec, inventory, [(0, 2)]).slots[0])
    materialise(stage, torch.device("cpu"))
    initialise(stage, inventory, 0)
    return stage


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, (x.shape[-1],), weight, 1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_depths_predict_one_token_further_each(tied: bool, spec_with: Any) -> None:
    """Depth d joins the embedding of the token d + 1 places on and is held to the one behind it; what is missing hides all behind it."""
    stage = whole_stage(spec_with, {"mtp": {"depth": 2, "ffn_hidden_size": 20, "loss_weight": 0.7}}, **{"model.tie_embeddings": tied})
    tokens = torch.randint(0, 61, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    places = [functional.pad(tokens[:, ahead:], (0, ahead), value=-100) for ahead in (1, 2, 3)]
    for ahead, ids in enumerate(places, start=1):
        ids[0, 10 - ahead : 10] = -100  # a document ends at position 9 of the first row
    labels, following = places[0], places[1:]
    logits, further = stage(tokens, labels=labels, following=following)
    rotary, hidden = Rotary(stage.rope_cos, stage.rope_sin), stage.embedding(tokens)
    for block in stage.layers.values():
        hidden = block(hidden, rotary)
    head = stage.embedding.weight if tied else stage.head.weight
    torch.testing.assert_close(logits, normed(hidden, stage.final_norm.weight) @ head.T)
    total = torch.zeros(())
    for index, depth in stage.mtp.items():
        distance = int(index) + 1
        ids = places[distance - 1].clamp(min=0)
        pair = normed(hidden, depth.hidden_norm.weight), normed(stage.embedding(ids), depth.embedding_norm.weight)
        hidden = depth.mlp(depth.attention(torch.cat(pair, -1) @ depth.proj.weight.T, rotary))
        scores = normed(hidden, depth.output_norm.weight) @ head.T
        for row in range(ROWS):
            for position in range(LENGTH):
                target = position + distance + 1
                if target < LENGTH and not (row == 0 and position < 10 <= target):
                    total = total - scores[row, position].log_softmax(-1)[tokens[row, target]]
    expected = total * 0.7 / 2
    torch.testing.assert_close(further, expected)
    assert float(stage.further_loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    with torch.no_grad():
        assert torch.equal(stage(tokens, labels=labels, following=following), logits)


@pytest.mark.requirement("R-9")
def test_side_embeddings_are_added_to_the_token_embedding(spec_with: Any) -> None:
    """Rows of the hashed n-grams side by side, then the gated rows of each token's class and platform."""
    config = {"num_tables": 3, "num_rows": 40, "dim": 4}
    categories = {"structure": {"num_categories": 7, "bottleneck": 6}, "platform": {"num_categories": 3, "bottleneck": 5}}
    stage = whole_stage(spec_with, {"ngram": config, **categories})
    with torch.no_grad():
        stage.structure.gates.copy_(torch.tensor([0.3, 1.7]))
        stage.platform.gates.copy_(torch.tensor([-0.4, 0.6]))
    tokens = torch.randint(0, 61, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    before = torch.stack([functional.pad(tokens, (places, 0), value=-1)[:, :LENGTH] for places in (1, 2)], 1)
    rows = ngram_rows(tokens, before, 3, 40)
    expected = stage.embedding.weight[tokens] + stage.ngram.tables.weight[rows].flatten(2) @ stage.ngram.proj.weight.T
    row = stage.structure.categories.weight[tokens % 7] @ stage.structure.proj.weight.T
    expected = expected + 1.7 * torch.tanh(torch.tensor(0.3)) * row
    row = stage.platform.categories.weight[tokens % 3] @ stage.platform.proj.weight.T
    expected = expected + 0.6 * torch.tanh(torch.tensor(-0.4)) * row
    found = stage.embed(tokens, before, (tokens % 7).to(torch.uint8), (tokens % 3).to(torch.uint8))
    torch.testing.assert_close(found, expected)
