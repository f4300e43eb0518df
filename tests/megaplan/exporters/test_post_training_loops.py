"""Plans of post-training as configurations of verl and NeMo-RL: every number of the plan is in them, and the rest is reported."""

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from megaplan.errors import MegaplanError
from megaplan.exporters.nemo_rl import export_nemo_rl
from megaplan.exporters.values import Exported, Source
from megaplan.exporters.verl import export_verl
from megaplan.inventory.build import build_inventory
from megaplan.layout.build import build_layout
from megaplan.partition.choose import choose_cuts
from megaplan.spec.load import load_spec

PLANS = Path(__file__).parents[3] / "plans"
RL = "llama-3.1-8b-rl.yaml"
SECTION = (
    "post_training={kind: rl, prompts: 64, samples: 8, rollout: {prompt: 100, response: 700, tp: 2, max_sequences: 96, sleep: 1}, "
    "policy: {updates: 2, packing: false}, offload: [parameters, optimizer]}"
)
FSDP = ("mesh={dp_shard: 8}", "host={name: megarun}", "schedule={kind: 1f1b, num_microbatches: 4}", SECTION)
SPLIT = ("post_training.placement=split", "post_training.staleness=1", "post_training.offload=[]", "post_training.rollout.gpus=16")


def source(*changes: str, plan: str = RL) -> Source:
    spec = load_spec(str(PLANS / plan), changes).spec
    inventory = build_inventory(spec)
    return Source(spec, inventory, build_layout(spec, inventory, choose_cuts(spec, inventory).spans))


def overrides(exported: Exported) -> dict[str, str]:
    """Hydra's overrides of a script."""
    words = shlex.split(exported.text.replace("\\\n", ""), comments=True)
    return dict(word.lstrip("+").split("=", 1) for word in words if "=" in word and not word.startswith("--"))


def lost(exported: Exported) -> set[str]:
    return {loss.key for loss in exported.losses if loss.strict}


def test_the_committed_plan_is_a_start_of_verl_on_megatron() -> None:
    exported = export_verl(source())
    found = overrides(exported)
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    assert lost(exported) == set()
    assert "--config-name=ppo_megatron_trainer" in exported.text
    assert int(found["data.train_batch_size"]) == 4 * int(found[f"{actor}.ppo_mini_batch_size"]) == 64
    assert int(found["data.max_prompt_length"]) + int(found["data.max_response_length"]) == int(found[f"{rollout}.max_model_len"]) == 4096
    assert found[f"{rollout}.n"] == "32"
    assert found[f"{rollout}.gpu_memory_utilization"] == "0.6"
    assert (
        found[f"{actor}.megatron.pipeline_model_parallel_size"]
        == found["actor_rollout_ref.ref.megatron.pipeline_model_parallel_size"]
        == "2"
    )
    ends = [int(found[f"{actor}.megatron.override_transformer_config.num_layers_in_{end}_pipeline_stage"]) for end in ("first", "last")]
    assert ends == [sum(letter == "A" for letter in stage) for stage in source().stages]
    assert sum(ends) == 32
    assert (found["trainer.nnodes"], found["trainer.n_gpus_per_node"]) == ("2", "8")
    assert {found[f"{actor}.megatron.{part}_offload"] for part in ("param", "grad", "optimizer")} == {"True"}


def test_the_committed_plan_is_a_configuration_of_nemo_rl() -> None:
    exported = export_nemo_rl(source())
    found: dict[str, Any] = yaml.safe_load(exported.text)
    policy = found["policy"]
    assert lost(exported) == set()
    assert policy["train_global_batch_size"] * 4 == found["grpo"]["num_prompts_per_step"] * found["grpo"]["num_generations_per_prompt"]
    assert policy["sequence_packing"] == {"enabled": True, "train_mb_tokens": 4096, "logprob_mb_tokens": 4096}
    assert policy["megatron_cfg"]["pipeline_model_parallel_size"] == 2
    assert policy["megatron_cfg"]["num_layers_in_first_pipeline_stage"] + policy["megatron_cfg"]["num_layers_in_last_pipeline_stage"] == 32
    assert policy["generation"]["max_new_tokens"] == 3966
    assert found["cluster"] == {"gpus_per_node": 8, "num_nodes": 2}


def test_a_plan_on_one_stage_runs_on_fsdp2() -> None:
    """Sequences that are not packed are rows, and parts that are not moved stay."""
    given = source(*FSDP)
    found = overrides(export_verl(given))
    actor = "actor_rollout_ref.actor"
    assert found[f"{actor}.strategy"] == "fsdp2"
    assert found[f"{actor}.ppo_micro_batch_size_per_gpu"] == "1"
    assert f"{actor}.use_dynamic_bsz" not in found
    assert found[f"{actor}.fsdp_config.fsdp_size"] == "8"
    assert found["actor_rollout_ref.rollout.max_num_seqs"] == "96"
    assert found[f"{actor}.use_kl_loss"] == "False"
    exported = export_nemo_rl(given)
    document = yaml.safe_load(exported.text)
    assert document["policy"]["dtensor_cfg"]["enabled"]
    assert not document["policy"]["megatron_cfg"]["enabled"]
    assert document["policy"]["generation"]["vllm_kwargs"] == {"max_num_seqs": 96}
    assert document["loss_fn"]["reference_policy_kl_penalty"] == 0
    assert "post_training.offload" in lost(exported), "NeMo-RL moves gradients, too"


def test_split_pools_have_nodes_of_their_own() -> None:
    given = source(*SPLIT)
    found = overrides(export_verl(given))
    assert found["actor_rollout_ref.hybrid_engine"] == "False"
    assert (found["trainer.nnodes"], found["rollout.nnodes"]) == ("2", "2")
    assert "-m verl.experimental.one_step_off_policy.main_ppo --config-name=one_step_off_ppo_megatron_trainer" in export_verl(given).text
    document = yaml.safe_load(export_nemo_rl(given).text)
    assert document["cluster"]["num_nodes"] == 4
    assert document["policy"]["generation"]["colocated"] == {"enabled": False, "resources": {"gpus_per_node": 8, "num_nodes": 2}}
    assert document["grpo"]["async_grpo"]["enabled"]
    assert document["policy"]["generation"]["vllm_cfg"]["async_engine"]
    one_node = source(*FSDP[:-1], "mesh.dp_shard=4", *SPLIT[:-1], "post_training.rollout.gpus=4")
    document = yaml.safe_load(export_nemo_rl(one_node).text)
    assert document["cluster"] == {"gpus_per_node": 8, "num_nodes": 1}
    assert document["policy"]["generation"]["colocated"]["resources"] == {"gpus_per_node": 4, "num_nodes": None}


def test_log_probabilities_are_those_of_the_rollout_or_computed_again() -> None:
    """verl's loop of pools takes the rollout's by default; NeMo-RL takes them with one update, and else computes its own."""
    for changes, bypass in (((), None), (("post_training.policy.log_probs=false",), "True"), (SPLIT, "False")):
        assert overrides(export_verl(source(*changes))).get("algorithm.rollout_correction.bypass_mode") == bypass
    for changes, forced in (((), False), (("post_training.policy.log_probs=false", "post_training.policy.updates=1"), True)):
        assert yaml.safe_load(export_nemo_rl(source(*changes)).text)["loss_fn"]["force_on_policy_ratio"] is forced


@pytest.mark.parametrize(
    ("changes", "of_verl", "of_nemo"),
    [
        (("post_training.rollout.engine=sglang",), set(), {"post_training.rollout.engine"}),
        (("post_training.critic={}",), set(), {"post_training.critic"}),
        (("post_training.policy.updates=3",), {"post_training.policy.updates"}, set()),
        (("post_training.policy.log_probs=false",), set(), {"post_training.policy.log_probs"}),
        (("post_training.rollout.kv_dtype=fp8",), {"post_training.rollout.kv_dtype"}, {"post_training.rollout.kv_dtype"}),
        (("optimizer.matrix=muon", "host.precision_aware_optimizer=false"), {"optimizer.matrix"}, {"optimizer.matrix"}),
        (("mesh.vpp=2", "schedule.kind=interleaved_1f1b"), {"split"}, {"mesh.vpp", "split"}),
        ((*SPLIT[:1], *SPLIT[2:]), {"post_training.staleness"}, set()),
    ],
)
def test_settings_that_a_loop_lacks_are_reported(changes: tuple[str, ...], of_verl: set[str], of_nemo: set[str]) -> None:
    given = source(*changes)
    assert (lost(export_verl(given)), lost(export_nemo_rl(given))) == (of_verl, of_nemo)


def test_a_spec_without_the_section_is_refused() -> None:
    for export in (export_verl, export_nemo_rl):
        with pytest.raises(MegaplanError, match="has no section post_training"):
            export(source(plan="llama-3.1-8b.yaml"))
