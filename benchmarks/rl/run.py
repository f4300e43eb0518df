"""Published post-training, predicted: writes docs/reference/rl.md.

python benchmarks/rl/run.py [--check]     --check exits 1 if the page is out of date

An iteration is compared with `megaplan rl` of its recipe, bytes with one cell of its memory. `fit.py` fits the loop's three constants.
"""

import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import yaml
from pages import write_page

import megaplan
from megaplan.post_training.job import TrainingJob, section_of, training_job
from megaplan.terminal.table import markdown_table

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "reference" / "rl.md"
PROMPT = 115
FIRST_FITTED = "0.5"
"""Release from which rows are fitted; rows of earlier ones are held out."""
UNITS = {"GiB": 2**30, "GB": 10**9}
NEAR_MEMORY, NEAR_TIME = 8.0, 15.0
FULL_RECOMPUTE = ("llama8b", "llama70b", "qwen235b", "dsv3", "glm52")
"""Models whose recipes recompute all layers."""


BRIDGE = {"0.4": "25.09", "0.5": "25.11", "0.6": "26.02"}
"""Megatron-Bridge's release of the time of each release of NeMo-RL, which trains with it."""
ASYNC_ENGINE = ("qwen235b", "dsv3")
"""Models whose recipes set async_engine on policy, too; all off-policy recipes do."""
ENGINE_DEFAULTS = {"sync": (1024, 16384), "async": (128, 2048)}
"""Sequences and batched tokens of vLLM's usage contexts LLM_CLASS and ENGINE_CONTEXT (vllm/engine/arg_utils.py, config/scheduler.py)."""


class Iteration(NamedTuple):
    """A published iteration with its prediction.

    Attributes:
        number: Place in `published.yaml`.
        row: Values of the row there.
        found: The prediction.
    """

    number: int
    row: dict[str, Any]
    found: megaplan.RlEstimate

    def job(self) -> TrainingJob:
        """The job that trains."""
        loaded = megaplan.load(spec_of(self.row, data()["models"][self.row["model"]]))
        return training_job(loaded.spec, loaded.inventory, loaded.spans, section_of(loaded.spec))

    @property
    def error(self) -> float:
        """Per cent by which the predicted iteration is off."""
        return 100 * (self.found.iteration_seconds.value / self.row["seconds"] - 1)

    @property
    def fitted(self) -> bool:
        """True if the loop's constants are fitted to it."""
        return bool(self.row["version"] >= FIRST_FITTED) and not self.row.get("held", False)


class Bytes(NamedTuple):
    """Published bytes with their prediction."""

    row: dict[str, Any]
    predicted: int

    @property
    def error(self) -> float:
        """Per cent by which the predicted bytes are off."""
        return 100 * (self.predicted / UNITS[self.row["unit"]] / self.row["published"] - 1)


def data() -> dict[str, Any]:
    """Everything that was published."""
    loaded: dict[str, Any] = yaml.safe_load((HERE / "published.yaml").read_text(encoding="utf-8"))
    return loaded


def _split(row: dict[str, Any]) -> dict[str, Any]:
    """The cuts of a recipe: those that its row states, or its first and last stage and equal shares of the rest, or equal stages."""
    spans, stages = row.get("spans"), row.get("mesh", [1, 1, 1, 1])[3]
    ends = data().get("ends", {}).get(row["model"], {}).get(stages)
    if spans is None and ends is not None:
        layers = data()["models"][row["model"]]["num_layers"] // 2
        sizes = (ends[0], *[(layers - sum(ends)) // (stages - 2)] * (stages - 2), ends[1])
        spans = [[2 * sum(sizes[:stage]), 2 * sum(sizes[: stage + 1])] for stage in range(stages)]
    return {"mode": "equal"} if spans is None else {"mode": "manual", "reason": "the recipe's cuts", "spans": spans}


def spec_of(row: dict[str, Any], model: dict[str, Any]) -> dict[str, Any]:
    """A row as a spec: training on all devices, or on half of them if the rollout has its own."""
    devices = row.get("devices", row["gen"])
    tp, cp, ep, pp = row.get("mesh", [1, 1, 1, 1])
    training = devices - row.get("rollout", devices // 2 if row.get("staleness") else 0)
    megatron = {"name": "megatron", "model": "gpt", "framework": "megatron-bridge", "hidden_dropout": 0.0, "attention_dropout": 0.0}
    megatron |= {"release": BRIDGE[row["version"]]} if "version" in row else {}
    megatron |= {"precision_aware_optimizer": True} if "model" in row and "seconds" in row else {}
    megatron |= {"recompute_num_layers": 1} if row["model"] in FULL_RECOMPUTE else {}
    megatron |= {"moe_dispatcher": "alltoall"} if "moe" in model else {}
    host = {"name": row["host"]} if "host" in row else megatron
    limit = row.get("limit", 8192)
    rollout = {
        "engine": row.get("engine", "vllm"),
        "tp": row["gen"],
        "prompt": PROMPT,
        "response": {"mean": row.get("mean", 1000), "max": limit - PROMPT},
        "memory_fraction": row["fraction"],
        **{key: row[key] for key in ("max_sequences", "graphs", "sleep") if key in row},
        **({"gpus": row["rollout"]} if "rollout" in row else {}),
    }
    if "seconds" in row:  # NeMo-RL starts vLLM's engine itself, or its class LLM: neither has the server's defaults
        limits = ENGINE_DEFAULTS["async" if row.get("staleness") or row["model"] in ASYNC_ENGINE else "sync"]
        rollout |= dict(zip(("max_sequences", "batched_tokens"), limits, strict=True))
    return {
        "format": "megaplan.spec/1",
        "name": "published",
        "model": model,
        "mesh": {"pp": pp, "tp": tp, "cp": cp, "ep": ep, "dp_shard": training // (pp * tp * cp), "vocab_parallel": tp > 1},
        "schedule": {"kind": "1f1b", "num_microbatches": pp},
        "batch": {"micro_batch_size": 1, "seq_length": limit},
        "precision": {"params": "bf16"} | ({} if "host" in row else {"grads": "bf16", "reduce": "bf16"}),
        "optimizer": {"matrix": "adamw"},
        "host": host,
        "device": {"name": row["device"], **({"per_node": 4} if row["device"].startswith("gb") else {})},
        "post_training": {
            "kind": "rl",
            "prompts": row.get("prompts", 64),
            "samples": row.get("samples", 8),
            "rollout": rollout,
            "policy": {"updates": row.get("updates", 1), "packing": row.get("packing", True)},
            **({"reference": {}} if "seconds" in row else {}),
            "offload": row.get("offload", ["parameters", "gradients", "optimizer"]) + (["reference"] if "seconds" in row else []),
            **({"placement": "split", "staleness": row["staleness"]} if row.get("staleness") else {}),
            **({"pinned": True} if row.get("pinned") else {}),
        },
        "split": _split(row),
    }


def iterations(kind: str = "iterations") -> list[Iteration]:
    """Every published iteration with its prediction, the worst first; `kind` is iterations, or others."""
    found = data()
    rows = [
        Iteration(number, row, megaplan.rl(spec_of(row, found["models"][row["model"]]), *row.get("set", ())))
        for number, row in enumerate(found[kind])
    ]
    return sorted(rows, key=lambda each: -abs(each.error))


def memory() -> list[Bytes]:
    """Published bytes with their prediction, the worst first."""
    found = data()
    return sorted((_bytes(row, found["models"][row["model"]]) for row in found["memory"]), key=lambda each: -abs(each.error))


def _bytes(row: dict[str, Any], model: dict[str, Any]) -> Bytes:
    name, column = row["of"]
    phase = next(each for each in megaplan.rl(spec_of(row, model), *row.get("set", ())).memory if each.name == name)
    cells = phase.columns | phase.host_columns | {"host total": phase.host_total_bytes}
    return Bytes(row, cells[column])


PARTS = {"rollout": ("rollout",), "training": ("training",), "log-probabilities": ("log_probs", "reference"), "refit": ("sync", "offload")}
"""Phases of a published part of an iteration."""


def _other(each: Iteration) -> list[str]:
    """A row of the table of other publications."""
    row, seconds = each.row, {phase.name: phase.seconds.value for phase in each.found.times}
    parts = {name: sum(seconds.get(phase, 0.0) for phase in PARTS[name]) for name in row.get("phases", ())}
    shown = ", ".join(f"{name} {row['phases'][name]:g}, {value:.3g}" for name, value in parts.items())
    numbers = [f"{row['seconds']:g}", f"{each.found.iteration_seconds.value:.4g}", f"{each.error:+.1f} %"]
    return [row["loop"], row["name"], f"{row['devices']} {row['device']}", *numbers, shown, row["source"]]


def page(times: list[Iteration], others: list[Iteration], sizes: list[Bytes]) -> str:
    """The whole page."""
    from rl.fit import fitted  # noqa: PLC0415  (fit.py reads rows from here)

    fit = fitted(times)
    rows = [["model", "devices", "policy", "release", "published s", "predicted s", "error", ""]]
    for each in times:
        row = each.row
        policy = f"{row['staleness']} step{'s' if row['staleness'] > 1 else ''} off" if row["staleness"] else "on"
        left_out = f"{fit.left_out[id(each)]:+.1f} % without its model" if each.fitted else "held out"
        numbers = [f"{row['seconds']:g}", f"{each.found.iteration_seconds.value:.4g}", f"{each.error:+.1f} %"]
        rows.append(
            [row["name"].removesuffix(", 1 step off"), f"{row['devices']} {row['device']}", policy, row["version"], *numbers, left_out]
        )
    heads = ["loop", "model", "devices", "published s", "predicted s", "error", "parts: published, predicted", "source"]
    bytes_rows = [["what", "published", "predicted", "error", "source"]]
    for size in sizes:
        row, unit = size.row, size.row["unit"]
        source = row["source"] + (f"; {row['note']}" if "note" in row else "")
        predicted = f"{size.predicted / UNITS[unit]:.4g} {unit}"
        bytes_rows.append([row["name"], f"{row['published']:g} {unit}", predicted, f"{size.error:+.1f} %", source])
    return (
        (HERE / "page.md")
        .read_text(encoding="utf-8")
        .format(
            times="\n".join(markdown_table(rows, left=(0, 1, 2, 7))),
            others="\n".join(markdown_table([heads, *map(_other, others)], left=(0, 1, 2, 6, 7))),
            near_nemo=_near([each.error for each in others if each.row["loop"].startswith("NeMo-RL")], NEAR_TIME),
            near_verl=_near([each.error for each in others if each.row["loop"].startswith("verl")], NEAR_TIME),
            sizes="\n".join(markdown_table(bytes_rows, left=(0, 4))),
            near_times=_near([each.error for each in times], NEAR_TIME),
            held=_near([each.error for each in times if not each.fitted], NEAR_TIME),
            near_sizes=_near([each.error for each in sizes], NEAR_MEMORY),
            drawn=_near(list(fit.drawn), NEAR_TIME),
            left_out=_near(list(fit.left_out.values()), NEAR_TIME),
            constants=fit.text,
        )
    )


def _near(errors: list[float], bound: float) -> str:
    sizes = sorted(map(abs, errors))
    return f"{sum(each <= bound for each in sizes)} of {len(sizes)} within {bound:g} %, the median off by {sizes[len(sizes) // 2]:.1f} %"


def main() -> int:
    """Write the page, or compare it."""
    return write_page(PAGE, page(iterations(), iterations("others"), memory()))


if __name__ == "__main__":
    sys.exit(main())
