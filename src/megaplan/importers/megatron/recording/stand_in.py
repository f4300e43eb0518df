"""What stands in for a program while a launch script is recorded; it is run outside of the package, with the standard library alone.

A shell goes on under observation, a wrapper becomes the program behind it, tools of files work in the mirror,
a launch is written to the record, and every other program is written to the record and does nothing.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time

TYPE_CHECKING = False  # one starts for every program of a script: it imports no more than it needs
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

_TOOLS = """
awk basename bc cat cmp comm cut date df dirname expr egrep false fgrep find fold gawk getconf getopt grep head id jq ls mawk mktemp nl
nproc numfmt od paste printenv printf pwd readlink realpath rev sed seq sort split stat sum tac tail test tr true tty uname uniq wc
whoami xargs yes
"""
TOOLS = frozenset(_TOOLS.split())
"""Programs of text, names and numbers: they run."""
FILE_TOOLS = frozenset({"mkdir", "touch", "rm", "rmdir", "cp", "mv", "ln", "tee"})
"""They run on paths of the mirror."""
SHELLS = frozenset({"bash", "sh", "zsh", "dash", "ksh"})
LAUNCHERS = frozenset({"torchrun", "deepspeed", "accelerate", "torchx"})
"""They are recorded as a launch, with all of their words."""
BATCH = frozenset({"sbatch", "srun", "salloc"})
_WRAPPERS = """
exec command env nohup time timeout nice ionice numactl taskset setsid stdbuf sudo chroot unshare mpirun mpiexec mpiexec.hydra orterun
prun prterun horovodrun jsrun aprun flux bsub qsub ssh pdsh clush parallel docker podman nerdctl singularity apptainer enroot shifter
conda mamba micromamba uv poetry pipenv pixi nsys ncu gdb strace perf ray kubectl tmux screen dlrover-run
"""
WRAPPERS = frozenset(_WRAPPERS.split())
"""The program behind their options is run in their place."""
ANSWERING = frozenset({"nvidia-smi", "scontrol", "hostname", "which"})
PYTHONS = frozenset({"python", "python2", "python3", *(f"python3.{minor}" for minor in range(6, 20))})
_OTHERS = """
pip pip3 git curl wget rsync scp nvcc rocm-smi huggingface-cli hf wandb aws gsutil gcloud make cmake gcc g++ ninja apt apt-get sleep
chmod chown kill pkill killall module sync tar unzip squeue scancel sinfo sacct ip ifconfig ibstat lscpu free ulimit ldconfig
"""
OTHERS = frozenset(_OTHERS.split())
"""They do nothing, as every program that has no name here; those that scripts look for by `command -v` are found."""
STAND_INS = (
    FILE_TOOLS | {"sh", "zsh", "dash", "ksh"} | LAUNCHERS | BATCH | (WRAPPERS - {"exec", "command", "time"}) | ANSWERING | PYTHONS | OTHERS
)
FOLDER = os.environ.get("MEGAPLAN_FOLDER", "")
TREE = f"{FOLDER}/tree"
MAX_RECORDS, MAX_COPY_BYTES = 2_000, 2**20
MANY_ARGUMENTS = 8
"""Arguments that begin with `--` from which on a program that has no name here is taken for a launch."""
_VARIABLE = re.compile(r"[A-Za-z_]\w*=")
_WORD = r"""(?:'[^']*'|"(?:\\.|[^"\\])*"|\\.|\$\((?:[^()]|\([^()]*\))*\)|[^\s'"\\;&|<>()])+"""
_REDIRECT = re.compile(
    rf"""(?P<sign>(?:\b\d+|&)?(?<!<)>>?\|?)[ \t]*(?P<target>{_WORD})|'[^']*'|"(?:\\.|[^"\\])*"|\\.|\$\((?:[^()]|\([^()]*\))*\)""", re.DOTALL
)
_DIRECTIVE = re.compile(r"^#SBATCH\s+(.*)$", re.MULTILINE)
_SLURM = {
    **dict.fromkeys(("-N", "--nodes"), ("SLURM_NNODES", "SLURM_JOB_NUM_NODES")),
    **dict.fromkeys(("-n", "--ntasks"), ("SLURM_NTASKS", "SLURM_NPROCS")),
    "--ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
    "--gpus-per-node": ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"),
    "--gres": ("SLURM_GPUS_ON_NODE",),
    **dict.fromkeys(("-c", "--cpus-per-task"), ("SLURM_CPUS_PER_TASK",)),
}
_JOB = {"SLURM_JOB_ID": "1", "SLURM_JOBID": "1", "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0", "SLURM_JOB_NAME": "job"}


def write(kind: str, words: Sequence[str], said: str = "") -> None:
    """Add a line to the record."""
    if len(os.listdir(f"{FOLDER}/records")) >= MAX_RECORDS:
        return
    row = {"kind": kind, "words": list(words), "said": said, "at": os.environ.get("MEGAPLAN_AT", ""), "environment": dict(os.environ)}
    path = f"{FOLDER}/records/{time.time_ns()}-{os.getpid()}-{kind}"
    with open(path, "w", encoding="utf-8") as file:
        file.write(json.dumps(row))
    os.rename(path, f"{path}.json")


def say(text: str) -> None:
    """Print a line for the script."""
    sys.stdout.write(f"{text}\n")


def run(words: Sequence[str]) -> int:
    """What the words would start."""
    name = words[0].rpartition("/")[2] or words[0]
    for listed, act in (
        (SHELLS, shell),
        (PYTHONS, python),
        (BATCH, batch),
        (FILE_TOOLS, file_tool),
        (ANSWERING, answer),
        (WRAPPERS, wrapped),
    ):
        if name in listed:
            return act(words)
    path = placed(words[0])
    if words[0] == "absent":
        write("absent", words[1:])
    elif words[0] == "unset":
        write("unset", unset(words[1], words[2:]))
    elif words[0] == "variable":
        write("variable", words[1:])
    elif name in TOOLS:
        replace([f"{os.environ['MEGAPLAN_BIN']}/{name}", *words[1:]])
    elif is_script(path) and name not in LAUNCHERS:
        return shell(["bash", path, *words[1:]])
    else:
        write("launch" if name in LAUNCHERS or sum(word.startswith("--") for word in words) >= MANY_ARGUMENTS else "other", words)
    return 0


def unset(path: str, variables: Sequence[str]) -> list[str]:
    """Of variables that are not set at the end of a script, those that it reads without a default and never sets."""
    with open(path, encoding="utf-8", errors="replace") as file:
        text = re.sub(r"^\s*#.*$|'[^'\n]*'", "", file.read(1 << 20), flags=re.MULTILINE)
    found = []
    for name in variables:
        reads = re.search(rf"\${name}\b|\$\{{{name}[}}\[/%#]", text)
        sets = re.search(
            rf"\b(for|read|local|declare|printf -v|mapfile|readarray|unset)\b[^\n;|&]*\b{name}\b|\b{name}(\[[^]]*\])?\+?=", text
        )
        if reads and not sets:
            found.append(name)
    return found


def shell(words: Sequence[str]) -> int:
    """Bash with the same words; of a script with Slurm's directives it finds the variables that a job would."""
    rest = list(words[1:])
    place = next((index for index, word in enumerate(rest) if not word.startswith(("-", "+"))), None)
    if place is not None and not any(re.fullmatch(r"-[a-z]*c", word) for word in rest[:place]):
        rest[place] = placed(rest[place]) if rest[place].startswith("/") else rest[place]
        directives(rest[place])
    return replace([os.environ["MEGAPLAN_BASH"], *rest])


def python(words: Sequence[str]) -> int:
    """A launch, or a short program in the script itself, which runs where the kernel confines it."""
    rest = list(words[1:])
    while rest and rest[0].startswith("-") and rest[0] not in ("-c", "-m", "-", "-V", "--version"):
        rest = rest[2 if rest[0] in ("-W", "-X") else 1 :]
    if rest[:1] in (["-V"], ["--version"]):
        say(f"Python {sys.version.split()[0]}")
        return 0
    if not rest or rest[0] in ("-c", "-"):
        code = rest[1] if rest[:1] == ["-c"] and len(rest) > 1 else sys.stdin.read(1 << 20)
        if os.environ.get("MEGAPLAN_CONFINED") != "1":
            write("other", words)
            return 1
        path, child = f"{FOLDER}/errors-{os.getpid()}", os.fork()
        if not child:  # no pipe of its errors: a process that it leaves behind would hold it open
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            replace([sys.executable, "-I", "-S", "-c", code, *rest[2:]])
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status:
            with open(path, encoding="utf-8", errors="replace") as errors:
                write("failed", words, errors.read(1 << 16).strip().rpartition("\n")[2][:200])
        return status
    write("launch", words)
    return 0


def batch(words: Sequence[str]) -> int:
    """sbatch, srun and salloc: their options are a job's variables, the program behind them runs."""
    if words[0].rpartition("/")[2] != "sbatch":
        return wrapped(words)
    for key, value in _JOB.items():
        os.environ.setdefault(key, value)
    wrap = next((word.partition("=")[2] or words[place + 1] for place, word in enumerate(words) if word.split("=")[0] == "--wrap"), None)
    if wrap is not None:
        slurm(words[1:])
        replace([os.environ["MEGAPLAN_BASH"], "-c", wrap])
    place = next(
        (place for place, word in enumerate(words) if place and os.path.isfile(placed(word)) and not word.startswith("-")), len(words)
    )
    path = placed(words[place]) if place < len(words) else f"{FOLDER}/batch-{os.getpid()}.sh"
    if place == len(words):
        with open(path, "w", encoding="utf-8") as file:
            file.write(sys.stdin.read(1 << 20))
    slurm(words[1:place])
    directives(path)
    return replace([os.environ["MEGAPLAN_BASH"], path, *words[place + 1 :]])


def wrapped(words: Sequence[str]) -> int:
    """The program behind a wrapper's options; of `ssh` and its like a single word that is a command."""
    for place, word in enumerate(words[1:], 1):
        name = word.rpartition("/")[2]
        if _VARIABLE.match(word):
            key, _, value = word.partition("=")
            if key not in ("PATH", "BASH_ENV") and not key.startswith("MEGAPLAN_"):
                os.environ[key] = value
            continue
        is_file = os.path.isfile(placed(word))
        within = " " in word and any(is_program(part.rpartition("/")[2]) for part in word.split())
        if not (within or is_program(name) or (is_file and word.endswith((".sh", ".py")))):
            continue
        (slurm if words[0].rpartition("/")[2] in BATCH else tasks)(words[:place])
        if within:
            return shell(["bash", "-c", word])
        return run([*(["bash"] if name.endswith(".sh") else ["python"] if name.endswith(".py") else []), *words[place:]])
    write("other", words)
    return 0


def is_program(name: str) -> bool:
    """Whether a word can only be what a wrapper starts."""
    return name in SHELLS | PYTHONS | LAUNCHERS | BATCH | WRAPPERS


def tasks(words: Sequence[str]) -> None:
    """Processes that a launcher of MPI starts."""
    if words[0].rpartition("/")[2] in ("mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prun", "prterun", "horovodrun", "jsrun", "aprun"):
        for place, word in enumerate(words[:-1]):
            if word in ("-n", "-np", "--np", "-c", "--n") and words[place + 1].isdigit():
                os.environ["MEGAPLAN_TASKS"] = words[place + 1]


def slurm(words: Sequence[str]) -> None:
    """Variables of a job with these options."""
    for place, word in enumerate(words):
        key, equals, value = word.partition("=")
        if not equals and re.fullmatch(r"-[NncG]\d+", word):
            key, value = word[:2], word[2:]
        elif not equals:
            value = words[place + 1] if place + 1 < len(words) else ""
        number = re.search(r"(\d+)$", value)
        if key in _SLURM and number is not None:
            os.environ.update(dict.fromkeys(_SLURM[key], number[1]))
        if key == "--export":
            os.environ.update(part.split("=", 1) for part in value.split(",") if "=" in part)
    nodes, each = os.environ.get("SLURM_NNODES"), os.environ.get("SLURM_NTASKS_PER_NODE")
    if nodes is not None and nodes.isdigit():
        os.environ["SLURM_NODELIST"] = os.environ["SLURM_JOB_NODELIST"] = f"node[1-{nodes}]" if int(nodes) > 1 else "node1"
        if each is not None and each.isdigit():
            os.environ.setdefault("SLURM_NTASKS", str(int(nodes) * int(each)))


def directives(path: str) -> None:
    """Variables of the job whose directives a script has."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            found = _DIRECTIVE.findall(file.read(1 << 20))
    except OSError:
        return
    if found:
        for key, value in _JOB.items():
            os.environ.setdefault(key, value)
        given = {key: value for key, value in os.environ.items() if key.startswith("SLURM_")}
        slurm([word for line in found for word in line.partition(" #")[0].split()])
        os.environ.update(given)


def file_tool(words: Sequence[str]) -> int:
    """mkdir, cp, tee and their like on paths of the mirror; one that a link leads out of it is left alone."""
    name = words[0].rpartition("/")[2]
    options, given = [word for word in words[1:] if word.startswith("-")], [word for word in words[1:] if not word.startswith("-")]
    places = [placed(word) if name != "ln" or word is given[-1] else word for word in given]
    for path in places[-1:] if name in ("cp", "ln", "mv") else places:
        copy_up(path, TREE)
        if name in ("mkdir", "touch", "tee", "cp", "mv", "ln"):
            os.makedirs(os.path.dirname(path), exist_ok=True)
    status = os.spawnv(os.P_WAIT, f"{FOLDER}/tools/{name}", [name, *options, "--", *places])
    return status if name == "rmdir" else 0


def placed(path: str) -> str:
    """The absolute path in the mirror; one of the recording's own, and a device, is itself."""
    current = os.environ.get("PWD", "")
    path = os.path.normpath(os.path.join(current if current.startswith("/") else os.getcwd(), path))
    return path if path.startswith((f"{FOLDER}/", "/dev/", "/proc/self/")) else f"{TREE}{path}"


def copy_up(path: str, tree: str, home: str = "", *, copies: bool = False) -> None:
    """Make the folders above a path of the mirror real ones, whose entries are links, and a file to write a copy.

    Args:
        path: In the mirror; another is left alone.
        tree: The mirror's root.
        home: A folder in which, and above which, dotfiles are left out: keys, and profiles of shells.
        copies: Small files of the last folder are copies, not links.
    """
    if not path.startswith(f"{tree}/"):
        return
    home = home or os.environ.get("HOME", "")[len(tree) :]
    parts = path[len(tree) :].split("/")
    for depth in range(1, len(parts)):
        real = "/".join(parts[:depth]) or "/"
        folder = f"{tree}{real}".rstrip("/")
        if os.path.islink(folder):
            os.unlink(folder)
        elif os.path.isdir(folder):
            continue
        os.makedirs(folder, exist_ok=True)
        for entry in os.scandir(real) if os.path.isdir(real) and os.access(real, os.R_OK | os.X_OK) else ():
            target, hidden = f"{folder}/{entry.name}", entry.name.startswith(".") and f"{home}/".startswith(f"{real.rstrip('/')}/")
            if (
                copies
                and depth == len(parts) - 1
                and entry.is_file()
                and entry.stat().st_size <= MAX_COPY_BYTES
                and os.access(entry, os.R_OK)
            ):
                copied(entry.path, target)
            elif not hidden and not os.path.lexists(target):
                os.symlink(entry.path, target)
    if os.path.islink(path) and os.path.isfile(path):
        real = os.path.realpath(path)
        os.unlink(path)
        if os.path.getsize(real) <= MAX_COPY_BYTES:
            copied(real, path)


def copied(source: str, path: str) -> None:
    """Copy the bytes of a small file."""
    with open(source, "rb") as read, open(path, "wb") as written:
        written.write(read.read(MAX_COPY_BYTES))


def target(path: str) -> str:
    """Where a redirection into a file goes: its place in the mirror, whose folder is made."""
    path = placed(path) + ("/." if path.endswith("/.") else "")
    copy_up(path, TREE)
    if path.startswith(f"{TREE}/"):
        os.makedirs(os.path.dirname(path), exist_ok=True)
    return path


def answer(words: Sequence[str]) -> int:
    """Answers about the machine: its GPUs, the job's nodes, its own name, and where a program is."""
    name, gpus = words[0].rpartition("/")[2], int(os.environ.get("MEGAPLAN_GPUS", "8"))
    query = next((word.partition("=")[2] for word in words if word.startswith("--query-gpu")), None)
    if name == "nvidia-smi":
        write("answered", words, f"{gpus} GPUs")
    if name == "nvidia-smi" and query is not None:
        if not any("noheader" in word for word in words):
            say(query)
        for index in range(gpus):
            say(", ".join({"index": str(index), "count": str(gpus)}.get(field.strip(), f"GPU {index}") for field in query.split(",")))
    elif name == "nvidia-smi":
        say("\n".join(f"GPU {index}: GPU {index} (UUID: GPU-{index})" for index in range(gpus)))
    elif name == "scontrol" and "hostnames" in words:
        for index in range(int(os.environ.get("SLURM_NNODES", "1"))):
            say(f"node{index + 1}")
    elif name == "hostname":
        say("127.0.0.1" if any(word.lower() in ("-i", "--ip-address") for word in words) else "node1")
    elif name == "which":
        found = [f"{os.environ['MEGAPLAN_BIN']}/{word}" for word in words[1:] if os.path.exists(f"{os.environ['MEGAPLAN_BIN']}/{word}")]
        say("\n".join(found))
        return 0 if found else 1
    return 0


def is_script(path: str) -> bool:
    """Whether a file is a shell's."""
    try:
        with open(path, "rb") as file:
            head = file.read(128).split(b"\n", 1)[0]
    except OSError:
        return False
    return bool(re.match(rb"#!.*\b(ba|da|z|k)?sh\b", head)) or (path.endswith(".sh") and not head.startswith(b"#!"))


def replace(words: Sequence[str]) -> NoReturn:
    """Become another program."""
    sys.stdout.flush()
    try:
        os.execv(words[0], list(words))
    except OSError as error:
        sys.stderr.write(f"{words[0]}: {error.strerror}\n")
        sys.exit(126)


def redirected(command: str) -> str:
    """A command whose redirections into files go through `megaplan-target`; empty if it has none."""
    head, newline, rest = command.partition("\n") if re.search(r"<<[^<]", command.partition("\n")[0]) else (command, "", "")
    changed = _REDIRECT.sub(
        lambda found: (
            f'{found["sign"]} "$("$MEGAPLAN_BIN/megaplan-target" {found["target"]})"'
            if found["sign"] and found["target"] != "/dev/null"
            else found[0]
        ),
        head,
    )
    return "" if changed == head else changed + newline + rest


def main(name: str, words: Sequence[str]) -> int:
    """Stand in for the program of a path's last part."""
    own = name.rpartition("/")[2]
    helpers = {"megaplan-redirects": redirected, "megaplan-target": target, "megaplan-folder": lambda path: target(f"{path}/.")[:-2]}
    if own not in helpers:
        return run(words if own == "megaplan-stand-in" else [own, *words])
    say(helpers[own](words[0]))
    return 0
