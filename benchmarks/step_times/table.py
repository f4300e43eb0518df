"""Many steps at once: the formulas of `megaplan.cost.step` on arrays with one number per row."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megaplan.cost.step.attention import attention_seconds, drawn_seconds
from megaplan.cost.step.blocks import ledger_of
from megaplan.cost.step.compose import PassTerms, StageTerms, step_seconds
from megaplan.cost.step.data import Group, Once, once_of
from megaplan.cost.step.gemm import product_seconds
from megaplan.cost.step.grouped import grouped_seconds
from megaplan.cost.step.memory import moved_seconds
from megaplan.cost.step.names import names_of
from megaplan.cost.step.predict import bandwidths, blocks_on, kinds_of, peak_of
from megaplan.cost.step.scan import scan_seconds
from megaplan.cost.step.transfers import transfer_seconds
from megaplan.cost.step.workload import TimedStep

Array = NDArray[np.float64]
MAX_STAGES = 4


class Table:
    """Steps as flat arrays of work; `seconds(logs)` computes the time of each."""

    def __init__(self, works: Sequence[TimedStep], constants: Sequence[str]) -> None:
        """`constants` gives the order of the values that `seconds` takes."""
        self.num_rows = len(works)
        self._index = {name: number for number, name in enumerate(constants)}
        self._factors: dict[tuple[str, ...], int] = {}
        self._flat: dict[str, list[tuple[float, ...]]] = {
            name: [] for name in ("products", "grouped", "attention", "drawn", "moved", "scans", "transfers", "kernels")
        }
        self.touches = np.zeros((len(works), len(constants)), bool)
        rates: dict[str, list[int]] = {}
        names = [names_of(work) for work in works]
        for row, found in enumerate(names):
            for factors in found.values():
                self.touches[row, [self._index[name] for name in factors]] = True
        for field in sorted(set().union(*names)):
            rates[field] = [self._factor(found[field]) if field in found else -1 for found in names]
        self._rates = {field: np.array(column) for field, column in rates.items()}
        for row, work in enumerate(works):
            self._add(row, work, names[row])
        self._arrays = {name: np.array(items, float).T for name, items in self._flat.items() if items}
        self._once = _columns([once_of(work) for work in works])
        self._counts = np.zeros((self.num_rows, MAX_STAGES))
        for row, work in enumerate(works):
            for stage, shape in enumerate(work.stages):
                self._counts[row, stage] = shape.count
        order = sorted(self._factors, key=self._factors.__getitem__)
        self._members = [np.array([self._index[name] for name in factors], int) for factors in order]

    def _factor(self, factors: tuple[str, ...]) -> int:
        return self._factors.setdefault(factors, len(self._factors))

    def _add(self, row: int, work: TimedStep, names: dict[str, tuple[str, ...]]) -> None:
        machine, links = work.machine, bandwidths(work)
        ledgers = {kind: ledger_of(work, kind) for kind in kinds_of(work)}
        factor = {field: float(self._factor(factors)) for field, factors in names.items()}
        for stage, shape in enumerate(work.stages):
            for kind, times in blocks_on(work, shape).items():
                if not times:
                    continue
                ledger, at = ledgers[kind], (row * MAX_STAGES + stage) * 2
                for run, dtype, flops, moved, quality, depth, count in ledger.products:
                    rates = (factor[f"product.{dtype}"], factor["memory"], factor["quality"], factor[f"depth.{dtype}"])
                    numbers = (flops, moved, quality, depth, peak_of(machine, dtype), machine.memory)
                    self._flat["products"].append((at + run, times * count, *numbers, *rates))
                for run, dtype, flops, weights, moved, rows, depth, count in ledger.grouped:
                    rates = (factor[f"product.{dtype}"], factor["memory"], factor["grouped"], factor["rows"], factor[f"depth.{dtype}"])
                    numbers = (flops, weights, moved, rows, depth, peak_of(machine, dtype), machine.memory)
                    self._flat["grouped"].append((at + run, times * count, *numbers, *rates, factor["weights"]))
                for run, backward, flops, blocks, width, sms, count in ledger.attention:
                    rates = (factor[f"attention.{backward}"], factor[f"spread.{backward}"])
                    self._flat["attention"].append((at + run, times * count, flops, blocks, width, sms, machine.peaks["bf16"], *rates))
                for run, drawn, speed in ledger.drawn:
                    self._flat["drawn"].append((at + run, times, drawn, machine.num_sms, speed))
                for run, kind_moved, moved in ledger.moved:
                    self._flat["moved"].append((at + run, times, moved, machine.memory, factor["memory"], factor[kind_moved]))
                for run, flops, moved in ledger.scans:
                    numbers = (flops, moved, machine.peaks["bf16"], machine.memory)
                    self._flat["scans"].append((at + run, times, *numbers, factor["scan"], factor["memory"]))
                for run, group, moved, calls in ledger.transfers:
                    rates = (factor[group], factor[f"{group}.latency"], factor[f"{group}.exposed"])
                    self._flat["transfers"].append((at + run, times, moved, calls, links[group], *rates))
                for run in (0, 1):
                    self._flat["kernels"].append((at + run, times, ledger.kernels[run], ledger.launched[run]))

    def seconds(self, logs: Array) -> Array:
        """Seconds of every row with these logarithms of the constants."""
        unit = np.array([np.exp(logs[members].sum()) for members in self._members])
        size, flat = self.num_rows * MAX_STAGES * 2, self._arrays

        def summed(name: str, seconds: Array) -> Array:
            array = flat[name]
            return np.bincount(array[0].astype(int), array[1] * seconds, size)

        def rate(column: Array) -> Array:
            return unit[column.astype(int)]

        work, waits = np.zeros(size), np.zeros(size)
        if "products" in flat:
            _, _, flops, moved, quality, depth, peak, memory, *rates = flat["products"]
            share, streamed, exponent, half = map(rate, rates)
            work += summed("products", product_seconds(flops, moved, quality, depth, peak * share, memory * streamed, exponent, half))
        if "grouped" in flat:
            _, _, flops, weights, moved, rows, depth, peak, memory, *rates = flat["grouped"]
            share, streamed, *rest = map(rate, rates)
            work += summed("grouped", grouped_seconds(flops, weights, moved, rows, depth, peak * share, memory * streamed, *rest))
        if "attention" in flat:
            _, _, flops, blocks, width, sms, peak, *rates = flat["attention"]
            share, spread = map(rate, rates)
            work += summed("attention", attention_seconds(flops, blocks, width, sms, peak * share, spread))
        if "drawn" in flat:
            work += summed("drawn", drawn_seconds(*flat["drawn"][2:]))
        if "moved" in flat:
            _, _, moved, memory, *rates = flat["moved"]
            streamed, factor = map(rate, rates)
            work += summed("moved", moved_seconds(moved, memory * streamed, factor))
        if "scans" in flat:
            _, _, flops, moved, peak, memory, *rates = flat["scans"]
            share, streamed = map(rate, rates)
            work += summed("scans", scan_seconds(flops, moved, peak * share, memory * streamed))
        if "transfers" in flat:
            _, _, moved, calls, link, *rates = flat["transfers"]
            share, latency, exposed = map(rate, rates)
            waits += summed("transfers", transfer_seconds(moved, calls, link * share, latency, exposed))
        _, _, kernels, launched = flat["kernels"]
        columns = [array.reshape(-1, MAX_STAGES, 2) for array in (work, summed("kernels", kernels), waits, summed("kernels", launched))]
        stages = []
        for stage in range(MAX_STAGES):
            passes = [PassTerms(*(column[:, stage, run] for column in columns)) for run in (0, 1)]
            stages.append(StageTerms(self._counts[:, stage], *passes, (self._counts[:, stage] > 0) * 1.0))
        resolved = {field: np.where(column < 0, 0.0, unit[column]) for field, column in self._rates.items()}
        for name in ("sync", "sync.backward"):
            resolved.setdefault(name, np.zeros(self.num_rows))
        return step_seconds(stages, self._once, resolved).total


def _columns(found: Sequence[Once]) -> Once:
    """Rows of numbers to numbers of rows."""
    columns = []
    for values in zip(*found, strict=True):
        if isinstance(values[0], Group):
            columns.append(Group(*(np.array(column, float) for column in zip(*values, strict=True))))
        else:
            columns.append(np.array(values, float))
    return Once(*columns)
