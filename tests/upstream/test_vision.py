"""Encoders with rotary embedding of patches' rows and columns, and their projections, compute what transformers computes."""

import json
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from upstream_checks import normal, note, rms_ratio  # noqa: E402

from megaplan.importers.hf import import_hf  # noqa: E402
from megarun.model.vision import Projector, VisionEncoder, patch_places  # noqa: E402

EPS, IMAGES = 1e-6, 2  # of norms, whatever the config says
SIZES: dict[str, Any] = {"depth": 3, "num_heads": 4, "patch_size": 4, "temporal_patch_size": 2, "in_channels": 3, "spatial_merge_size": 2}
TEXT = {
    "hidden_size": 40,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "num_hidden_layers": 1,
    "intermediate_size": 24,
    "vocab_size": 40,
}
CASES = {
    "qwen2_vl": ((4, 6), {"embed_dim": 32, "hidden_size": 40, "mlp_ratio": 2, "hidden_act": "gelu_pytorch_tanh"}),
    "qwen2_5_vl": (
        (8, 12),
        {"hidden_size": 48, "intermediate_size": 52, "out_hidden_size": 40, "window_size": 16, "fullatt_block_indexes": [1]},
    ),
    "qwen3_vl": (
        (6, 6),
        {"hidden_size": 32, "intermediate_size": 52, "out_hidden_size": 40, "num_position_embeddings": 36, "deepstack_visual_indexes": []},
    ),
}
"""Rows and columns of patches, and further fields."""
NAMES = {"patch_embed": "patches", "blocks": "layers", "norm1": "attention.norm", "norm2": "mlp.norm", "attn": "attention"}
NAMES |= {"proj": "o_proj", "fc1": "up_proj", "fc2": "down_proj", "linear_fc1": "up_proj", "linear_fc2": "down_proj"}


def renamed(theirs: dict[str, Tensor], places: list[tuple[int, int]]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights of a vision model of transformers by our names: those of the encoder, and of the projection.

    Positions of a grid are in the order of its rows; ours are in the order of patches.
    """
    encoder: dict[str, Tensor] = {}
    projection: dict[str, Tensor] = {}
    for name, weight in theirs.items():
        *path, kind = name.split(".")
        if path[0] == "merger":
            own = {"ln_q": "norm", "norm": "norm", "0": "linears.0", "2": "linears.1", "linear_fc1": "linears.0", "linear_fc2": "linears.1"}
            projection[f"{own[path[-1]]}.{kind}"] = weight
        elif path[0] == "pos_embed":
            columns = 1 + max(column for _, column in places)
            encoder["patches.positions"] = weight[[row * columns + column for row, column in places]]
        elif path[0] == "patch_embed":
            encoder[f"patches.proj.{kind}"] = weight.flatten(1) if kind == "weight" else weight
        elif path[-1] == "qkv":
            prefix = f"layers.{path[1]}.attention"
            encoder |= {f"{prefix}.{each}_proj.{kind}": part for each, part in zip("qkv", weight.chunk(3), strict=True)}
        else:
            encoder[".".join((*(NAMES.get(part, part) for part in path), kind))] = weight
    return encoder, projection


@pytest.mark.parametrize("model_type", CASES)
def test_an_encoder_with_rows_and_columns(model_type: str) -> None:
    """Features of two images, and the rows that the projection makes of them; the order of windows is the encoder's own."""
    (rows, columns), fields = CASES[model_type]
    config = transformers.CONFIG_MAPPING[model_type](vision_config=SIZES | fields, text_config=TEXT)
    towers = import_hf(json.dumps(json.loads(config.to_json_string(use_diff=False))), "config.json").loaded.spec.model.towers
    assert towers is not None
    assert towers.stated is not None
    encoder, projection = towers.stated
    encoder = encoder.model_copy(update={"grid": (rows, columns), "patches": rows * columns})
    torch.manual_seed(5)
    theirs = transformers.AutoModel.from_config(config).get_submodule("visual").float()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.3)
    for module in (*theirs.merger.modules(),):
        for name, child in module.named_children():
            if isinstance(child, nn.GELU):
                setattr(module, name, nn.GELU("tanh"))  # the form that ours computes
    ours = VisionEncoder(encoder, EPS, projection.patches_per_token, trained=True)
    projector = Projector(projection, EPS, trained=True, in_graph=True)
    places = patch_places(encoder, projection.patches_per_token)
    for part, weights in zip((ours, projector), renamed(dict(theirs.named_parameters()), places), strict=True):
        part.load_state_dict(weights)
    ours.add_rotary(torch.device("cpu"))
    # theirs takes patches in the order of tokens, row by row; ours window by window
    plain = patch_places(encoder.model_copy(update={"window_patches": None}), projection.patches_per_token)
    order = [plain.index(place) for place in places]
    patches = normal(1, IMAGES, rows * columns, encoder.patch_values)
    expected = theirs(patches.flatten(0, 1), torch.tensor([[1, rows, columns]] * IMAGES)).pooler_output
    made = projector(ours(patches[:, order])).view(IMAGES, -1, 40)
    tokens = [place // projection.patches_per_token for place in order[:: projection.patches_per_token]]
    note(f"encoder of {model_type}", "transformers", {"rows": rms_ratio(made, expected.view(IMAGES, -1, 40)[:, tokens])})
