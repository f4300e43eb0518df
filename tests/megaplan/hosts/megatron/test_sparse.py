"""Attention to chosen keys under Megatron-Core: GLM-5's models, the tensors of a layer, and layers that read another's choice."""

import json
from typing import Any

import pytest
from bridge_recipes.document import TABLE
from megatron_hybrid import DENSE_GPT, spec_of

import megaplan
from megaplan.errors import MegaplanError
from megaplan.exporters.megatron import export_megatron
from megaplan.exporters.values import Source
from megaplan.families.attention.section import Indexer
from megaplan.hosts.megatron.run import MegatronRun
from megaplan.hosts.megatron.sparse import choosing_period
from megaplan.importers.megatron.spec import import_megatron
from megaplan.inventory.build import build_inventory
from megaplan.layout.build import build_layout
from megaplan.partition.choose import choose_cuts

MLA = "kind: mla, num_heads: 128, q_lora_rank: 96, kv_lora_rank: 512, qk_nope_head_dim: 24, qk_rope_head_dim: 8, v_head_dim: 40"
INDEXER = "num_heads: 3, head_dim: 16, top_k: 100"
SPARSE = (*DENSE_GPT, f"model.attention={{{MLA}, indexer: {{{INDEXER}, layers: [0, 2, 4, 6, 8, 10, 12, 14]}}}}")
SHARED = (*DENSE_GPT, f"model.attention={{{MLA}, indexer: {{{INDEXER}, layers: [0, 2, 8], shared_layers: [4, 6, 10, 12, 14]}}}}")
GLM52 = (*DENSE_GPT, f"model.attention={{{MLA}, indexer: {{{INDEXER}, layers: [0, 2, 4, 12], shared_layers: [6, 8, 10, 14]}}}}")


def glm(name: str, **changes: Any) -> dict[str, Any]:
    """A job of a GLM-5 model as Megatron-Bridge states it."""
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    model: dict[str, Any] = {}
    for part in (*(table["bases"][base] for base in table["models"][name]["base"]), table["models"][name]):
        model |= {key: value for key, value in part.items() if key != "base"}
    model |= {"context_parallel_size": 32, "expert_model_parallel_size": 32, "seq_length": 131072}
    model |= {"dsa_kernel_backend": "cudnn", "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    model |= {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep", **changes}
    run = {"optimizer": {"optimizer": "adam", "bf16": True, "use_distributed_optimizer": True}, "mixed_precision": {"bf16": True}}
    return {"model": model, "train": {"micro_batch_size": 1, "global_batch_size": 4}, **run}


def test_glm_52_has_the_published_parameters_and_fewer_indexers_than_glm_51() -> None:
    found = {
        name: megaplan.estimate(import_megatron(json.dumps(glm(name)), "run.json", ["device.name=h100-sxm"], 32).document).parameters
        for name in ("glm51", "glm52")
    }
    indexer = 32 * 128 * 2048 + 128 * 6144 + 2 * 128 + 32 * 6144
    assert found == {"glm52": 743_377_000_704, "glm51": 743_377_000_704 + 57 * indexer}


def test_a_layer_keeps_wide_queries_one_key_and_the_gradients_of_its_indexer() -> None:
    run = MegatronRun(spec := spec_of(*SPARSE), build_inventory(spec))
    tokens, heads = 2 * 512, 128 // 2
    kept = run.operator("*").tensors
    assert kept["query"] == 2 * tokens * heads * (512 + 8)
    assert kept["key"] == 2 * tokens * (512 + 8)
    assert kept["latent"] == 2 * tokens * heads * 512
    assert kept["context"] == 2 * tokens * heads * 40
    assert kept["choice"] == 4 * tokens * (100 + 1)
    assert kept["indexer.gradients"] == 2 * tokens * (3 * 16 + 3 + 16)
    assert kept["indexer.input"] == 2 * tokens * (256 + 96)


def test_a_layer_that_reads_anothers_choice_has_no_indexer() -> None:
    run = MegatronRun(spec := spec_of(*GLM52), build_inventory(spec))
    own, shares = (run.operator_letter(layer) for layer in (4, 6))
    lost = {*run.operator(own).tensors} - {*run.operator(shares).tensors}
    assert lost == {"indexer.gradients", "indexer.input", "indexer.key", "indexer.stats"}
    assert run.operator(own).forward > run.operator(shares).forward
    sizes = [run.parameters(letter).elements(experts=False) for letter in (own, shares)]
    assert sizes[0] - sizes[1] == 3 * 16 * 96 + 16 * 256 + 2 * 16 + 3 * 256
    assert MegatronRun(spec, run.inventory).operator_letter(2) == own


def test_no_cut_parts_a_reader_from_the_layer_that_chose() -> None:
    """Megatron-Core's stages pass on the stream alone."""
    cut = "mesh.pp=2", "split.mode=manual", "split.reason=x", "split.spans=[[0, 8], [8, 16]]"
    text = r"MP331[\s\S]*cut 8 parts layer 10 from layer 4, whose choice of keys it reads, which the host does not send between stages"
    with pytest.raises(MegaplanError, match=text):
        spec_of(*GLM52, *cut)
    spec = spec_of(*GLM52, "mesh.pp=2", "split.mode=weighted")
    assert choose_cuts(spec, build_inventory(spec)).spans[0][1] not in range(5, 11)


@pytest.mark.parametrize(
    ("layers", "shared", "expected"),
    [
        ((0, 2, 4, 6), (), (1, 0)),
        ((0, 2, 4), (6,), (2, 3)),
        ((0, 4), (2, 6), (2, 1)),
        ((0,), (2, 4, 6), (4, 1)),
        ((0, 6), (2,), None),
        ((0, 4, 6), (2,), None),
    ],
)
def test_the_layers_that_choose_are_named_by_a_period_and_an_offset(
    layers: tuple[int, ...], shared: tuple[int, ...], expected: tuple[int, int] | None
) -> None:
    indexer = Indexer(num_heads=1, head_dim=8, layers=layers, shared_layers=shared)
    assert choosing_period(indexer, "ADADADAD") == expected


@pytest.mark.parametrize("overrides", [SPARSE, GLM52])
def test_a_launch_says_which_layers_choose(overrides: tuple[str, ...]) -> None:
    spec = spec_of(*overrides)
    inventory = build_inventory(spec)
    exported = export_megatron(Source(spec, inventory, build_layout(spec, inventory, choose_cuts(spec, inventory).spans)))
    assert not [loss for loss in exported.losses if "indexer" in loss.key]
    back = import_megatron(exported.text, "launch.sh").loaded.spec
    assert back.model.attention == spec.model.attention


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (SHARED, "which are not the first attention layers and every n-th"),
        ((*SPARSE, "model.attention.kv_lora_rank=256"), "but the kernels support only 512"),
        ((*SPARSE, "model.attention.num_heads=24"), "12 heads on a rank"),
        ((*SPARSE, "host.recompute_modules=[core_attn]"), "core_attn that are recomputed"),
        ((*SPARSE, "precision.recipe.name=mxfp8"), "precision.recipe"),
        ((*SPARSE, "host.model=hybrid"), "host.model = hybrid"),
    ],
)
def test_what_is_not_priced_is_refused(overrides: tuple[str, ...], said: str) -> None:
    with pytest.raises(MegaplanError) as error:
        spec_of(*overrides)
    assert [said in each.detail for each in error.value.diagnostics if each.code == "MP902"] == [True]


def test_a_launch_without_kernels_or_with_a_loss_of_all_keys_is_refused() -> None:
    plain = glm("glm51", dsa_kernel_backend="none", dsa_indexer_use_sparse_loss=False)
    with pytest.raises(MegaplanError) as error:
        import_megatron(json.dumps(plain), "run.json", ["device.name=h100-sxm"], 32)
    found = {each.detail.split()[0] for each in error.value.diagnostics if each.code == "MP914"}
    assert found == {"--dsa-kernel-backend", "--dsa-indexer-use-sparse-loss"}


def test_a_chunk_without_layers_has_nothing_to_run_again() -> None:
    split = {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Et*40|t*37||tL"}
    found = import_megatron(json.dumps(glm("glm51", **split)), "run.json", ["device.name=h100-sxm"], 64)
    assert megaplan.estimate(found.document).peak_bytes > 0
