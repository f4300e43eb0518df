"""Command lines drawn by hypothesis from the parser's own options, on mutated files: those of this tree, and real ones of a folder."""

import contextlib
import json
import random
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import typer
import yaml
from fuzz_commands import STATUSES, answer, other_numbers
from fuzz_inputs import CASE_SECONDS, ROOT, json_bytes, mutated_bytes, mutated_tree, too_long
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from megaplan.cli.main import _app
from megaplan.spec.models import Spec

SUFFIXES = (".json", ".yaml", ".yml", ".sh", ".toml", ".jsonl", ".md")
SPECS, MADE = "spec.yaml", "plan.json"
"""Kinds of files of this tree, in place of a suffix."""
LARGEST_FILE = 1 << 16
LEFT_OUT = {"--fetch", "--record", "--launch", "--unconfined", "--processes", "--seconds", "--exhaust", "--help"}
"""Options that reach the network, start programs, or ask for more time."""
SEARCHES = {"search": ["--processes", "1", "--seconds", "1"], "project": ["--processes", "1"], "rl": ["--seconds", "1"]}
KEPT = ROOT / "runs/fuzz"
"""Files of command lines that are answered wrongly."""
MORE_SECONDS = {"search": 1.0, "rl": 1.0}
"""Time that a command is given by its options."""
UNITS = ("", "", "", "k", "K", "M", "B", "T", "GiB", "GB/s", "h", "m", "s", "ms", "d", "kW", "%", "x")
PRINTED = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=24).filter(lambda text: "\0" not in text)
NUMBERS = st.one_of(
    st.integers(-2, 16).map(str),
    st.sampled_from((32, 64, 100, 128, 256, 512, 1024, 4096, 8192, 65536)).map(str),
    st.integers(-(2**70), 2**70).map(str),
    st.floats().map(str),
)
SMALL = st.sampled_from((1, 2, 4, 8, 16, 64, 512, 4096)).map(str)
AMOUNTS = st.tuples(NUMBERS, st.sampled_from(UNITS)).map("".join)
TREES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-4, 2**40), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=6)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)),
    max_leaves=6,
)
NAMES = ("megarun", "megatron", "torchtitan", "h100", "B200", "bf16", "fp8", "fp32", "full", "none", "1f1b", "zbv", "gpipe", "markdown")
LOOSE = st.one_of(
    AMOUNTS,
    st.lists(AMOUNTS, min_size=1, max_size=4).map(",".join),
    st.tuples(NUMBERS, NUMBERS).map("..".join),
    st.sampled_from(NAMES),
    TREES.map(json.dumps),
    PRINTED,
)


@dataclass
class Answers:
    """Answers of a run: how often each command was taken and refused, the slowest, and what went wrong."""

    taken: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    slowest: tuple[float, str] = (0.0, "")


@cache
def commands() -> dict[tuple[str, ...], list[Any]]:
    """Parameters of every command of megaplan, by its words."""

    def walk(command: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], list[Any]]]:
        inner = getattr(command, "commands", {})
        for name, each in inner.items():
            yield from walk(each, (*words, name))
        if not inner:
            yield words, [each for each in command.params if not LEFT_OUT & set(each.opts)]

    return dict(walk(typer.main.get_command(_app([])), ()))


@cache
def keys() -> tuple[str, ...]:
    """Dotted keys of a spec, by its schema."""
    schema = Spec.model_json_schema()
    found = set()

    def walk(node: Any, path: str, depth: int) -> None:
        for each in (*node.get("anyOf", ()), *node.get("oneOf", ()), node):
            if "$ref" in each:
                each = schema["$defs"][each["$ref"].rpartition("/")[2]]  # noqa: PLW2901
            for name, inner in each.get("properties", {}).items():
                key = f"{path}.{name}" if path else name
                found.add(key)
                if depth:
                    walk(inner, key, depth - 1)

    walk(schema, "", 3)
    return tuple(sorted(found))


def files_of(folder: Path | None) -> dict[str, list[bytes]]:
    """Contents of files by suffix: plans and specs of this tree, configs of its tests, and those of a folder."""
    found: dict[str, list[bytes]] = {suffix: [] for suffix in SUFFIXES}
    models = json.loads((ROOT / "tests/megaplan/importers/models.json").read_text())
    found[".json"] += [json_bytes({"model_type": each["model_type"], **each["config"], **each["released"]}) for each in models]
    roots = [ROOT / "plans", *([folder] if folder is not None else [])]
    for path in sorted(path for root in roots for path in root.rglob("*") if path.suffix in SUFFIXES and path.is_file()):
        if path.stat().st_size <= LARGEST_FILE:
            found[path.suffix].append(path.read_bytes())
    found[SPECS] = [path.read_bytes() for path in sorted((ROOT / "plans").glob("*.yaml"))]
    found[MADE] = [path.read_bytes() for path in sorted((ROOT / "plans").glob("*.json"))]
    return {suffix: contents for suffix, contents in found.items() if contents}


def changed(data: bytes, suffix: str, draw: random.Random) -> bytes:
    """The contents of a file as they are, with nodes of their tree changed, or in bytes."""
    choice = draw.random()
    if choice < 0.35:
        return data
    if choice < 0.8 and suffix.endswith((".json", ".yaml", ".yml")):
        try:
            tree = json.loads(data) if suffix.endswith(".json") else yaml.safe_load(data)
        except (ValueError, yaml.YAMLError, RecursionError):
            return mutated_bytes(data, draw)
        tree = other_numbers(tree, draw) if choice < 0.6 else mutated_tree(tree, draw)
        return json_bytes(tree) if suffix.endswith(".json") else yaml.safe_dump(tree).encode("utf-8", "surrogatepass")
    if choice < 0.8:
        lines = data.splitlines(keepends=True) or [b""]
        at = draw.randrange(len(lines))
        lines[at : at + 1] = draw.choice(([], [lines[at]] * 2, [draw.choice(lines)], [re.sub(rb"\d+", b"7", lines[at])]))
        return b"".join(lines)
    return mutated_bytes(data, draw)


@st.composite
def command_lines(draw: Any, folder: Path, files: dict[str, list[bytes]]) -> list[str]:
    """A command with options that it has, and values that may fit them."""
    words = draw(st.sampled_from(sorted(commands())))
    parameters = commands()[words]
    options = [each for each in parameters if each.param_type_name == "option"]
    line = [*words, *SEARCHES.get(words[0], ())]
    for each in parameters:
        if each.param_type_name == "argument":
            count = draw(st.integers(0, 3)) if each.nargs < 0 else draw(st.sampled_from((1, 1, 1, 1, 1, 1, 1, 0, 2)))
            line += [draw(_subject(folder, files, words)) for _ in range(count)]
    chosen = draw(st.lists(st.sampled_from(options), max_size=draw(st.sampled_from((0, 1, 1, 2, 4))))) if options else []
    required = [each for each in options if each.required and draw(st.integers(0, 9))]
    for each in (*required, *chosen):
        line.append(each.opts[0])
        if not each.is_flag:
            line.append(draw(_value(folder, files, words, each)))
    return line


def _subject(folder: Path, files: dict[str, list[bytes]], words: Sequence[str]) -> st.SearchStrategy[str]:
    if words[0] in ("explain", "devices", "schema", "new"):
        topics = ("MP301", "MFU", "fragmentation", "h100", "spec", "plan", "model", "MP9999")
        return st.one_of(st.sampled_from(topics), PRINTED)
    made = st.builds(
        lambda number, suffix: _written(folder, files, suffix, number), st.integers(0, 2**32), st.sampled_from(_suffixes(files, words))
    )
    shipped = st.sampled_from(sorted(str(path) for path in (ROOT / "plans").iterdir()))
    return st.one_of(made, made, made, shipped, PRINTED)


def _suffixes(files: dict[str, list[bytes]], words: Sequence[str]) -> list[str]:
    wanted = {"hf": [".json"], "megatron": [".sh", ".yaml"], "torchtitan": [".toml"]}
    wanted |= {name: [MADE] for name in ("show", "check", "sign", "diff")}
    return [each for each in wanted.get(words[-1], [SPECS, SPECS, MADE]) * 6 + list(SUFFIXES) if each in files]


def _written(folder: Path, files: dict[str, list[bytes]], suffix: str, number: int) -> str:
    draw = random.Random(number)
    path = folder / f"file-{number % 4}.{suffix.rpartition('.')[2]}"
    path.write_bytes(changed(draw.choice(files[suffix]), suffix, draw))
    return str(path)


def _value(folder: Path, files: dict[str, list[bytes]], words: Sequence[str], option: Any) -> st.SearchStrategy[str]:
    name = option.opts[0]
    if name == "--set":
        return st.one_of(st.tuples(st.sampled_from(keys()), LOOSE).map("=".join), PRINTED)
    if name in ("--output", "--svg", "--key"):
        places = (folder / "out", folder, folder / "missing" / "out", Path("/dev/full"), folder / "out.json")
        return st.sampled_from([*(str(place) for place in places), "-"])
    if name in ("--costs", "--device-file", "--profile", "--changed", "--spec", "--signer"):
        return _subject(folder, files, words)
    words_of = [each for each in re.split(r"[|,\[\] ]+", option.metavar or "") if each.islower()]
    if words_of:
        return st.one_of(st.sampled_from(words_of), st.sampled_from(words_of), LOOSE)
    if option.bare_type in (int, float):
        return st.one_of(SMALL, SMALL, NUMBERS, LOOSE)
    return st.one_of(LOOSE, SMALL)


def run_lines(folder: Path, files: dict[str, list[bytes]], count: int, number: int, seconds: float = CASE_SECONDS) -> Answers:
    """Run so many command lines of a seed in this process, each within a limit, and check each answer."""
    found = Answers()

    @seed(number)
    @settings(max_examples=count, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(command_lines(folder, files))
    def check(line: list[str]) -> None:
        _check(line, found, seconds)

    before = signal.signal(signal.SIGPROF, too_long)
    try:
        with contextlib.chdir(folder):  # where commands write by default
            check()
    finally:
        signal.signal(signal.SIGPROF, before)
    return found


def _check(line: list[str], found: Answers, seconds: float) -> None:
    command = " ".join(line[:2] if line[0] == "import" else line[:1])
    signal.setitimer(signal.ITIMER_PROF, seconds + MORE_SECONDS.get(line[0], 0.0))
    began = time.process_time()
    try:
        status, _, said = answer(line)
    except BaseException as error:
        found.wrong.append(f"{_keep(line)}: {type(error).__name__}: {str(error)[-300:]}")
        return
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    found.slowest = max(found.slowest, (time.process_time() - began, str(line)))
    (found.taken if status in (0, 1, 3) else found.refused)[command] += 1
    if status not in STATUSES or any(each in said for each in ("error[MP499]", "error[MP610]", "Traceback (most")):
        found.wrong.append(f"{_keep(line)}: exit {status}, {said[-400:]}")


def _keep(line: list[str]) -> list[str]:
    """The line, on copies of its files, since the next lines write others of their names."""
    kept = []
    for word in line:
        path = Path(word)
        if path.parent.name == "lines" and path.is_file():
            KEPT.mkdir(parents=True, exist_ok=True)
            word = shutil.copy(path, KEPT / f"{time.time_ns()}{path.suffix}")  # noqa: PLW2901
        kept.append(str(word))
    return kept
