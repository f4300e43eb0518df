"""`megaplan import torchtitan` of forks: flavors in their own registries, of every period, and models with published sizes."""

import json
import shlex

import pytest
from torchtitan_jobs import NEW, codes, spec_of

from megaplan.errors import MegaplanError
from megaplan.importers.torchtitan.spec import import_torchtitan
from megaplan.inventory.build import build_inventory

REGISTRY = """
own_args = {"9B": Args(dim=1)}
llama3_args = {
    "9B": TransformerModelArgs(
        dim=4096, n_layers=40, n_heads=32, n_kv_heads=8, ffn_dim_multiplier=3 / 2, multiple_of=1024, rope_theta=500000, max_seq_len=8192
    ),
    "2B": TransformerModelArgs(dim=2048, n_layers=8, n_heads=16, hidden_dim=8192, head_dim=64, vocab_size=5120, use_flex_attn=False),
    "made": TransformerModelArgs(dim=width(), n_layers=8, n_heads=16),
}
"""
"""A fork's registry."""


def test_a_model_that_a_config_makes_is_no_flavor():
    with pytest.raises(MegaplanError) as caught:
        import_torchtitan('[model]\nconfig = "org/model"\n[training]\nbatch_size = 4\nseq_len = 128\n', "job.toml")
    (found,) = caught.value.diagnostics
    assert (found.code, found.hints[0]) == ("MP914", "megaplan estimate org/model --gpus 8")


@pytest.mark.parametrize(("flavor", "sizes"), [("9B", (80, 16_384, 8, 128, 128_256)), ("2B", (16, 8192, 16, 64, 5120))])
def test_a_flavor_of_a_forks_own_tree_has_the_sizes_of_its_registry(tmp_path, flavor, sizes):
    folder = tmp_path / "torchtitan/models/llama3"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(REGISTRY)
    job = NEW.replace("qwen3", "llama3").replace('"1.7B"', f'"{flavor}"')
    for path in (tmp_path / "configs/job.toml", folder / "train_configs/job.toml"):
        path.parent.mkdir()
        path.write_text(job)
        model = import_torchtitan(job, str(path)).loaded.spec.model
        attention = model.attention
        assert (model.num_layers, model.mlp.ffn_hidden_size, attention.num_kv_heads, attention.head_dim, model.vocab_size) == sizes
    with pytest.raises(MegaplanError, match=r"model\.flavor"):
        import_torchtitan(job.replace(f'"{flavor}"', '"made"'), str(path))
    assert codes(job)[0] == ["MP916"]


BLOCKS = """
def _layers(*, n_layers, dim, n_heads, n_kv_heads, hidden_dim, rope, attn_backend):
    return [Block.Config(attention_norm=norm(dim)) for _ in range(n_layers)]

def _small(attn_backend):
    dim, vocab_size = 1024, 5120
    width = 1024
    return Llama3Model.Config(
        dim=width, vocab_size=vocab_size, lm_head=Linear.Config(in_features=width),
        layers=_layers(
            n_layers=6, dim=width, n_heads=16, n_kv_heads=4, attn_backend=attn_backend, rope=RoPE.Config(dim=64, theta=5e5),
            hidden_dim=compute_ffn_hidden_dim(width, multiple_of=512, ffn_dim_multiplier=1.5),
        ),
    )

llama3_configs = {"small": _small}
"""
ONE_LAYER = """
qwen3_configs = {
    "3B-A1B": Qwen3Model.Config(
        vocab_size=5120, dim=512, n_layers=6, tok_embeddings=Embedding.Config(), norm=RMSNorm.Config(eps=1e-6), enable_weight_tying=False,
        layer=Qwen3TransformerBlock.Config(
            attention_norm=RMSNorm.Config(), moe_enabled=True, feed_forward=FeedForward.Config(hidden_dim=9999),
            moe=MoE.Config(hidden_dim=384, num_experts=16, num_shared_experts=1, score_before_experts=False,
                           router=TokenChoiceTopKRouter.Config(top_k=4, score_func="softmax")),
            attention=GQAttention.Config(n_heads=8, n_kv_heads=2, head_dim=64, q_norm=RMSNorm.Config(), k_norm=RMSNorm.Config()),
        ),
        rope=RoPE.Config(dim=64, theta=1000000.0),
    ),
}
"""
LATENT = """
deepseekv3_args = {
    "small": DeepSeekV3ModelArgs(
        vocab_size=5120, dim=512, inter_dim=2048, moe_inter_dim=256, n_layers=5, n_dense_layers=2, n_heads=4, q_lora_rank=0,
        moe_args=MoEArgs(num_experts=8, num_shared_experts=2, top_k=3, score_func="softmax", route_norm=False, score_before_experts=False),
        kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, mscale=0.7, use_flex_attn=True,
    ),
    "before": DeepSeekV3ModelArgs(
        vocab_size=5120, dim=512, inter_dim=2048, moe_inter_dim=256, n_layers=5, n_dense_layers=2, n_heads=4, qk_nope_head_dim=64,
        moe_args=MoEArgs(num_experts=8, num_shared_experts=2, top_k=3, score_func="softmax", score_before_experts=True),
    ),
    "other": DeepSeekV3ModelArgs(dim=512, n_layers=5, n_heads=4, ngram_table=4096),
}
deepseek_v3.deepseekv3_args["added"] = DeepSeekV3ModelArgs(
    vocab_size=5120, dim=512, inter_dim=2048, moe_inter_dim=256, n_layers=5, n_dense_layers=2, n_heads=4,
    moe_args=MoEArgs(num_experts=8, num_shared_experts=2, top_k=3, score_func="softmax"),
)
"""
OTHER_FILE = """
from torchtitan.models.llama3.sizes import llama3_configs
from ..llama3.model import Transformer

own_configs = {"tied": Args(dim=1024, n_layers=6, n_heads=16, n_kv_heads=4, hidden_dim=4096, vocab_size=5120, share_embeddings=True)}
register_train_spec(TrainSpec(name="own", cls=Transformer, config=own_configs))
"""
FOUR = """
llama4_args = {
    "small": TransformerModelArgs(
        dim=768, n_layers=4, n_heads=12, n_kv_heads=4, vocab_size=5120, moe_args=MoEArgs(num_experts=8), rope_scaling_args=Scaling()
    ),
    "dense": TransformerModelArgs(dim=768, n_layers=4, n_heads=12, n_kv_heads=4, vocab_size=5120, interleave_moe_layer_step=100),
    "older": TransformerModelArgs(dim=768, n_layers=4, n_heads=12, n_kv_heads=4, vocab_size=5120, num_experts=8, use_shared_expert=True),
}
"""
LLAMA = 2 * 5120 * 1024 + 1024 + 6 * (1024 * 64 * (2 * 16 + 2 * 4) + 3 * 1024 * 4096 + 2 * 1024)
QWEN = 2 * 5120 * 512 + 512 + 6 * (512 * 64 * (2 * 8 + 2 * 2) + 2 * 64 + 3 * 512 * 384 * (16 + 1) + 16 * 512 + 2 * 512)
MLA = 512 * 4 * 192 + 512 * 576 + 512 + 512 * 4 * 256 + 4 * 128 * 512
OLDER = 2 * 5120 * 768 + 768 + 4 * (768 * 64 * (2 * 12 + 2 * 4) + 2 * 768)
FOURS = OLDER + 2 * 3 * 768 * 2048 + 2 * (3 * 768 * 1024 * (8 + 1) + 8 * 768)
"""llama4's blocks by hand: 2,048 inner channels, or half as many in each of a token's two experts."""
DEEPSEEK = 2 * 5120 * 512 + 512 + 5 * (MLA + 2 * 512) + 2 * 3 * 512 * 2048 + 3 * (3 * 512 * 256 * (8 + 2) + 8 * 512)


@pytest.mark.parametrize(
    ("model", "flavor", "registry", "parameters"),
    [
        ("llama3", "small", BLOCKS, LLAMA),
        ("qwen3", "3B-A1B", ONE_LAYER, QWEN),
        ("deepseek_v3", "small", LATENT, DEEPSEEK),
        ("deepseek_v3", "before", LATENT, DEEPSEEK - 5 * (2 * 512 * 4 * 64)),
        ("deepseek_v3", "added", LATENT, DEEPSEEK),
        ("deepseek_v3", "other", LATENT, None),
        ("llama4", "small", FOUR, FOURS),
        ("llama4", "older", FOUR, FOURS),
        ("llama4", "dense", FOUR, OLDER + 4 * 3 * 768 * 2048),
        ("llama3", "small", OTHER_FILE, LLAMA),
        ("own", "tied", OTHER_FILE, LLAMA - 5120 * 1024),
        ("own", "tied", OTHER_FILE.replace("llama3.model", "own.model"), None),
    ],
)
def test_registries_of_every_age_give_the_sizes_of_a_fork(tmp_path, model, flavor, registry, parameters):
    """Functions that build layers, a configuration of one layer, and arguments; totals by hand."""
    folder = tmp_path / "torchtitan/models" / model
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(registry)
    (folder / "sizes.py").write_text(BLOCKS)
    path = folder / "job.toml"
    path.write_text(f'[model]\nname = "{model}"\nflavor = "{flavor}"\n[training]\nlocal_batch_size = 1\nseq_len = 512\n')
    if parameters is None:
        with pytest.raises(MegaplanError, match=r"model\.flavor"):
            import_torchtitan(path.read_text(), str(path))
        return
    assert build_inventory(import_torchtitan(path.read_text(), str(path)).loaded.spec).parameters == parameters


@pytest.mark.parametrize(("stated", "width"), [("", 640), (", ffn_dim=512", 512)])
def test_a_width_that_a_forks_class_states_is_that_of_the_flavor(tmp_path, stated, width):
    folder = tmp_path / "torchtitan/models/llama3"
    folder.mkdir(parents=True)
    table = f'llama3_args = {{"tiny": Args(dim=256, n_layers=2, n_heads=4{stated})}}\n'
    (folder / "__init__.py").write_text(f"class Args:\n    vocab_size: int = 256\n    ffn_dim: int = 640\n{table}")
    path = folder / "job.toml"
    path.write_text('[model]\nname = "llama3"\nflavor = "tiny"\n[training]\nlocal_batch_size = 1\n')
    assert import_torchtitan(path.read_text(), str(path)).loaded.spec.model.mlp.ffn_hidden_size == width


def test_the_tokenizer_gives_the_vocabulary_of_a_flavor_that_states_none(tmp_path):
    """Tokens of a file of tiktoken with the reserved ones, of a tokenizer's JSON, and of a name."""
    folder = tmp_path / "torchtitan/models/llama3"
    folder.mkdir(parents=True)
    args = "class Args:\n    dim: int = 4096\n    vocab_size: int = -1  # defined later by tokenizer\n"
    (folder / "__init__.py").write_text(args + 'llama3_args = {"tiny": Args(dim=256, n_layers=2, n_heads=4)}\n')
    (tmp_path / "ranks.model").write_text("".join(f"YQ== {rank}\n" for rank in range(100)))
    (tmp_path / "own").mkdir()
    (tmp_path / "own/tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"content": "<s>"}]}))
    path = folder / "job.toml"
    for tokenizer, tokens in (("./ranks.model", 356), ("./own", 3), ("./Llama-3.1-8B/tokenizer.model", 128_256), ("./absent", 128_256)):
        path.write_text(f'[model]\nname = "llama3"\nflavor = "tiny"\ntokenizer_path = "{tokenizer}"\n[training]\nbatch_size = 1\n')
        assert import_torchtitan(path.read_text(), str(path)).loaded.spec.model.vocab_size == tokens
    job = '[model]\nname = "llama3"\nflavor = "8B"\ntokenizer_path = "./tests/assets/test_tiktoken.model"\n[training]\nbatch_size = 1\n'
    assert spec_of(job).model.vocab_size == 2256


@pytest.mark.parametrize(
    ("model", "parameters"),
    [("llama4/17bx16e", 107_769_861_120), ("llama4/17bx128e", 400_711_848_960), ("gpt_oss/20b", 20_914_757_184)],
)
def test_published_sizes_of_models_with_experts_in_some_blocks_or_biases(model, parameters):
    loaded = import_torchtitan("[training]\nlocal_batch_size = 1\n", "job.toml", gpus=8, model=model).loaded
    assert build_inventory(loaded.spec).parameters == parameters
    assert (loaded.spec.host.name == "megarun") == (model == "gpt_oss/20b")


@pytest.mark.parametrize(
    ("model", "nearest"),
    [
        ("deepseek_v3/671B_61layers_own", "deepseek_v3/671B"),
        ("deepseek_v3/12B", "deepseek_v3/16B"),
        ("deepseek_v3_own/16B", "deepseek_v3/16B"),
        ("llama3_ft/405B_long", "llama3/405B"),
        ("llama5/8B", "llama3/8B"),
        ("llama4/17bx128e_own", "llama4/17bx128e"),
        ("qwen3/9B", "qwen3/8B"),
        ("qwen3/30B-A3B_own", "qwen3/30B-A3B"),
        ("gpt_oss/22b", "gpt_oss/20b"),
        ("nothing_alike/0B", None),
    ],
)
def test_a_flavor_of_no_registry_is_one_error_whose_hints_fit_the_models_name(model, nearest):
    """The file has keys that are wrong for another model: experts, and stages for more blocks than Llama 3 has."""
    name, flavor = model.split("/")
    job = f'[model]\nname = "{name}"\nflavor = "{flavor}"\n[parallelism]\nexpert_parallel_degree = 2\npipeline_parallel_degree = 256\n'
    with pytest.raises(MegaplanError) as caught:
        import_torchtitan(job, "job.toml")
    (found,) = caught.value.diagnostics
    assert found.code == "MP916"
    *chosen, stated = [shlex.split(hint, comments=True) for hint in found.hints if hint.startswith("--")]
    assert chosen == ([["--model", nearest]] if nearest else [])
    plain = "[training]\nlocal_batch_size = 1\n"
    as_stated = import_torchtitan(plain, "job.toml", [stated[1]], gpus=8).loaded.spec
    assert as_stated.model == import_torchtitan(plain, "job.toml", gpus=8, model=nearest or "llama3/8B").loaded.spec.model


@pytest.mark.parametrize(
    ("model", "code", "hint"),
    [
        ("deepseek_v32/671B", "MP914", "megaplan estimate CONFIG.json --gpus 8"),
        ("DeepSeek-V3.2/671B", "MP914", "megaplan estimate CONFIG.json --gpus 8"),
        ("deepseek-ai/DeepSeek-V3.2-Exp", "MP916", "megaplan estimate deepseek-ai/DeepSeek-V3.2-Exp --gpus 8"),
        ("Qwen/Qwen3-8B", "MP916", "megaplan estimate Qwen/Qwen3-8B --gpus 8"),
        ("qwen3/9B", "MP916", "--model qwen3/8B"),
    ],
)
def test_a_published_name_is_estimated_and_an_unknown_flavor_has_its_nearest(model: str, code: str, hint: str) -> None:
    with pytest.raises(MegaplanError) as caught:
        import_torchtitan("[training]\nlocal_batch_size = 1\n", "job.toml", gpus=8, model=model)
    (found,) = caught.value.diagnostics
    assert (found.code, found.hints[0].partition("   #")[0]) == (code, hint)


def test_signs_and_case_of_a_models_name_do_not_matter() -> None:
    read = [import_torchtitan("[training]\nsteps = 1\n", "job.toml", gpus=8, model=name).loaded.spec for name in ("Qwen-3/8B", "qwen3/8B")]
    assert read[0] == read[1]
