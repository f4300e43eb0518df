"""Names of programs in a recorded script: the ones that run, and the ones that a stub replaces."""

from __future__ import annotations

import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_TOOLS = """
awk basename bc cat cmp comm cut date df dirname expr egrep false fgrep find fold gawk getconf getopt grep head id jq ls mawk mktemp nl
nproc numfmt od paste printenv printf pwd readlink realpath rev sed seq sort split stat sum tac tail test tr true tty uname uniq wc
whoami xargs yes
"""
TOOLS = frozenset(_TOOLS.split())
"""Tools for text, paths and numbers; they run."""
FILE_TOOLS = frozenset({"mkdir", "touch", "rm", "rmdir", "cp", "mv", "ln", "tee"})
"""Tools that write files; they run on paths of the mirror."""
SHELLS = frozenset({"bash", "sh", "zsh", "dash", "ksh"})
LAUNCHERS = frozenset({"torchrun", "deepspeed", "accelerate", "torchx"})
"""Programs that are recorded as a launch, with all arguments."""
BATCH = frozenset({"sbatch", "srun", "salloc"})
_WRAPPERS = """
exec command env nohup time timeout nice ionice numactl taskset setsid stdbuf sudo chroot unshare mpirun mpiexec mpiexec.hydra orterun
prun prterun horovodrun jsrun aprun flux bsub qsub ssh pdsh clush parallel docker podman nerdctl singularity apptainer enroot shifter
conda mamba micromamba uv poetry pipenv pixi nsys ncu gdb strace perf ray kubectl tmux screen dlrover-run
"""
WRAPPERS = frozenset(_WRAPPERS.split())
"""Programs that start another one, which is run in their place."""
ANSWERING = frozenset({"nvidia-smi", "scontrol", "hostname", "which"})
PYTHONS = frozenset({"python", "python2", "python3", *(f"python3.{minor}" for minor in range(6, 20))})
_OTHERS = """
pip pip3 git curl wget rsync scp nvcc rocm-smi huggingface-cli hf wandb aws gsutil gcloud make cmake gcc g++ ninja apt apt-get sleep
chmod chown kill pkill killall module sync tar unzip squeue scancel sinfo sacct ip ifconfig ibstat lscpu free ulimit ldconfig
"""
OTHERS = frozenset(_OTHERS.split())
"""Programs that do nothing, but that `command -v` finds. Programs of any other name do nothing either."""
STUBS = (
    FILE_TOOLS | {"sh", "zsh", "dash", "ksh"} | LAUNCHERS | BATCH | (WRAPPERS - {"exec", "command", "time"}) | ANSWERING | PYTHONS | OTHERS
)


def is_program(name: str) -> bool:
    """True if a word names a program that a wrapper starts."""
    return name in SHELLS | PYTHONS | LAUNCHERS | BATCH | WRAPPERS


def inner_program(words: Sequence[str], is_file: Callable[[str], bool]) -> tuple[int | None, bool]:
    """The place of the program that follows a wrapper's options, None if there is none; and True if the word is a complete command line.

    Args:
        words: The wrapper's command.
        is_file: True for the path of a file.
    """
    for place, word in enumerate(words[1:], 1):
        if re.match(r"[A-Za-z_]\w*=", word):
            continue
        within = " " in word and any(is_program(part.rpartition("/")[2]) for part in word.split())
        if within or is_program(word.rpartition("/")[2]) or (word.endswith((".sh", ".py")) and is_file(word)):
            return place, within
    return None, False
