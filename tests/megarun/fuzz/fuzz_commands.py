"""Mutated files and options, given to megaplan's commands as users give them: in this process, through the command line's own entry."""

import contextlib
import copy
import io
import json
import random
import unicodedata
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import yaml
from fuzz_inputs import ROOT, VALUES, Reader, json_bytes, mutated_bytes, mutated_tree, places_of

from megaplan.cli.main import run
from megaplan.plan.digests import plan_digest

SAMPLES = ROOT / "tests/megaplan/importers/models.json"
STATUSES = {0, 1, 2, 3}
Program = Callable[[list[str]], int]
"""Runs a command line in this process and returns its exit status."""
BUGS = ("MP499", "MP610", "Traceback")
"""Parts of an answer to an exception that no code handles."""
KEYS = (
    *("mesh.tp", "mesh.pp", "mesh.vpp", "mesh.cp", "mesh.ep", "mesh.dp_shard", "mesh.dp_replicate", "batch.seq_length"),
    *("batch.micro_batch_size", "model.num_layers", "model.vocab_size", "schedule.kind", "schedule.num_microbatches"),
    *("precision.params", "precision.grads", "recompute.default", "host", "host.name", "host.kernels", "device", "device.name"),
)
GOOD = ("1", "2", "3", "4", "8", "64", "512", "bf16", "fp32", "gpipe", "zbv", "full", "megatron", "triton", "b200", "{name: megatron}")
WORDS = ("0", "-1", "1e30", "9" * 400, "1048576", "281474976710656", "[1, 2", "null", "\x1b[31m", "a\nb", "../..", "é", "")
NUMBERS = (1, 2, 3, 5, 7, 8, 64, 100, 128, 1000, 4096, 8192, 65536, 2**20, 2**24, 2**31, 2**40, 2**48)


def other_numbers(tree: Any, draw: random.Random) -> Any:
    """A tree of which one to three whole numbers are others: the types stay, so that more is read than the types."""
    tree = copy.deepcopy(tree)
    places = [(parent, key) for parent, key in places_of(tree) if type(parent[key]) is int]
    for parent, key in draw.sample(places, min(len(places), draw.choice((1, 1, 2, 3)))):
        parent[key] = draw.choice(NUMBERS)
    return tree


KINDS = ("gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev")
TIMES = ("--forward", "--input", "--weight", "--p2p", "--hidden")
JOB = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 2
seq_len = 8192
compile = true
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
pipeline_parallel_degree = 4
pipeline_parallel_schedule = "Interleaved1F1B"
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
[quantize.linear.float8]
recipe_name = "rowwise"
filter_fqns = ["output"]
"""
ARGUMENTS = {
    "--num-layers": 4,
    "--hidden-size": 64,
    "--num-attention-heads": 4,
    "--seq-length": 128,
    "--micro-batch-size": 1,
    "--global-batch-size": 8,
    "--vocab-size": 1000,
    "--max-position-embeddings": 128,
    "--pipeline-model-parallel-size": 2,
    "--decoder-first-pipeline-num-layers": 2,
    "--num-experts": 4,
    "--moe-layer-freq": 2,
    "--bf16": True,
}


class WrongAnswerError(Exception):
    """A command's answer that no input may have."""


class Commands:
    """Writes one mutated input after another and runs a command on it; the readers say whether it was taken."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._specs = [path.read_bytes() for path in sorted((ROOT / "plans").glob("*.yaml"))]
        words = [f"  {name}" if value is True else f"  {name} {value}" for name, value in ARGUMENTS.items()]
        launch = " \\\n".join(["torchrun --nproc_per_node $GPUS --nnodes ${NODES:-1} pretrain_gpt.py", *words, '  --save "out/$NAME"'])
        self._script = f"#!/bin/bash\nexport GPUS=8 NAME='a b'  # a plain launch\n{launch}\n".encode()
        models = json.loads(SAMPLES.read_text())
        self._configs = [{"model_type": model["model_type"], **model["config"], **model["released"]} for model in models]
        self._costs = json.loads(answer(["costs", str(ROOT / "plans/tiny-hybrid.yaml")])[1])
        rows = [{"spec": str(ROOT / "plans/llama-3.1-8b.yaml"), "set": ["host={name: megatron}"], "step_seconds": 9.0}]
        self._rows: list[dict[str, Any]] = rows
        self._plan = json.loads((ROOT / "plans/tiny-hybrid-pp2.json").read_text())
        self._device_file = json.loads(answer(["calibrate", self._file("rows.json", json_bytes(rows)), "-o", "-"])[1])
        self._found = json.loads(
            answer(["search", str(ROOT / "plans/tiny-hybrid.yaml"), "--devices", "2", "--processes", "1", "--json"])[1]
        )
        self.readers: dict[str, Reader] = {
            "estimate": self.estimate,
            "import hf": self.config,
            "import megatron (script)": self.script,
            "import megatron (yaml)": self.arguments,
            "import megatron (words)": self.words,
            "costs file": self.costs,
            "calibrate": self.rows,
            "device file": self.device_file,
            "import torchtitan": self.job,
            "commands on a plan": self.plan,
            "report of a search": self.found,
            "schedule": self.schedule,
            "options": self.options,
        }

    def estimate(self, draw: random.Random) -> bool:
        """A spec with a few nodes changed."""
        return self._accepts(["estimate", self._file("spec.yaml", self._spec(draw))])

    def config(self, draw: random.Random) -> bool:
        """A Hugging Face config."""
        source = draw.choice(self._configs)
        data = json_bytes(self._changed(source, draw)) if draw.random() < 0.8 else mutated_bytes(json_bytes(source), draw)
        return self._accepts(["import", "hf", self._file("config.json", data)])

    def script(self, draw: random.Random) -> bool:
        """A plain launch script, in bytes or with a value changed; nothing is recorded."""
        source = self._script
        if draw.random() < 0.6:
            words = source.split(b" ")
            words[draw.randrange(len(words))] = str(draw.choice(VALUES)).encode("utf-8", "replace")
            source = b" ".join(words)
        else:
            source = mutated_bytes(source, draw)
        return self._accepts(["import", "megatron", self._file("run.sh", source)])

    def arguments(self, draw: random.Random) -> bool:
        """A YAML of arguments."""
        tree = {
            "MODEL_ARGS": {"--num-layers": 4, "--hidden-size": 64, "--num-attention-heads": 4, "--seq-length": 128, "--micro-batch-size": 1}
        }
        tree["MODEL_ARGS"] |= {"--global-batch-size": 8, "--vocab-size": 1000, "--bf16": True, "--max-position-embeddings": 128}
        data = yaml.safe_dump(mutated_tree(tree, draw)).encode()
        data = mutated_bytes(data, draw) if draw.random() < 0.3 else data
        return self._accepts(["import", "megatron", self._file("arguments.yaml", data)])

    def words(self, draw: random.Random) -> bool:
        """Arguments after `--`."""
        words = [word for name, value in ARGUMENTS.items() for word in ((name,) if value is True else (name, str(value)))]
        for _ in range(draw.choice((1, 2))):
            words[draw.randrange(len(words))] = draw.choice(
                (*GOOD, *WORDS, "--swiglu", "--num-experts", "--tensor-model-parallel-size", "--")
            )
        return self._accepts(["import", "megatron", "--", *words])

    def costs(self, draw: random.Random) -> bool:
        """A costs file with its spec."""
        source = json_bytes(self._costs)
        data = json_bytes(self._changed(self._costs, draw)) if draw.random() < 0.7 else mutated_bytes(source, draw)
        return self._accepts(["estimate", str(ROOT / "plans/tiny-hybrid.yaml"), "--costs", self._file("costs.json", data)])

    def rows(self, draw: random.Random) -> bool:
        """Measured steps."""
        data = json_bytes(self._changed(self._rows, draw)) if draw.random() < 0.7 else mutated_bytes(json_bytes(self._rows), draw)
        return self._accepts(["calibrate", self._file("rows.json", data), "--force", "-o", str(self._folder / "device.json")])

    def device_file(self, draw: random.Random) -> bool:
        """File that `calibrate` has written."""
        source = json_bytes(self._device_file)
        data = json_bytes(self._changed(self._device_file, draw)) if draw.random() < 0.7 else mutated_bytes(source, draw)
        words = ["estimate", str(ROOT / "plans/llama-3.1-8b.yaml"), "--set", "host={name: megatron}"]
        return self._accepts([*words, "--device-file", self._file("device.json", data)])

    def job(self, draw: random.Random) -> bool:
        """A job file of torchtitan, in bytes or with the value of a line changed."""
        lines = JOB.splitlines()
        if draw.random() < 0.7:
            at = draw.choice([number for number, line in enumerate(lines) if " = " in line])
            value = draw.choice((*VALUES, *GOOD))
            lines[at] = f"{lines[at].split(' = ')[0]} = {json.dumps(value)}" if draw.random() < 0.8 else lines[at]
            data = "\n".join(lines).encode("utf-8", "surrogatepass")
        else:
            data = mutated_bytes(JOB.encode(), draw)
        return self._accepts(
            ["import", "torchtitan", self._file("job.toml", data), "--gpus", draw.choice(("64", "64", "64", "64", "8", "0"))]
        )

    def plan(self, draw: random.Random) -> bool:
        """A plan, mostly with the digest of what it says now, under a command that reads plans."""
        tree = self._changed(self._plan, draw)
        if draw.random() < 0.8 and all(isinstance(tree.get(key), dict) for key in ("inputs", "decisions", "digests")):
            with contextlib.suppress(UnicodeEncodeError):  # half of a surrogate pair has no digest
                tree["digests"]["plan"] = plan_digest(tree["inputs"], tree["decisions"])
        path, whole = self._file("plan.json", json_bytes(tree)), str(ROOT / "plans/tiny-hybrid-pp2.json")
        command = draw.choice((["estimate"], ["show"], ["check"], ["diff", whole], ["diff", "--format", "markdown", whole]))
        return self._accepts([*command, path])

    def found(self, draw: random.Random) -> bool:
        """The document of a search, as `report` writes it into its page."""
        source = json_bytes(self._found)
        data = json_bytes(self._changed(self._found, draw)) if draw.random() < 0.8 else mutated_bytes(source, draw)
        return self._accepts(["report", self._file("found.json", data), "-o", str(self._folder / "report.html")])

    def schedule(self, draw: random.Random) -> bool:
        """Ranks, slots, microbatches and times of a schedule."""
        words = ["schedule", "--kind", draw.choice(KINDS)]
        for name in ("--pp", "--microbatches", "--vpp")[: 2 if draw.random() < 0.3 else 3]:
            words += [name, draw.choice(GOOD[:5] if draw.random() < 0.8 else WORDS)]
        for name in draw.sample(TIMES, draw.choice((0, 1, 3))):
            words += [name, str(draw.choice(NUMBERS)) if draw.random() < 0.7 else draw.choice(WORDS)]
        return self._accepts([*words, *(("--csv",) if draw.random() < 0.2 else ())])

    def options(self, draw: random.Random) -> bool:
        """Options and overrides."""
        command = draw.choice((["estimate"], ["split"], ["costs"], ["export", "--to", draw.choice(("fsdp2", "megatron", "x"))]))
        source = ROOT / "plans" / draw.choice(("tiny-hybrid.yaml", "tiny-hybrid-pp2.yaml", "mixtral-8x7b.yaml"))
        words = [*command, str(source)]
        for _ in range(draw.choice((1, 1, 2, 3))):
            words += ["--set", f"{draw.choice(KEYS)}={draw.choice(GOOD if draw.random() < 0.7 else WORDS)}"]
        if draw.random() < 0.3:
            words += [draw.choice(("--rank", "--compare", "--mode", "--baseline", "--json", "--nonsense")), draw.choice(WORDS)]
        return self._accepts(words)

    def _spec(self, draw: random.Random) -> bytes:
        source = draw.choice(self._specs)
        if draw.random() < 0.3:
            return mutated_bytes(source, draw)
        return yaml.safe_dump(self._changed(yaml.safe_load(source), draw)).encode()

    def _changed(self, tree: Any, draw: random.Random) -> Any:
        return other_numbers(tree, draw) if draw.random() < 0.5 else mutated_tree(tree, draw)

    def _file(self, name: str, data: bytes) -> str:
        path = self._folder / name
        path.write_bytes(data)
        return str(path)

    def _accepts(self, words: list[str]) -> bool:
        return accepts(words)


def accepts(words: list[str], program: Program = run, statuses: Collection[int] = STATUSES) -> bool:
    """True if a command takes what it is given, False if it refuses it.

    Raises:
        WrongAnswerError: It has another exit status, reports a bug, or prints a control character.
    """
    status, printed, said = answer(words, program)
    if status not in statuses or any(code in said for code in BUGS):
        raise WrongAnswerError(f"{words}: exit {status}, {said[-300:]}")
    for text in (printed, said):
        if bad := sorted({letter for letter in text if letter not in "\n\t" and unicodedata.category(letter) in ("Cc", "Cf", "Cs")}):
            raise WrongAnswerError(f"{words}: {bad} are printed")
    return status in (0, 1) and "error[" not in said


def answer(words: list[str], program: Program = run) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of one command of megaplan, or of another program."""
    printed, said = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(said):
        status = program(words)
    return status, printed.getvalue(), said.getvalue()
