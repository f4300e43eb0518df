"""Rows of the table whose tensors are not priced: features that a spec names, and arguments that stop an import unless they are off."""

from collections.abc import Iterator

from megaplan.hosts.megatron.argument import Argument, feature, only


def _off(note: str, **defaults: object) -> Iterator[Argument]:
    """Arguments of which only their default is accepted."""
    return (only(name, default, default, note, touches="parameters, activations") for name, default in defaults.items())


REFUSED = (
    feature("optimizer_cuda_graph", "optimizer_cuda_graph", "a graph of the optimizer's step"),
    feature("export_kd_teacher_load", "distillation", "a teacher model"),
    feature("export_kd_cfg", "distillation", "a teacher model"),
    feature("logits_load_dir", "distillation", "logits of a teacher model"),
    *_off("router and mask tensors of elastic training", flextron=None, enable_router=None),
    *_off("another activation than swiglu, squared ReLU and GELU", openai_gelu=False),
    *_off("a norm of queries and keys without weights", qk_l2_norm=False),
    *_off("layers that differ in their dimensions", heterogeneous_layers_config_path=None, heterogeneous_layers_config_encoded_json=None),
    *_off("an encoder in addition to the decoder", encoder_num_layers=None, decoder_num_layers=None),
    *_off("several residual streams", enable_mhc_connections=False),
    *_off("the residual stream in fp32", fp32_residual_connection=False),
    *_off("PyTorch's FSDP2 in the place of the distributed optimizer", use_torch_fsdp2=False),
    *_off("layers that are not trained", freeze_all_layers=False),
    *_off("reinforcement learning: a rollout engine in addition to the trainer", perform_rl_step=False),
    *_off("low-rank adapters", lora_rank=None),
    *_off("quantised recipes by layer", te_precision_config_file=None, kitchen_config_file=None, kitchen_recipe_number=None),
    *_off("logits in another type", fp16_lm_cross_entropy=False, output_logit_dtype=None),
    *_off("prediction modules on a separate stage", mtp_standalone=False),
    *_off("MLPs that run in pieces", mlp_chunks_for_training=1),
    *_off("another library's attention", use_kitchen_attention=False),
    *_off("another size of Megatron-FSDP's gather units", enable_full_sharding_in_hsdp=False),
    *_off("tokens in addition to the tokenizer's", vocab_extra_ids=0),
    *_off("another optimizer of vectors and embeddings", muon_scalar_optimizer="adam"),
    *_off("a degree of context parallelism that changes with the batch", hybrid_context_parallel=False),
    *_off("gradients of some parameters in fp32", ddp_param_name_patterns_for_fp32_local_accumulation=None),
    *_off("weights sharded over tp and gathered", tensor_parallel_num_weight_shards=None, expert_tensor_parallel_num_weight_shards=None),
    *_off("a configuration file in the place of arguments; give that file", yaml_cfg=None),
)
