"""Published training runs, predicted: writes docs/reference/runs.md.

python benchmarks/runs/run.py [--check]     --check exits 1 if the page is out of date

A run is a row of `published.yaml`. Days are of this project's own steps unless `run.step` gives the published one. `steps.yaml` has steps
alone.
"""

import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import yaml
from pages import write_page

import megaplan
from megaplan.terminal.table import markdown_table

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "reference" / "runs.md"
POINTS, PERCENT = 5.0, 10.0
"""Errors within which a goodput, in points, and days, in per cent, are near."""


_SIDES = {"fresh": "fresh", "later": "later", "tuned": "tuning"}
"""Side of a run by the key that says so; the others are held out."""


class PublishedRun(NamedTuple):
    """A row with its prediction.

    Attributes:
        row: Values of `published.yaml`.
        found: The run as it is predicted.
        days: Published days; None if there are none.
        goodput: Published goodput or its lower bound; None if there is none.
        bound: True if the goodput is a lower bound.
        step: Seconds of the step as it is modelled, also where the run was given the published one; None if it has no time.
    """

    row: dict[str, Any]
    found: megaplan.RunEstimate
    days: float | None
    goodput: float | None
    bound: bool
    step: float | None

    @property
    def step_error(self) -> float | None:
        """Per cent by which the modelled step is off."""
        published = self.row["published"].get("step")
        return None if published is None or self.step is None else 100 * (self.step / published - 1)

    @property
    def days_error(self) -> float | None:
        """Per cent by which the predicted days are off."""
        return None if self.days is None else 100 * (self.found.days.value / self.days - 1)

    @property
    def goodput_error(self) -> float | None:
        """Points by which the predicted goodput is off; a bound that is kept is off by 0."""
        if self.goodput is None:
            return None
        error = 100 * (self.found.goodput - self.goodput)
        return min(0.0, error) if self.bound else error

    @property
    def side(self) -> str:
        """The side of the draw: tuning, held out, later or fresh; a run whose publication gave figures of the planner says so."""
        side = next((name for key, name in _SIDES.items() if self.row.get(key)), "held out")
        return f"{side}, figures" if "source_of" in self.row else side

    @property
    def worst(self) -> float:
        """The larger of both errors, relative to what counts as near."""
        return max(abs(self.days_error or 0) / PERCENT, abs(self.goodput_error or 0) / POINTS)


def spec_of(row: dict[str, Any]) -> dict[str, Any]:
    """The spec of a row: Megatron-Core where `host` names no other; `sections` are merged into those of the spec."""
    micro_batch, seq_length = row["batch"]
    pipelined, network = row["mesh"].get("vpp", 1) > 1, row.get("network")
    spec: dict[str, Any] = {
        "format": "megaplan.spec/1",
        "name": "published",
        "model": row["model"] if "pattern" in row["model"] else _decoder(row["model"]),
        "mesh": row["mesh"],
        "schedule": {"kind": "interleaved_1f1b" if pipelined else "1f1b", "num_microbatches": row["microbatches"]},
        "batch": {"micro_batch_size": micro_batch, "seq_length": seq_length},
        "optimizer": {"matrix": "adamw"},
        "host": row["host"] if "name" in row.get("host", {}) else {"name": "megatron", "model": "gpt", **row.get("host", {})},
        "device": {"name": row["device"], **({"network_bytes_per_second": network} if network else {})},
        "split": {"mode": "equal"},  # as Megatron makes stages
        **({"run": row["run"]} if "run" in row else {}),
    }
    if "ends" in row:
        spec |= {"model": _with_ends(spec["model"], row), "split": {"reason": "published ends", "protects": ["topology"]}}
    return spec | row.get("sections", {})


def _with_ends(model: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """A model whose first and last slot have the layers that `ends` states, and the others equal shares of the rest."""
    ends, inner = row["ends"], row["mesh"]["pp"] * row["mesh"].get("vpp", 1) - 2
    sizes = (ends[0], *[(row["model"]["layers"] - sum(ends)) // inner] * inner, ends[1])
    return model | {"pattern": "|".join("AD" * size for size in sizes)}


def _decoder(model: dict[str, Any]) -> dict[str, Any]:
    """A decoder of attention and MLP layers.

    With `rotates: false` positions are learned, or biases of scores; `biased` linears and norms have biases, and `parallel` layers share a
    norm.
    """
    biased, layers = model.get("biased", False), model["layers"]
    return {
        "pattern": "AD",
        **({"norm": "layernorm"} if biased else {}),
        **({"parallel_layers": list(range(1, 2 * layers, 2))} if model.get("parallel") else {}),
        "num_layers": 2 * model["layers"],
        "hidden_size": model["hidden"],
        "vocab_size": model["vocab"],
        "tie_embeddings": model.get("tied", False),
        "attention": {
            "kind": "gqa",
            "num_heads": model["heads"],
            "num_kv_heads": model["kv_heads"],
            "head_dim": model["head_dim"],
            **({"bias": True, "output_bias": True} if biased else {}),
            **({"rotary_dim": model["rotary_dim"]} if "rotary_dim" in model else {}),
            **({"nope_layers": list(range(0, 2 * layers, 2))} if model.get("rotates") is False else {}),
        },
        "mlp": {"ffn_hidden_size": model["ffn"], "activation": model.get("activation", "swiglu"), **({"bias": True} if biased else {})},
    }


def predicted(row: dict[str, Any]) -> PublishedRun:
    """A row with its prediction."""
    spec, published = spec_of(row), row["published"]
    found, time = megaplan.run(spec), megaplan.estimate(spec).step_time
    days = _days(published, found.num_devices)
    goodput = published.get("goodput", published.get("goodput_above"))
    return PublishedRun(row, found, days, goodput, "goodput_above" in published, None if isinstance(time, str) else time.seconds)


def _days(published: dict[str, Any], num_devices: int) -> float | None:
    hours = published.get("device_hours")
    found: float | None = published.get("days", None if hours is None else hours / num_devices / 24)
    return found


class Pair(NamedTuple):
    """A run whose step and days are published: the rate that it sustained.

    Attributes:
        row: Values of `published.yaml`.
        devices: Number of devices.
        rate: Days that the published step gives, with the run's saves and interruptions as they are predicted, over the published days.
    """

    row: dict[str, Any]
    devices: int
    rate: float


def pairs() -> list[Pair]:
    """The pairs, by rate."""
    found = []
    for row in yaml.safe_load((HERE / "published.yaml").read_text(encoding="utf-8")):
        if row.get("pair"):
            run = megaplan.run(spec_of({**row, "run": {**row["run"], "step": row["published"]["step"], "sustained": 1.0}}))
            days = _days(row["published"], run.num_devices)
            assert days is not None
            found.append(Pair(row, run.num_devices, run.days.value / days))
    return sorted(found, key=lambda pair: pair.rate)


def fitted_rate(rates: list[float]) -> tuple[float, float, float]:
    """The median, at most 1, and the 10 and 90 % quantiles, linear between the rates."""

    def at(share: float) -> float:
        place = share * (len(rates) - 1)
        low = min(int(place), len(rates) - 2)
        return min(1.0, rates[low] + (place - low) * (rates[low + 1] - rates[low]))

    rates = sorted(rates)
    return at(0.5), at(0.1), at(0.9)


class Step(NamedTuple):
    """A published step with its prediction.

    Attributes:
        name: Model and what is recomputed.
        devices: Number of devices.
        published: Published seconds.
        predicted: Predicted seconds.
    """

    name: str
    devices: int
    published: float
    predicted: float

    @property
    def error(self) -> float:
        """Per cent by which the predicted step is off."""
        return 100 * (self.predicted / self.published - 1)


OWN_MODULES = {"transformer_impl": "local"}
FULL = {**OWN_MODULES, "sequence_parallel": False, "recompute_method": "uniform", "recompute_num_layers": 1}


def steps() -> list[Step]:
    """Steps of Megatron-LM's own modules, the worst first."""
    found = []
    for row in yaml.safe_load((HERE / "steps.yaml").read_text(encoding="utf-8")):
        for what, host in (("full", FULL), ("selective", OWN_MODULES)):
            kept = {"recompute": {"blocks": {"A": "selective"}}} if what == "selective" else {}
            estimate = megaplan.estimate(spec_of({**row, "device": "a100-80gb", "host": host, "sections": kept}))
            if isinstance(estimate.step_time, str):
                raise ValueError(f"{row['name']}: {estimate.step_time}")
            devices = row["mesh"]["pp"] * row["mesh"]["tp"]
            found.append(Step(f"{row['name']}, {what}", devices, row[what], estimate.step_time.seconds))
    return sorted(found, key=lambda step: -abs(step.error))


def rows() -> list[PublishedRun]:
    """Every row, the worst first."""
    found = [predicted(row) for row in yaml.safe_load((HERE / "published.yaml").read_text(encoding="utf-8"))]
    return sorted(found, key=lambda row: -row.worst)


def main() -> int:
    """Write the page, or compare it."""
    return write_page(PAGE, page(rows()))


def page(found: list[PublishedRun]) -> str:
    """The whole page."""
    cells = [["run", "devices", "step s", "published", "error", "days", "published", "error", "goodput", "published", "points", ""]]
    for row in found:
        run, published = row.found, row.row["published"].get("step")
        step = ["" if row.step is None else f"{row.step:.3g}", "", ""]
        if row.step_error is not None:
            step[1:] = [f"{published:.4g}{' given' if 'step' in row.row['run'] else ''}", f"{row.step_error:+.1f} %"]
        days = ["", "", ""] if row.days is None else [f"{run.days.value:.3g}", f"{row.days:.3g}", f"{row.days_error:+.1f} %"]
        if row.goodput is None:
            goodput = [f"{100 * run.goodput:.1f} %", "", ""]
        else:
            sign = "> " if row.bound else ""
            goodput = [f"{100 * run.goodput:.1f} %", f"{sign}{100 * row.goodput:.1f} %", f"{row.goodput_error:+.1f}"]
        cells.append([row.row["name"], f"{run.num_devices:,} {run.device}", *step, *days, *goodput, row.side])
    return (
        (HERE / "page.md")
        .read_text(encoding="utf-8")
        .format(
            table="\n".join(markdown_table(cells, left=(0, 11))),
            steps="\n".join(markdown_table(_step_cells(), left=(0,))),
            summary=summary(found),
            pairs="\n".join(markdown_table(_pair_cells(), left=(0, 3))),
            sources="\n".join(_sources(row) for row in found),
        )
    )


def summary(found: list[PublishedRun]) -> str:
    """Counts of rows that are near, all and held out."""
    parts = []
    sides = [(name.capitalize(), [row for row in found if row.side.startswith(name)]) for name in ("tuning", "held out", "later", "fresh")]
    for name, among in (("All", found), *sides):
        days = [abs(row.days_error) for row in among if row.days_error is not None]
        goodput = [abs(row.goodput_error) for row in among if row.goodput_error is not None]
        near_days, near_goodput = sum(each <= PERCENT for each in days), sum(each <= POINTS for each in goodput)
        steps = [abs(row.step_error) for row in among if row.step_error is not None]
        near_steps = sum(each <= PERCENT for each in steps)
        of_steps = f"steps of {near_steps} of {len(steps)} runs and " if steps else ""
        of_goodput = f"; goodput of {near_goodput} of {len(goodput)} within {POINTS:g} points" if goodput else ""
        parts.append(
            f"{name}: {of_steps}days of {near_days} of {len(days)} within {PERCENT:g} %,"
            f" the median of days off by {sorted(days)[len(days) // 2]:.1f} %{of_goodput}."
        )
    return "\n".join(parts)


def _pair_cells() -> list[list[str]]:
    cells = [["run", "devices", "rate", ""]]
    return cells + [
        [pair.row["name"], f"{pair.devices:,}", f"{pair.rate:.3f}", "fitted" if pair.row.get("tuned") else "held out"] for pair in pairs()
    ]


def _step_cells() -> list[list[str]]:
    cells = [["step", "devices", "published s", "predicted s", "error"]]
    return cells + [
        [each.name, f"{each.devices} a100-80gb", f"{each.published:g}", f"{each.predicted:.4g}", f"{each.error:+.1f} %"] for each in steps()
    ]


def _sources(row: PublishedRun) -> str:
    given = f" Given: {row.row['given']}." if "given" in row.row else ""
    note = f" Note: {row.row['note']}." if "note" in row.row else ""
    figures = f" Figures from it: {', '.join(row.row['source_of'])}." if "source_of" in row.row else ""
    return f"- **{row.row['name']}**: {'; '.join(row.row['sources'])}.{given}{note}{figures}"


if __name__ == "__main__":
    sys.exit(main())
