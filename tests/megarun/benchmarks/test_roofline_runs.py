"""The roofline of whole plans: its JSON, the rule of sums, and no operation beyond its ideal bytes without a reason."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))  # rooflines, roofline

pytest.importorskip("triton")
import roofline  # noqa: E402
from rooflines import ideal  # noqa: E402

pytestmark = [pytest.mark.runtime, pytest.mark.jobs]
SPEC = """
format: megaplan.spec/1
name: small
model:
  pattern: AMEDR
  num_layers: 5
  hidden_size: 32
  vocab_size: 61
  attention: {kind: gqa, num_heads: 4, num_kv_heads: 2, head_dim: 8}
  mamba: {kind: mamba2, head_dim: 16, state_dim: 16, num_groups: 2, chunk_size: 8}
  moe: {num_experts: 4, top_k: 2, ffn_hidden_size: 24, shared_ffn_hidden_size: 16}
  recurrent: {kind: m2rnn, num_heads: 3, key_dim: 4, value_dim: 4, save_every: 8}
  mlp: {ffn_hidden_size: 40}
mesh: {pp: 2}
schedule: {kind: 1f1b, num_microbatches: 5}
batch: {micro_batch_size: 2, seq_length: 24}
host: {kernels: triton}
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("roofline") / "small.yaml"
    path.write_text(SPEC)
    counted = roofline.counted(str(path), [])
    document: dict[str, Any] = json.loads(json.dumps(roofline.document(counted)))
    assert "MFU ceiling" in "\n".join(roofline.lines(counted))
    return document


def test_the_json_has_what_it_promises(found: dict[str, Any]) -> None:
    assert {"mfu_ceiling", "step_seconds_floor", "launches_per_microbatch", "host_syncs", "ops"} <= found.keys()
    assert all({"op", "family", "bytes", "flops", "launches", "seconds"} <= op.keys() for op in found["ops"])
    assert {op["family"] for op in found["ops"]} >= {"A", "M", "E", "D", "R", "head", "embedding", "optimizer"}
    assert 0 < found["mfu_ceiling"] < 1


def test_the_host_waits_once(found: dict[str, Any]) -> None:
    """The norm, the loss and the sums of the routers are read together."""
    assert found["host_syncs"] == 1


def test_a_step_is_what_its_longest_rank_works_and_waits(found: dict[str, Any]) -> None:
    longest = found["longest_rank"]
    parts = longest["busy_seconds"] + longest["bubble_seconds"] + longest["exposed_collective_seconds"]
    assert found["step_seconds_floor"] == pytest.approx(parts, rel=1e-12)
    both = sum(op["seconds"] for op in found["ops"])
    assert longest["busy_seconds"] < both < 2 * found["step_seconds_floor"]
    assert all(op["launch_seconds"] <= op["seconds"] for op in found["ops"])


def test_every_microbatch_counts(found: dict[str, Any]) -> None:
    """Three are run, and five are a step's: each layer's operation once a microbatch, forward and backward."""
    launches = {(op["family"], op["op"]): op["launches"] for op in found["ops"]}
    assert launches["M", "megakernels.ssd"] == 4 * 5
    assert launches["R", "megakernels.m2rnn"] == 5
    assert found["launches_per_microbatch"] < sum(launches.values()) / 5


def test_a_wrong_key_is_one_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(SPEC)
    assert roofline.main([str(path), "--set", "mesh.tensor=3"]) == 1
    assert "error[MP141]: --set names an unknown key" in capsys.readouterr().err


@pytest.fixture(scope="module")
def moved() -> dict[str, tuple[float, str]]:
    return ideal.moved(row for spec in ideal.SPECS for row in roofline.counted(str(spec), []).rows)


@pytest.mark.slow
def test_an_operation_beyond_its_ideal_bytes_has_a_reason(moved: dict[str, tuple[float, str]]) -> None:
    assert list(ideal.problems(moved, ideal.listed())) == []


@pytest.mark.slow
def test_every_operation_of_a_block_is_counted(moved: dict[str, tuple[float, str]]) -> None:
    blocks = ("attention", "indexed_attention", "mamba3", "ssd", "m2rnn", "gated_delta", "head_gated_norm", "routed_experts")
    blocks += ("routed_experts_gated", "linear_cross_entropy")
    wanted = {f"megakernels.{name}{side}" for name in blocks for side in ("", "_backward")}
    assert wanted <= moved.keys()


def test_the_list_says_what_is() -> None:
    """A ratio that grew, an operation that is not listed, one that need not be, and one that is not there."""
    allowed = {
        "grew": ideal.Listed(2.0, "triton", "a reason"),
        "mended": ideal.Listed(2.0, "triton", "a reason"),
        "absent": ideal.Listed(2.0, "triton", "a reason"),
        "fused": ideal.Listed(9.0, "torch", "a reason"),
        "fine": ideal.Listed(2.0, "triton", "a reason"),
    }
    found = {
        "megakernels.grew": (2.1, "triton"),
        "megakernels.mended": (1.3, "triton"),
        "megakernels.fused": (1.5, "triton"),
        "megakernels.fine": (2.0, "triton"),
        "megakernels.plain": (1.0, "torch"),
        "megakernels.new": (1.31, "triton"),
        "aten.mm": (1.0, "torch"),
    }
    lines = list(ideal.problems(found, allowed))
    assert len(lines) == 6
    words_of = {
        "grew": "allows 2.0",
        "mended": "remove it",
        "fused": "says torch",
        "plain": "plain torch",
        "new": "above",
        "absent": "no counted spec",
    }
    for op, words in words_of.items():
        assert any(line.startswith(("megakernels." + op, op)) and words in line for line in lines), op
