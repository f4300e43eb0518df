"""Keys of a MaxText configuration: keys that are read, with the defaults of base.yml, and keys with only one priced value.

Source: `src/maxtext/configs/base.yml`, AI-Hypercomputer/maxtext at e591f30c.
"""

from typing import Any

from megaplan.hosts.maxtext.policies import TENSORS
from megaplan.importers.maxtext.model import DEFAULTS as OF_MODEL

AXES = ("data", "fsdp", "fsdp_transpose", "context", "tensor", "expert", "pipeline")
"""Axes of the mesh of devices that are priced; each has a degree inside a slice (ici) and one over slices (dcn)."""
OTHER_AXES = (
    "diloco", "sequence", "tensor_transpose", "tensor_sequence", "context_autoregressive", "context_usp_ulysses", "autoregressive",
)  # fmt: skip
SCALE = "global_parameter_scale"
SLICE, SLICES = "compile_topology", "compile_topology_num_slices"
DEFAULTS: dict[str, Any] = {
    **OF_MODEL, **{f"ici_{axis}_parallelism": 1 for axis in AXES}, **{f"dcn_{axis}_parallelism": 1 for axis in AXES},
    "ici_fsdp_parallelism": -1, "dcn_data_parallelism": -1, "model_name": "default", "run_name": "", "per_device_batch_size": 12.0,
    "max_target_length": 2048, "gradient_accumulation_steps": 1, "num_layers_per_pipeline_stage": 1, "num_pipeline_microbatches": -1,
    "pipeline_fsdp_ag_once": False, "dtype": "bfloat16", "weight_dtype": "float32", "grad_dtype": "float32", "mu_dtype": "",
    "quantization": "", "opt_type": "adamw", "remat_policy": "full", **dict.fromkeys(TENSORS, "remat"), "decoder_layer_input": "device",
    "scan_layers": True, "attention": "autoselected", "num_vocab_tiling": 1, "optimizer_memory_host_offload": False, "hardware": "tpu",
    SLICE: "", SLICES: -1, "steps": 150001, "learning_rate": 3e-5, "adam_weight_decay": 0.1, "gradient_clipping_threshold": 1.0,
    "lr_schedule_type": "cosine", "learning_rate_schedule_steps": -1, "warmup_steps_fraction": 0.1, "learning_rate_final_fraction": 0.1,
    "wsd_decay_steps_fraction": 0.1, "init_weights_seed": 0, SCALE: 1,
}  # fmt: skip
"""Keys that are read, with MaxText's defaults."""
OF_TRAINING = frozenset({
    "steps", "learning_rate", "adam_weight_decay", "gradient_clipping_threshold", "lr_schedule_type", "learning_rate_schedule_steps",
    "warmup_steps_fraction", "learning_rate_final_fraction", "wsd_decay_steps_fraction", "init_weights_seed",
})  # fmt: skip
"""Keys that are read, and on which neither bytes nor time depend."""
IGNORED = frozenset({"data_shuffle_seed", "learning_rate_schedule_steps", "wsd_decay_style", "dataset_type", "enable_checkpointing"})
"""Keys that are known to change nothing that is priced."""
FORKS = ("exp_class", "dense_conn", "pre_compose", "post_compose", "use_kv_shift", "mix_attn")
"""Keys of forks that choose layers, or a class with the sizes (hilbertmeng/maxtext)."""
REFUSED: dict[str, tuple[Any, str]] = {
    **{f"{kind}_{axis}_parallelism": (1, "the axis is not priced") for axis in OTHER_AXES for kind in ("ici", "dcn")},
    "mtp_num_layers": (0, "prediction layers are not priced"),
    "parameter_memory_host_offload": (False, "parameters in host memory are not priced"),
    "shard_optimizer_over_data": (False, "state that is sharded over copies is not priced"),
    "pipeline_parallel_layers": (-1, "stages of some of the layers are not priced"),
    "use_multimodal": (False, "encoders are not priced"),
    "use_audio": (False, "encoders are not priced"),
    "engram_layers": ([], "tables of engrams are not priced"),
    "mhc_expansion_rate": (1, "several residual streams are not priced"),
    "num_kv_shared_layers": (0, "layers that share keys and values are not priced"),
    "hidden_size_per_layer_input": (0, "embeddings of each layer are not priced"),
    **dict.fromkeys(FORKS, (None, "a fork's own layers and sizes are not priced")),
    "custom_mesh_and_rule": ("", "other rules of sharding are not priced"),
}
"""Keys that decide bytes or time, and the one value that is priced, with the reason."""
