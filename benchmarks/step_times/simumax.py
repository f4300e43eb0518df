"""SimuMax's public table of measured B200 steps as rows.

git clone https://github.com/MooreThreads/SimuMax && git -C SimuMax checkout 4dcaae513ba7
python benchmarks/step_times/simumax.py SimuMax ROWS.json

Steps of Megatron-Core on one node of eight B200, with SimuMax's own prediction of each, from docs/b200/b200_release_v1.2_summary.json.
Models are those of configs/models, with as many layers as a case names and, as simu_tools/megatron_scripts launches DeepSeek, one dense
layer before the routed ones. No communication overlaps (docs/b200/b200_real_repro_guide.md, section 3.3).
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

Row = dict[str, Any]
FRAMEWORK = "mcore-plain"
"""Megatron-LM without a framework built on it; only SimuMax's rows have it."""
REVISION = "4dcaae51"
TABLE = "docs/b200/b200_release_v1.2_summary"
NUM_DEVICES = 8
CONFIGS = {"llama3-405b": "llama3-405b_padding_128"}
"""Files of configs/models that are not named as the model is."""
NAMES = {"deepseekv2": "deepseek-v2", "deepseekv3": "deepseek-v3"}
"""Names of models in other tables."""


def main() -> None:
    """Read a clone and write its rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("clone", type=Path, help="a checkout of MooreThreads/SimuMax")
    parser.add_argument("rows", type=Path, help="write the rows here")
    arguments = parser.parse_args()
    arguments.rows.write_text(json.dumps(rows_of(arguments.clone), indent=1) + "\n", encoding="utf-8")


def rows_of(clone: Path) -> list[Row]:
    """Every row of the table, in its order."""
    table = json.loads((clone / f"{TABLE}.json").read_text(encoding="utf-8"))
    return [_row(clone, measured) for measured in table["rows"]]


def _row(clone: Path, measured: dict[str, Any]) -> Row:
    """One row: degrees, sequence and microbatches are in the case's name."""
    case, model = measured["case"], measured["model"]
    arch = _arch(clone / "configs" / "models" / f"{CONFIGS.get(model, model)}.json", measured["layer_num"])
    said = {key: int(value) for key, value in re.findall(r"_(tp|cp|ep|pp|dp|mbc|seq)(\d+)", case)}
    tp, pp, cp, dp = (said.get(key, 1) for key in ("tp", "pp", "cp", "dp"))
    if tp * pp * cp * dp != NUM_DEVICES or said["mbc"] != measured["mbc"]:
        raise ValueError(f"{case} is not a run on {NUM_DEVICES} devices with {measured['mbc']} microbatches")
    where = f"MooreThreads/SimuMax@{REVISION}:{TABLE}"
    return {
        **{"id": case, "source": f"{where}.json:{case}", "table": where, "framework": FRAMEWORK, "release": None},
        **{"model": NAMES.get(model, model), "arch": arch, "device": "B200", "precision": "bf16", "task": "pretrain"},
        **{"gpus": NUM_DEVICES, "seq": said.get("seq", 4096), "gbs": said["mbc"] * dp, "mbs": 1},
        **{"tp": tp, "pp": pp, "cp": cp, "vp": measured["vp_size"], "ep": said.get("ep", 1), "etp": 1, "dp": dp, "nmb": said["mbc"]},
        **{"recompute": {}, "fsdp": None, "zero": 1, "sp": int(tp > 1), "tp_overlap": 0, "a2a_overlap": 0, "cuda_graph": []},
        **{"dispatcher": "alltoall" if arch["nE"] else None, "compiled": 1, "fp8_gather": 0, "fp8_attention": 0, "tokendrop": 0},
        **{"schedule": "1f1b", "step_s": measured["real_ms"] / 1000, "simumax_s": measured["perf_ms"] / 1000},
        **{"family": "moe" if arch["nE"] else "dense", "note": "", "recipe_differs": "", "repeat_of": None, "anomaly": None},
    }


def _arch(path: Path, layers: int) -> dict[str, Any]:
    """Counts and widths."""
    config = json.loads(path.read_text(encoding="utf-8"))
    dense = min(layers, 1) if config["model_type"] == "moe" else layers
    found = {"L": layers, "h": config["hidden_size"], "a": config["head_num"], "kv": config["kv_head_num"], "hd": config["head_size"]}
    found |= {"ffn": config["intermediate_size"], "V": config["vocab_size"], "gated": int(config["use_swiglu"]), "tied": 0}
    found |= {"nA": layers, "nD": dense, "nE": layers - dense, "nM": 0, "mtp": 0}
    if config["model_type"] == "moe":
        found |= {"E": config["expert_num"], "top": config["topk"], "mf": config["moe_ffn_hidden_size"]}
        found |= {"shared": config["moe_shared_expert_intermediate_size"]}
    if config.get("attention_type") == "mla":
        found |= {"mla": 1, "q_lora": config["q_lora_rank"], "kv_lora": config["kv_lora_rank"], "rope": config["qk_pos_emb_head_dim"]}
        found |= {"nope": config["qk_head_dim"], "vd": config["v_head_dim"]}
    return found


if __name__ == "__main__":
    main()
