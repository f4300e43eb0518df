"""Peaks of stacks of attention with Triton kernels: estimate and trace both count what the kernels hold inside themselves."""

from typing import Any

import pytest
from trace_checks import compare_passes

from megakernels.ops.attention.flash4.facts import backward_bytes
from megaplan.columns import Column, Phase
from megaplan.devices import load_device
from megarun.trace.compare import RankComparison

pytestmark = [pytest.mark.runtime, pytest.mark.requirement("R-58")]
BF16 = dict.fromkeys(("params", "grads", "master", "moments", "reduce"), "bf16")
SECTIONS: dict[str, dict[str, Any]] = {
    "gqa": {"kind": "gqa", "num_heads": 16, "num_kv_heads": 4, "head_dim": 8},
    "mla": {
        "kind": "mla",
        "num_heads": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
    },
    "indexed": {
        "kind": "mla",
        "num_heads": 4,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "indexer": {"num_heads": 2, "head_dim": 8, "top_k": 16, "layers": [0, 1]},
    },
    "too wide": {"kind": "gqa", "num_heads": 2, "num_kv_heads": 1, "head_dim": 258},
}


EAGER = {"host.kernels": "triton", "host.cuda_graphs": "none"}


def compared(job_with: Any, section: str, cp: int, settings: dict[str, Any]) -> RankComparison:
    """Estimate and trace of a stack of two such layers."""
    model = {"pattern": "A", "num_layers": 2, "hidden_size": 16, "vocab_size": 32, "attention": SECTIONS[section]}
    batch = {"micro_batch_size": 2, "seq_length": 128}
    job = job_with({"model": model, "precision": BF16, "batch": batch, "mesh": {"cp": cp}, **EAGER, **settings})
    return compare_passes(job)


@pytest.mark.parametrize(
    ("section", "cp", "settings"),
    [
        ("gqa", 1, {}),
        ("gqa", 2, {"data.packing": "documents"}),
        ("mla", 2, {"recompute": {"default": "selective"}}),
        ("mla", 1, {"model.features": {"mtp": {"depth": 1, "ffn_hidden_size": 64}}}),
        ("too wide", 1, {}),
    ],
)
def test_the_inside_of_attention(job_with: Any, section: str, cp: int, settings: dict[str, Any]) -> None:
    """Backward has one number per query and head in addition to its gradients, where the kernels accept the head widths."""
    found = compared(job_with, section, cp, settings)
    inside = found.columns(Phase.FORWARD_BACKWARD)[Column.WORKSPACE].trace - load_device("h200").gemm_workspace.value
    assert inside == (0 if section == "too wide" else 4 * 2 * 16 * 128 // cp)


LIBRARY = {"host.libraries": ["flash-attn-4"]}
LATENT = SECTIONS["mla"] | {"qk_nope_head_dim": 64, "qk_rope_head_dim": 16, "v_head_dim": 64}


@pytest.mark.parametrize(
    ("section", "cp", "settings"),
    [
        (SECTIONS["gqa"], 1, {}),
        (SECTIONS["gqa"] | {"sinks": True, "window_size": 100, "full_layers": [1]}, 1, {"recompute": {"default": "selective"}}),
        (LATENT, 1, {"batch.seq_length": 200}),
        (SECTIONS["gqa"] | {"score_cap": 30.0, "head_dim": 192}, 1, {}),
        (SECTIONS["gqa"], 2, {}),
        (SECTIONS["gqa"], 1, {"data.packing": "documents"}),
    ],
    ids=["gqa", "sinks and windows", "latent", "capped", "cp", "documents"],
)
def test_the_inside_of_a_library(job_with: Any, section: dict[str, Any], cp: int, settings: dict[str, Any]) -> None:
    """Backward holds the package's arrays where it runs, and one number per query and head where own kernels do."""
    model = {"pattern": "A", "num_layers": 2, "hidden_size": 16, "vocab_size": 32, "attention": section}
    batch = {"micro_batch_size": 2, "seq_length": 128}
    given = {"model": model, "precision": BF16, "batch": batch, "mesh": {"cp": cp}, **EAGER, **LIBRARY, **settings}
    found = compare_passes(job_with(given))
    inside = found.columns(Phase.FORWARD_BACKWARD)[Column.WORKSPACE].trace - load_device("h200").gemm_workspace.value
    if cp > 1 or "data.packing" in settings:
        assert inside == 4 * 2 * 16 * 128 // cp
    else:
        width = section.get("head_dim", 80)
        groups = section.get("num_kv_heads", 16)
        assert inside == backward_bytes(2, settings.get("batch.seq_length", 128), 16, groups, width, 64 if width == 80 else width)


@pytest.mark.parametrize(("full_layers", "slots"), [([1], 10), ([], 8)], ids=["full", "windows"])
def test_the_inside_of_stored_scores(job_with: Any, full_layers: list[int], slots: int) -> None:
    """Weights and score gradients of the tiles of every head, fewer of them in a layer with a window."""
    section = {
        "kind": "gqa",
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 8,
        "score_cap": 30.0,
        "window_size": 100,
        "full_layers": full_layers,
    }
    model = {"pattern": "A", "num_layers": 2, "hidden_size": 16, "vocab_size": 32, "attention": section}
    batch = {"micro_batch_size": 1, "seq_length": 512}
    found = compare_passes(job_with({"model": model, "precision": BF16, "batch": batch, **EAGER}))
    inside = found.columns(Phase.FORWARD_BACKWARD)[Column.WORKSPACE].trace - load_device("h200").gemm_workspace.value
    assert inside == 4 * 2 * 512 + 2 * 2 * slots * 128**2 * 2


@pytest.mark.parametrize(
    ("cp", "settings"),
    [(1, {}), (1, {"recompute": {"default": "selective"}}), (2, {"data.packing": "documents"})],
)
def test_the_inside_of_indexed_attention(job_with: Any, cp: int, settings: dict[str, Any]) -> None:
    """At the peak there is more than the bits of the chosen keys: the index scores of a rank's queries, once or twice."""
    found = compared(job_with, "indexed", cp, settings)
    inside = found.columns(Phase.FORWARD_BACKWARD)[Column.WORKSPACE].trace - load_device("h200").gemm_workspace.value
    assert inside > 4 * 2 * 128 // cp * 128 // 32
