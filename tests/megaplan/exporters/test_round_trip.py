"""A spec, exported to Megatron's arguments and imported again, is the spec it was."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megaplan.exporters.megatron import export_megatron
from megaplan.exporters.values import Source
from megaplan.hosts.megatron.pattern import parse_hybrid
from megaplan.importers.megatron.spec import REASON, import_megatron
from megaplan.inventory.build import build_inventory
from megaplan.layout.build import build_layout
from megaplan.partition.choose import choose_cuts
from megaplan.spec.load import load_spec, load_spec_text
from megaplan.spec.low_precision_rules import SCALED_TWICE, widths
from megaplan.spec.models import Spec

ATTENTION = st.fixed_dictionaries(
    {
        "kind": st.just("gqa"),
        "num_heads": st.just(8),
        "num_kv_heads": st.sampled_from([2, 4, 8]),
        "head_dim": st.sampled_from([16, 32]),
        "qk_norm": st.booleans(),
        "bias": st.booleans(),
        "window_size": st.sampled_from([None, 64]),
        "rope_theta": st.sampled_from([10000.0, 500000.0, 12345.5]),
    }
) | st.fixed_dictionaries(
    {
        "kind": st.just("mla"),
        "num_heads": st.just(8),
        "q_lora_rank": st.sampled_from([None, 32]),
        "kv_lora_rank": st.just(16),
        "qk_nope_head_dim": st.just(16),
        "qk_rope_head_dim": st.just(8),
        "v_head_dim": st.just(24),
    }
)
MAMBA = st.fixed_dictionaries(
    {
        "kind": st.just("mamba2"),
        "num_heads": st.sampled_from([None, 8, 16]),
        "head_dim": st.sampled_from([16, 32]),
        "state_dim": st.sampled_from([16, 128]),
        "num_groups": st.sampled_from([2, 4]),
        "chunk_size": st.just(128),
    }
)
RATES = st.one_of(
    st.fixed_dictionaries({"kind": st.just("constant"), "warmup_steps": st.integers(0, 50)}),
    st.fixed_dictionaries(
        {"kind": st.just("cosine"), "warmup_steps": st.integers(0, 50), "final_fraction": st.sampled_from([0.0, 0.1, 0.25])}
    ),
    st.fixed_dictionaries(
        {
            "kind": st.just("wsd"),
            "warmup_steps": st.integers(0, 50),
            "decay_steps": st.integers(1, 100),
            "decay": st.sampled_from(["linear", "sqrt"]),
            "final_fraction": st.sampled_from([0.0, 0.1]),
        }
    ),
)


@st.composite
def hosts(draw: Any, hybrid: bool, muon: bool) -> dict[str, Any]:
    full = draw(st.booleans())
    aware = not muon and draw(st.booleans())
    return {
        "name": "megatron",
        "model": "hybrid" if hybrid else "gpt",
        "attention_backend": draw(st.sampled_from(["flash", "fused"])),
        "cross_entropy": draw(st.sampled_from(["unfused", "native", "te"])),
        "wgrad_fusion": draw(st.booleans()),
        "attention_mask": draw(st.booleans()),
        "hidden_dropout": draw(st.sampled_from([0.0, 0.1])),
        "attention_dropout": draw(st.sampled_from([0.0, 0.1])),
        "cublas_workspace_kib": draw(st.sampled_from([None, 8192, 32768])),
        "distributed_optimizer": aware or draw(st.booleans()),
        "precision_aware_optimizer": aware,
        **(draw(optimizers()) if aware else {}),
        "optimizer": "adam" if aware or muon else draw(st.sampled_from(["adam", "adam", "lion", "sgd"])),
        "recompute_modules": []
        if full
        else draw(st.lists(st.sampled_from(["layernorm", "mla_up_proj", "moe_act"]), unique=True).map(sorted)),
        "recompute_num_layers": draw(st.integers(1, 3)) if full else None,
        "recompute_method": draw(st.sampled_from(["uniform", "block"])) if full else "uniform",
        "tp_comm_overlap": draw(st.booleans()),
        "deterministic_mode": draw(st.booleans()),
    }


@st.composite
def optimizers(draw: Any) -> dict[str, Any]:
    """Keys of the precision-aware optimizer."""
    return {
        "exp_avg_sq_dtype": draw(st.sampled_from([None, "fp16", "fp8"])),
        "optimizer_offload": draw(st.sampled_from([None, 0.5, 1.0])),
    }


@st.composite
def implementations(draw: Any, windowed: bool) -> dict[str, Any]:
    """Megatron's own modules, or Transformer Engine's with 8-bit linears or without."""
    if not windowed and draw(st.booleans()):
        return {"transformer_impl": "local", "attention_backend": "unfused"}
    graphs = draw(st.sampled_from([None, "layers", "iteration"]))
    modules = draw(st.sampled_from([[], ["attn"], ["mamba", "mlp"]])) if graphs == "layers" else []
    return {
        "cuda_graphs": graphs,
        "cuda_graph_modules": modules,
        "offload_modules": draw(st.sampled_from([[], ["core_attn", "attn_proj"], ["expert_fc1"]])),
        "delayed_wgrad": draw(st.booleans()),
        "deferred_head_microbatches": draw(st.sampled_from([None, 22])),
    }


@st.composite
def recipes(draw: Any, host: dict[str, Any], layer: int, num_layers: int) -> dict[str, Any] | None:
    """A low-precision recipe, or none; `layer` letters are one of Megatron's layers."""
    names = ["fp8_current", "mxfp8", "nvfp4", *(["fp8_delayed"] if not set(SCALED_TWICE) & set(host["recompute_modules"]) else [])]
    name = draw(st.sampled_from([None, *names]))
    if name is None or host.get("transformer_impl") == "local":
        return None
    low = host["precision_aware_optimizer"] and (host["optimizer_offload"] or name == "nvfp4")
    gathered = draw(st.booleans()) and host["distributed_optimizer"] and not low
    found = {"name": name, "param_gather": gathered, "attention": draw(st.booleans()), "prediction": draw(st.booleans())}
    if name == "fp8_delayed":
        return {**found, "amax_history": draw(st.sampled_from([16, 1024]))}
    most = int(num_layers >= 2 * layer)
    ends = [layer * draw(st.integers(0, most)), layer * draw(st.integers(0, most))]
    formats = {} if name == "nvfp4" else {"format": draw(st.sampled_from([None, "e4m3" if name == "fp8_current" else "hybrid"]))}
    return {**found, **formats, "first_last_bf16": ends, "head": name == "mxfp8" and draw(st.booleans())}


@st.composite
def positions(draw: Any, attention: dict[str, Any], letters: str, bias: bool) -> dict[str, Any]:
    """Draws the settings of positions in the model; sets biases and rotated widths of its attention too."""
    latent = attention["kind"] == "mla"
    if latent:
        attention["latent_norm"] = draw(st.booleans())
    if bias:
        attention |= {"output_bias": True} if latent else {"bias": True, "output_bias": True}
    kind = draw(st.sampled_from(["rope", "none"] if latent else ["rope", "partial", "none", "learned"]))
    if kind == "partial":
        attention["rotary_dim"] = attention["head_dim"] // 4
    if kind in ("rope", "partial") and not latent and (scaling := draw(st.sampled_from(["llama3", "linear", None]))):
        attention["rope_scaling"] = {"kind": scaling, "factor": draw(st.sampled_from([8.0, 32.0, 1.5]))}
    if kind in ("rope", "partial"):
        return {}
    attention["nope_layers"] = [index for index, letter in enumerate(letters) if letter == "A"]
    return {"learned_positions": 4096} if kind == "learned" else {}


def modules(letters: str) -> st.SearchStrategy[str]:
    """Blocks of a prediction module behind these layers, with an MLP or one bank of experts, whose width a launch then states."""
    some = st.text(alphabet="".join(sorted({*letters, "D"})), min_size=1, max_size=4)
    return some.filter(lambda drawn: drawn.count("E") <= 1 and not {"D", "E"}.isdisjoint(drawn))


@st.composite
def specs(draw: Any) -> dict[str, Any]:
    """Keys that a spec and Megatron's arguments can both express, in the form that an import writes."""
    hybrid = draw(st.booleans())
    pp = draw(st.sampled_from([1, 2]))
    vpp = draw(st.sampled_from([1, 2])) if pp > 1 else 1
    unit = (
        st.text(alphabet="AMED", min_size=1, max_size=5)
        if hybrid
        else st.lists(st.sampled_from(["AD", "AE"]), min_size=1, max_size=3).map("".join)
    )
    stages = draw(st.lists(unit, min_size=pp * vpp, max_size=pp * vpp))
    letters = "".join(stages)
    muon, tp = draw(st.booleans()), draw(st.sampled_from([1, 2]))
    host = draw(hosts(hybrid, muon))
    activation = draw(st.sampled_from(["swiglu", "relu2", "gelu"]))
    model: dict[str, Any] = {
        "pattern": "|".join(stages),
        "num_layers": len(letters),
        "hidden_size": 128,
        "vocab_size": draw(st.sampled_from([512, 1000])),
        "tie_embeddings": draw(st.booleans()),
        "norm_eps": draw(st.sampled_from([1e-5, 1e-6])),
    }
    mtp = "A" in letters and draw(st.booleans())
    bias = draw(st.booleans())
    biased = {"bias": True} if bias else {}
    model["norm"] = draw(st.sampled_from(["rmsnorm", "layernorm"]))
    if "A" in letters:
        model["attention"] = draw(ATTENTION)
        model |= draw(positions(model["attention"], letters, bias))
    if "M" in letters:
        model["mamba"] = draw(MAMBA)
    if "E" in letters:
        model["moe"] = {
            "num_experts": 8,
            "top_k": draw(st.integers(1, 4)),
            "ffn_hidden_size": draw(st.sampled_from([64, 96])),
            "shared_ffn_hidden_size": draw(st.sampled_from([0, 64])),
            "activation": activation,
            **biased,
            "normalize_top_k": draw(st.booleans()),
            "capacity_factor": draw(st.sampled_from([None, 1.5])),
            "balance_loss_coefficient": draw(st.sampled_from([0.0, 0.01])),
            "z_loss_coefficient": draw(st.sampled_from([0.0, 0.001])),
        }
        host |= {"moe_dispatcher": draw(st.sampled_from(["allgather", "alltoall", "flex"])), "moe_grouped_gemm": draw(st.booleans())}
        host |= {"moe_shared_overlap": draw(st.booleans())}
        host |= {"moe_permute_fusion": draw(st.booleans()), "moe_router_dtype": draw(st.sampled_from([None, "fp32", "fp64"]))}
        kinds = ["aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn"] + ["none"] * (not model["moe"]["balance_loss_coefficient"])
        host["moe_load_balancing"] = draw(st.sampled_from(kinds))
        if host["moe_dispatcher"] == "flex":
            host["moe_flex_backend"] = draw(st.sampled_from(["deepep", "hybridep"]))
    if "D" in letters:
        model["mlp"] = {"ffn_hidden_size": 192, "activation": activation, **biased}
    if mtp:
        ahead = draw(modules(letters)) if hybrid else "AE" if letters[-1] == "E" else "AD"
        width = 192 if "D" in ahead or "moe" not in model else model["moe"]["ffn_hidden_size"]
        module = {"depth": draw(st.integers(1, 2)), "ffn_hidden_size": width, "activation": activation, "normed_input": True}
        module |= {"experts": ahead == "AE"} if ahead in ("AD", "AE") else {"pattern": ahead}
        module |= {"bias": True} if bias and "D" in ahead else {}
        model["features"] = {"mtp": module}
    if tp > 1 and "E" not in letters:
        host["sequence_parallel"] = draw(st.booleans())
    host |= draw(implementations(windowed=(model.get("attention") or {}).get("window_size") is not None))
    host["moe_grouped_gemm"] = host.get("moe_grouped_gemm", False) and host.get("transformer_impl") != "local"
    params = "bf16" if muon else draw(st.sampled_from(["bf16", "fp16"]))
    grads = draw(st.sampled_from(["fp32", params]))
    moments = draw(st.sampled_from(["fp32", "bf16"])) if host["precision_aware_optimizer"] else "fp32"
    experts = "E" in letters
    replicas = draw(st.sampled_from([1, 2]))
    plain = not (hybrid or mtp or muon or host["precision_aware_optimizer"]) and host["distributed_optimizer"]
    fsdp = plain and set(letters) == {"A", "D"} and (pp, replicas, grads) == (1, 1, "fp32") and draw(st.booleans())
    core = host["recompute_num_layers"] is None and "A" in letters and draw(st.booleans())
    document: dict[str, Any] = {
        "format": "megaplan.spec/1",
        "name": "launch",
        "device": {"name": "b200"},
        "model": model,
        "mesh": {
            "pp": pp,
            "vpp": vpp,
            "dp_replicate": replicas,
            "dp_shard": 4,
            "cp": draw(st.sampled_from([1, 2])) if "A" in letters else 1,
            "tp": tp,
            "ep": draw(st.sampled_from([1, 2])) if experts else 1,
            "etp": draw(st.sampled_from([1, 2])) if experts else 1,
            "vocab_parallel": tp > 1,
        },
        "schedule": {"kind": "interleaved_1f1b" if vpp > 1 else "1f1b", "num_microbatches": 4},
        "batch": {"micro_batch_size": draw(st.integers(1, 2)), "seq_length": 256},
        "precision": {"params": params, "grads": grads, "master": "fp32", "moments": moments, "reduce": grads},
        "optimizer": {"matrix": "muon" if muon else "adamw", "newton_schulz_steps": draw(st.integers(4, 6))},
        "host": host,
        **({"sharding": {"reshard_after_forward": True}} if fsdp else {}),
        **({"recompute": {"blocks": {"A": "selective"}}} if core else {}),
        **({"split": {"mode": "manual", "reason": REASON}} if len(stages) > 1 else {}),
        "training": {
            "steps": 1000,
            "seed": draw(st.integers(1, 9)),
            "learning_rate": draw(st.sampled_from([1e-3, 3e-4])),
            "weight_decay": draw(st.sampled_from([0.0, 0.1])),
            "gradient_clip": draw(st.sampled_from([None, 1.0])),
            "rate_schedule": draw(RATES),
        },
    }
    whole = all(width % 32 == 0 for _, _, width in widths(Spec.model_validate(document)))
    if not fsdp and whole and (recipe := draw(recipes(host, 1 if hybrid else 2, len(letters)))) is not None:
        document["precision"]["recipe"] = recipe
    return document


def source_of(spec: Spec) -> Source:
    inventory = build_inventory(spec)
    return Source(spec, inventory, build_layout(spec, inventory, choose_cuts(spec, inventory).spans))


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(specs())
def test_a_spec_survives_megatrons_arguments(document: dict[str, Any]) -> None:
    spec = load_spec_text(yaml.safe_dump(document), "launch.yaml").spec
    exported = export_megatron(source_of(spec))
    assert exported.losses == ()
    assert import_megatron(exported.text, "launch.sh", ["device.name=b200"]).loaded.spec == spec


def test_every_node_of_a_launch_has_as_many_processes() -> None:
    """Twelve ranks on nodes of eight devices are two times six, not two times eight."""
    document = {**LAUNCHED, "mesh": {"dp_shard": 12}}
    exported = export_megatron(source_of(load_spec_text(yaml.safe_dump(document), "launch.yaml").spec))
    assert "torchrun --nnodes 2 --nproc-per-node 6 " in exported.text
    assert import_megatron(exported.text, "launch.sh").loaded.spec.mesh.dp_shard == 12


def test_a_dense_prediction_module_behind_experts_is_told_as_lost() -> None:
    model = {**LAUNCHED["model"], "pattern": "ADAE", "features": {"mtp": {"depth": 1, "ffn_hidden_size": 192}}}
    model |= {
        "mlp": {"ffn_hidden_size": 192, "activation": "relu2"},
        "moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 64, "activation": "relu2"},
    }
    exported = export_megatron(source_of(load_spec_text(yaml.safe_dump({**LAUNCHED, "model": model}), "launch.yaml").spec))
    assert {"model.features.mtp", "model.features.mtp.normed_input"} <= {loss.key for loss in exported.losses}


LAUNCHED: dict[str, Any] = {
    "format": "megaplan.spec/1",
    "name": "launch",
    "model": {
        "pattern": "ADAD",
        "num_layers": 4,
        "hidden_size": 128,
        "vocab_size": 512,
        "attention": {"kind": "gqa", "num_heads": 8, "num_kv_heads": 4, "head_dim": 16},
        "mlp": {"ffn_hidden_size": 192},
    },
    "batch": {"micro_batch_size": 1, "seq_length": 256},
    "schedule": {"num_microbatches": 4},
    "host": {"name": "megatron", "model": "gpt"},
}

PLANS_DIR = Path(__file__).parents[3] / "plans"
PLANS = ("llama-3.1-8b", "mamba-codestral-7b", "mixtral-8x7b", "nam56r-8xh200", "nam56r-8xh200-equal", "tiny-hybrid", "tiny-hybrid-pp2")


@pytest.mark.parametrize("name", PLANS)
def test_a_shipped_plan_gives_a_pattern_of_its_stages(name: str) -> None:
    source = source_of(load_spec(str(PLANS_DIR / f"{name}.yaml")).spec)
    text = export_megatron(source).text
    (line,) = [line for line in text.splitlines() if "--hybrid-layer-pattern" in line]
    found = parse_hybrid(line.split(" ", 3)[3].removesuffix(" \\").strip("'"))
    assert [len(stage) for stage in found.segments] == [slot.stop - slot.start for slot in source.slots()]
    assert found.main == "".join({"A": "*", "D": "-", "R": "G"}.get(letter, letter) for letter in source.letters).replace(
        "*", "+" if "+" in found.main else "*"
    )
