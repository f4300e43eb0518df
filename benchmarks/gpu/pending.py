"""Lines of `benchmarks/pending.md`: what still needs a GPU, each with the jobs that settle it."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

HEAD = """# Lines that need a GPU and have not been run

`make gpu` runs them, ten minutes a call, cheap and important ones first (`benchmarks/gpu/run.py`); `make gpu RESUME=DIR` adds what a call
left. `benchmarks/gpu/page.py DIR` makes tables of the result, and with `--pending` this page without the lines that are done. The field
`done` of a file in `benchmarks/results` keeps what a call has done; a change of a kernel or of the step takes its jobs out.

| Line | Command | Left |
|---|---|---|"""


@dataclass(frozen=True, slots=True)
class Line:
    """One line.

    Attributes:
        text: The open question.
        jobs: Matches the names of the jobs that settle it; none for what one GPU can not.
        command: Command that runs its jobs.
    """

    text: str
    jobs: str
    command: str


LINES = (
    Line(
        "Kernels against fp64 at 1, 3, 300 and 2,048 tokens and one around a tile, bf16 and fp32, each twice for the same bits, after the"
        " changes since the first run",
        r"^checks/case ",
        "`make gpu ONLY=checks`",
    ),
    Line(
        "The kernel checks of `tests/kernels/interpreted` as they are, compiled, on the device",
        r"^checks/file ",
        "`make test-gpu`, or with the line above",
    ),
    Line("`make demo`'s training: 20 steps, losses within 1e-3 of the CPU's at fp32, again", r"^checks/demo$", "`make gpu ONLY=checks`"),
    Line(
        "Time of every operation: ratios to copy bandwidth and cuBLAS rate of the same run, peak bytes against the stated ones",
        r"^times/(?!.* by )",
        "`make gpu ONLY=times`",
    ),
    Line(
        "torch's flash and cuDNN attention, forward and backward, compared with ours on the same inputs: whether the choice in"
        " `ops/attention/vendor.py` is the fastest"
        " ([decision 11](../docs/decisions/0011-attention-forward-of-libraries-backward-of-its-own.md)); plain torch, and liger-kernel,"
        " flash-linear-attention and mamba-ssm where they are installed",
        r"^times/.* by ",
        "`make gpu ONLY=times`; a library that compiles: `--peer-seconds 60`",
    ),
    Line(
        "A step of NAM56R whole, a dense model of 4.5 billion parameters in bf16 and in eight bits, Mamba-2 of 1.3, hybrids of 1.1 and 2.1"
        " billion and Nemotron-3-Nano cut to 16 layers, each profiled by operation, after the changes since the first run",
        r"^train/.* eager$",
        "`make gpu ONLY=train`",
    ),
    Line(
        "First step of NAM56R from an empty cache, its kernels compiled ahead in parallel: 57 s one after another, the goal on 16 cores"
        " is 8 s",
        r"^train/nam56r eager$",
        "`make gpu ONLY=train`",
    ),
    Line(
        "The same with CUDA graphs, with the update as a graph too, and with compiled blocks: step time, memory, losses; torch's default"
        " allocator; four microbatches",
        r"^train/.* (graphs|step-graphs|compiled|default-allocator|4-microbatches)$",
        "`make gpu ONLY=train`",
    ),
    Line(
        "Allocated and reserved bytes of eighteen one-GPU plans and two in eight bits with Triton kernels, phase by phase, under both"
        " allocators, also at 32k and 128k tokens per sequence; a miss: `python benchmarks/gpu/run.py --explain NAME`",
        r"^memory/",
        "`make gpu ONLY=memory`",
    ),
    Line(
        "Candidates of launch options, each checked and timed: of kernels that changed since, and with masks, caps and packed rows",
        r"^tune/",
        "`make gpu ONLY=tune`",
    ),
    Line(
        "Reserve of the device with several ranks: what NCCL takes in addition to the context's 1.30 GiB, which one rank has",
        "",
        "two GPUs",
    ),
    Line("What NCCL keeps alive of sent tensors under interleaved 1F1B (gloo keeps all sends of a step)", "", "two GPUs"),
    Line(
        "Scratch inside the plain-torch operations (fp32 copies of their inputs and products of them): neither estimate nor trace counts"
        " it, a GPU with `host.kernels: reference` has it",
        "",
        "a spec of `benchmarks/gpu/specs` with `host.kernels: reference`",
    ),
    Line(
        "Optimizer state in host memory: page-locking, copies in a separate stream during the update, values bitwise those without it"
        " (they are in tests on a CPU), bytes, and the time of an update",
        "",
        "a spec of `benchmarks/gpu/specs` with `host.optimizer_offload: 1.0`",
    ),
    Line(
        "Activations in host memory: copies behind the layers that run, values bitwise those without them (they are in tests on a CPU),"
        " bytes, and the step's time",
        "",
        "a spec of `benchmarks/gpu/specs` with `host.activation_offload`",
    ),
)


def page(names: Iterable[str], statuses: Mapping[str, str]) -> Iterator[str]:
    """The page: lines of which a job is missing, with how many of how many are.

    Args:
        names: Names of all jobs.
        statuses: Last status of each that was started.
    """
    yield HEAD
    every = list(names)
    for line in LINES:
        wanted = [name for name in every if line.jobs and re.search(line.jobs, name)]
        missing = [name for name in wanted if statuses.get(name) != "done"]
        if missing or not line.jobs:
            left = f"{len(missing)} of {len(wanted)}" if line.jobs else ""
            yield f"| {line.text} | {line.command} | {left} |"
