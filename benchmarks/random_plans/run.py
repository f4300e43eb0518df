"""Trace random plans, compare them with their estimates, and shrink each that is past tolerance to a small spec.

python benchmarks/random_plans/run.py --seed 0 --count 60          60 plans
python benchmarks/random_plans/run.py --spec FILE …                 these specs
python benchmarks/random_plans/run.py --list --seed 0 --count 60    what would be traced
python benchmarks/random_plans/run.py --write …                     docs/reference/accuracy-random.md too

Exits 1 if a plan fails: past tolerance, refused by megarun without a note of megaplan's, a negative cell, a crash, or too slow.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from megaplan.spec.document import parse_document  # noqa: E402
from random_plans.alone import Bench  # noqa: E402
from random_plans.choices import LARGE, SMALL, Scope  # noqa: E402
from random_plans.draw import draw  # noqa: E402
from random_plans.examine import FAILED, ILLEGAL, NOTED, OK, Verdict  # noqa: E402
from random_plans.page import PAGE, page  # noqa: E402
from random_plans.shrink import shrink  # noqa: E402

MOST_SHOWN = 4
"""Classes of one plan's failures that are written out."""


@dataclass(frozen=True, slots=True)
class Result:
    """One plan.

    Attributes:
        name: `seed 12`, or the file.
        document: Document as it was drawn or read.
        verdict: Verdict on the document.
        small: A spec that fails in the same class, if it was shrunk.
        small_verdict: Verdict on the small spec.
    """

    name: str
    document: dict[str, Any]
    verdict: Verdict
    small: dict[str, Any] | None = None
    small_verdict: Verdict | None = None


def specs(given: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Documents to trace, by name."""
    for path in given.spec:
        yield path, parse_document(Path(path).read_text(), path).value
    if not given.spec:
        for seed in range(given.seed, given.seed + given.count):
            yield f"seed {seed}", draw(seed, Scope.RUNTIME, SMALL if given.small else LARGE)


def describe(document: dict[str, Any]) -> str:
    """Pattern, layers, degrees, schedule, on one line."""
    model, schedule = document["model"], document.get("schedule", {})
    kinds = [section["kind"] for name in ("attention", "mamba") if "kind" in (section := model.get(name, {}))]
    degrees = " ".join(f"{axis} {degree}" for axis, degree in document.get("mesh", {}).items() if degree != 1)
    order = f"{schedule.get('kind', '1f1b')} {schedule.get('num_microbatches', 1)} x {schedule.get('steps_per_update', 1)}"
    host = document.get("host", {}).get("kernels", "reference")
    return f"{model['pattern']} x {model['num_layers']} {' '.join(kinds)}; {degrees or 'one rank'}; {order}; {host}"


def examined(bench: Bench, name: str, document: dict[str, Any], shrunk: Counter[str], given: argparse.Namespace) -> Result:
    """A plan's verdict; a failing one is shrunk, unless enough of its class have been."""
    verdict = bench.examine(document)
    if verdict.outcome != FAILED:
        return Result(name, document, verdict)
    wanted = verdict.failures[0].key
    shrunk[wanted] += 1
    if not given.shrink or (given.per_class and shrunk[wanted] > given.per_class):
        return Result(name, document, verdict)

    def fails(candidate: dict[str, Any]) -> bool:
        found = bench.examine(candidate, wanted)
        return any(failure.key == wanted for failure in found.failures)

    small = shrink(document, fails, given.shrink)
    return Result(name, document, verdict, small, bench.examine(small))


def report(result: Result) -> str:
    """The smallest spec of a failing plan, and how estimate and trace differ."""
    document, verdict = result.small or result.document, result.small_verdict or result.verdict
    lines = [f"{result.name} FAILED: {describe(result.document)}"]
    lines += [f"  {key} ({count}x)" for key, count in Counter(failure.key for failure in result.verdict.failures).items()]
    if result.small is not None:
        lines.append("smallest spec found:")
    lines += [f"    {line}" for line in yaml_text(document).splitlines()]
    wanted = result.verdict.failures[0].key
    first = {failure.key: failure for failure in reversed(verdict.failures)}  # the heaviest of each class
    for failure in sorted(first.values(), key=lambda failure: (failure.key != wanted, -failure.weight))[:MOST_SHOWN]:
        lines.append(f"  {failure.key}, rank {failure.rank}, {failure.weight:.2%}")
        lines += [f"      {line}" for line in failure.said]
    return "\n".join(lines)


class _Flow(yaml.SafeDumper):
    """Short mappings and lists on one line."""


def yaml_text(document: dict[str, Any]) -> str:
    """A spec as a person writes it."""
    return str(yaml.dump(document, Dumper=_Flow, sort_keys=False, default_flow_style=None, width=120))


def save(folder: Path, result: Result) -> None:
    """The smallest spec, and the report next to it."""
    name = Path(result.name).stem.replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.yaml").write_text(yaml_text(result.small or result.document))
    (folder / f"{name}.txt").write_text(report(result) + "\n")


def main() -> int:
    """Trace, print, shrink."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--spec", nargs="+", default=[], metavar="FILE")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--small", action="store_true", help="fewer ranks, layers and widths")
    parser.add_argument("--timeout", type=float, default=300, help="seconds after which a plan fails")
    parser.add_argument("--shrink", type=float, default=180, help="seconds for each failing plan; 0 for none")
    parser.add_argument("--per-class", type=int, default=0, help="shrink so many failing plans of a class; 0 for all")
    parser.add_argument("--save", type=Path, help="write each failing spec and its report into this folder")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    given = parser.parse_args()
    if given.list:
        for name, document in specs(given):
            print(f"{name}: {describe(document)}")
        return 0
    started, bench, results = time.monotonic(), Bench(given.timeout), list[Result]()
    with ThreadPoolExecutor(given.jobs) as pool:
        shrunk = Counter[str]()
        waiting = [pool.submit(examined, bench, name, document, shrunk, given) for name, document in specs(given)]
        for done in as_completed(waiting):
            results.append(result := done.result())
            verdict = result.verdict
            if verdict.outcome == FAILED:
                print(report(result), flush=True)
                if given.save:
                    save(given.save, result)
            else:
                said = f"{verdict.ranks} ranks, worst {verdict.worst:+.3%}" if verdict.outcome == OK else ", ".join(verdict.codes)
                print(f"{result.name} {verdict.outcome}: {describe(result.document)}; {said}; {verdict.seconds:.1f} s", flush=True)
    counts = Counter(result.verdict.outcome for result in results)
    classes = Counter(key for result in results for key in {failure.key for failure in result.verdict.failures})
    for key, count in classes.most_common():
        print(f"{count:4d} plans: {key}")
    shown = ", ".join(f"{counts[outcome]} {outcome}" for outcome in (OK, FAILED, NOTED, ILLEGAL))
    ranks = sum(result.verdict.ranks for result in results)
    print(f"{len(results)} plans: {shown}; {ranks} ranks; {time.monotonic() - started:.0f} s")
    if given.write:
        PAGE.write_text(page(given, [result.verdict for result in results]))
    return 1 if counts[FAILED] else 0


if __name__ == "__main__":
    sys.exit(main())
