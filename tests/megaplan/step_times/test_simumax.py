"""SimuMax's public table becomes rows, and the page has every one of them once."""

import json
import re
from pathlib import Path

import pytest
from step_times import replay, simumax

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "accuracy-time.md"
LLAMA = {"model_type": "dense", "hidden_size": 8192, "head_num": 64, "kv_head_num": 8, "head_size": 128, "intermediate_size": 28672}
LLAMA |= {"vocab_size": 128256, "use_swiglu": True, "layer_num": 80}
DEEPSEEK = LLAMA | {"model_type": "moe", "attention_type": "mla", "kv_head_num": 64, "expert_num": 160, "topk": 6, "dense_layers": 3}
DEEPSEEK |= {"moe_ffn_hidden_size": 1536, "moe_shared_expert_intermediate_size": 3072, "q_lora_rank": 1536, "kv_lora_rank": 512}
DEEPSEEK |= {"qk_pos_emb_head_dim": 64, "qk_head_dim": 128, "v_head_dim": 128}


def clone(folder, *measured):
    """A checkout with these rows of its table."""
    table, models = folder / f"{simumax.TABLE}.json", folder / "configs" / "models"
    table.parent.mkdir(parents=True)
    models.mkdir(parents=True)
    table.write_text(json.dumps({"rows": measured}))
    for name, config in (("llama3-70b", LLAMA), ("llama3-405b_padding_128", LLAMA), ("deepseekv2", DEEPSEEK)):
        (models / f"{name}.json").write_text(json.dumps(config))
    return folder


def measured(case, model, layers, microbatches):
    """A row of the table."""
    return {"case": case, "model": model, "layer_num": layers, "mbc": microbatches, "vp_size": 1, "real_ms": 2000.0, "perf_ms": 1900.0}


def test_a_case_has_its_degrees_and_the_model_its_layers(tmp_path):
    long = "llama3_405b_l4_tp2_cp4_pp1_dp1_seq32768_mbc4_cef"
    routed = "deepseekv2_tp1_ep4_pp2_dp4_l4_mbc32_cef"
    dense, moe = simumax.rows_of(clone(tmp_path, measured(long, "llama3-405b", 4, 4), measured(routed, "deepseekv2", 4, 32)))
    degrees = ("tp", "cp", "pp", "ep", "dp", "seq", "nmb", "gbs", "sp")
    assert [dense[key] for key in degrees] == [2, 4, 1, 1, 1, 32768, 4, 4, 1]
    assert [moe[key] for key in degrees] == [1, 1, 2, 4, 4, 4096, 32, 128, 0]
    assert (dense["step_s"], dense["simumax_s"], dense["family"], moe["family"]) == (2.0, 1.9, "dense", "moe")
    assert (moe["arch"]["nD"], moe["arch"]["nE"], moe["dispatcher"], moe["model"]) == (1, 3, "alltoall", "deepseek-v2")
    assert all(replay.replayed(row)["predicted_s"] > 0 for row in (dense, moe))


def test_a_case_that_contradicts_its_row_is_refused(tmp_path):
    case = "llama3_70b_l12_tp8_pp1_dp1_mbc4_cef"
    with pytest.raises(ValueError, match=case):
        simumax.rows_of(clone(tmp_path, measured(case, "llama3-70b", 12, 8)))


def test_the_page_has_every_run_once_and_its_counts():
    section = PAGE.read_text(encoding="utf-8").split("## SimuMax's runs")[1].split("\n## ")[0]
    listed = re.findall(r"^\| (\w+_cef) \| (in the fit|held back) \|", section, re.M)
    assert len({case for case, _ in listed}) == len(listed) == 43
    found = dict(re.findall(r"^\| this model \| (all|in the fit|held back) \| (\d+) \|", section, re.M))
    unseen = re.findall(r"^\| \w+_cef \| [\w ]+ \| [\d.]+ \| [-+\d.]+ \| ([-+\d.]+) \|", section, re.M)
    assert len(unseen) == 43
    assert max(map(float, unseen)) < 0  # the page says so
    assert found == {name: str(sum(kind == name for _, kind in listed)) for name in ("in the fit", "held back")} | {"all": "43"}


def test_a_summary_has_the_mean_signed_error():
    timed = [{"error": error, "anomaly": None, "family": "dense"} for error in (0.1, -0.3, 0.05)]
    assert replay.summary(timed, 3)[1:] == [
        f"{name:8s}    3 rows  median 10.0 %  p90 30.0 %  worst 30 %  mean signed -5.0 %" for name in ("dense", "all")
    ]
