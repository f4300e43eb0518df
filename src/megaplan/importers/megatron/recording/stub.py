"""The stub that a recorded launch script runs in place of a program; it uses the standard library alone.

A shell is run as bash under observation, a wrapper is replaced by the program that follows its options, file tools work in the mirror,
a launch is written to the record, and every other program is written to the record and does nothing.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time

from megaplan.importers.megatron.recording.jobs import JOB, directives, slurm, tasks
from megaplan.importers.megatron.recording.mirror import FOLDER, TREE, copy_up, placed, target
from megaplan.importers.megatron.recording.names import (
    ANSWERING,
    BATCH,
    FILE_TOOLS,
    LAUNCHERS,
    PYTHONS,
    SHELLS,
    TOOLS,
    WRAPPERS,
    inner_program,
)

TYPE_CHECKING = False  # a stub starts for every program of a script, so it imports little
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

MAX_RECORDS = 2_000
MANY_ARGUMENTS = 8
"""A program of unknown name with at least so many arguments that begin with `--` is recorded as a launch."""
_VARIABLE = re.compile(r"[A-Za-z_]\w*=")
_WORD = r"""(?:'[^']*'|"(?:\\.|[^"\\])*"|\\.|\$\((?:[^()]|\([^()]*\))*\)|[^\s'"\\;&|<>()])+"""
_REDIRECT = re.compile(
    rf"""(?P<sign>(?:\b\d+|&)?(?<!<)>>?\|?)[ \t]*(?P<target>{_WORD})|'[^']*'|"(?:\\.|[^"\\])*"|\\.|\$\((?:[^()]|\([^()]*\))*\)""", re.DOTALL
)


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
    """Act on a command by the name of its program."""
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
    """The given variables that a script reads without a default and never sets."""
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
    """Run bash with the same words; a script with #SBATCH lines gets the variables of the job that they describe."""
    rest = list(words[1:])
    place = next((index for index, word in enumerate(rest) if not word.startswith(("-", "+"))), None)
    if place is not None and not any(re.fullmatch(r"-[a-z]*c", word) for word in rest[:place]):
        rest[place] = placed(rest[place]) if rest[place].startswith("/") else rest[place]
        directives(head(rest[place]), os.environ, os.getcwd())
    return replace([os.environ["MEGAPLAN_BASH"], *rest])


def head(path: str) -> str:
    """The beginning of a file; empty if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(1 << 20)
    except OSError:
        return ""


def python(words: Sequence[str]) -> int:
    """Record a launch; run a short program that is part of the script, if the kernel confines it."""
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
        if not child:  # errors go to a file: a process left behind would keep a pipe open
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            replace([sys.executable, "-I", "-S", "-c", code, *rest[2:]])
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status:
            with open(path, encoding="utf-8", errors="replace") as errors:
                said = errors.read(1 << 16).strip().rpartition("\n")[2][:200]
            write("failed", words, said)
            return 0 if said.startswith(("ModuleNotFoundError", "ImportError")) else status  # packages are those installed on the cluster
        return status
    write("launch", words)
    return 0


def batch(words: Sequence[str]) -> int:
    """Set the variables of the job that the options of sbatch, srun or salloc describe, and run its script or program."""
    if words[0].rpartition("/")[2] != "sbatch":
        return wrapped(words)
    for key, value in JOB.items():
        os.environ.setdefault(key, value)
    wrap = next((word.partition("=")[2] or words[place + 1] for place, word in enumerate(words) if word.split("=")[0] == "--wrap"), None)
    if wrap is not None:
        slurm(words[1:], os.environ)
        replace([os.environ["MEGAPLAN_BASH"], "-c", wrap])
    place = next(
        (place for place, word in enumerate(words) if place and os.path.isfile(placed(word)) and not word.startswith("-")), len(words)
    )
    path = placed(words[place]) if place < len(words) else f"{FOLDER}/batch-{os.getpid()}.sh"
    if place == len(words):
        with open(path, "w", encoding="utf-8") as file:
            file.write(sys.stdin.read(1 << 20))
    slurm(words[1:place], os.environ)
    directives(head(path), os.environ, os.getcwd())
    return replace([os.environ["MEGAPLAN_BASH"], path, *words[place + 1 :]])


def wrapped(words: Sequence[str]) -> int:
    """Run the program that follows a wrapper's options; `ssh` and similar wrappers take a command line in one word."""
    place, is_line = inner_program(words, lambda word: os.path.isfile(placed(word)))
    for word in words[1:place]:
        key, equals, value = word.partition("=")
        if equals and _VARIABLE.match(word) and key not in ("PATH", "BASH_ENV") and not key.startswith("MEGAPLAN_"):
            os.environ[key] = value
    if place is None:
        write("other", words)
        return 0
    (slurm if words[0].rpartition("/")[2] in BATCH else tasks)(words[:place], os.environ)
    if is_line:
        return shell(["bash", "-c", words[place]])
    name = words[place].rpartition("/")[2]
    return run([*(["bash"] if name.endswith(".sh") else ["python"] if name.endswith(".py") else []), *words[place:]])


def file_tool(words: Sequence[str]) -> int:
    """Run mkdir, cp, tee or a similar tool on the paths' places in the mirror."""
    name = words[0].rpartition("/")[2]
    options, given = [word for word in words[1:] if word.startswith("-")], [word for word in words[1:] if not word.startswith("-")]
    places = [placed(word) if name != "ln" or word is given[-1] else word for word in given]
    for path in places[-1:] if name in ("cp", "ln", "mv") else places:
        copy_up(f"{path}/." if name != "rm" and os.path.isdir(path) else path, TREE)
        if name in ("mkdir", "touch", "tee", "cp", "mv", "ln"):
            os.makedirs(os.path.dirname(path), exist_ok=True)
    status = os.spawnv(os.P_WAIT, f"{FOLDER}/tools/{name}", [name, *options, "--", *places])
    return status if name == "rmdir" else 0


def answer(words: Sequence[str]) -> int:
    """Answer questions about the machine: its GPUs, the job's nodes, its own name, and the path of a program."""
    name, folder = words[0].rpartition("/")[2], os.environ["MEGAPLAN_BIN"]
    if name == "nvidia-smi":
        gpus(words)
    elif name == "scontrol" and "hostnames" in words:
        nodes = os.environ.get("SLURM_NNODES", "1")
        for index in range(int(nodes) if nodes.isdigit() else 1):
            say(f"node{index + 1}")
    elif name == "hostname":
        say("127.0.0.1" if any(word.lower() in ("-i", "--ip-address") for word in words) else "node1")
    elif name == "which":
        found = [f"{folder}/{word}" for word in words[1:] if os.path.exists(f"{folder}/{word}")]
        say("\n".join(found))
        return 0 if found else 1
    return 0


def gpus(words: Sequence[str]) -> None:
    """Print a line per GPU, as nvidia-smi does."""
    number = int(os.environ.get("MEGAPLAN_GPUS", "8"))
    write("answered", words, f"{number} GPUs")
    query = next((word.partition("=")[2] for word in words if word.startswith("--query-gpu")), None)
    if query is None:
        say("\n".join(f"GPU {index}: GPU {index} (UUID: GPU-{index})" for index in range(number)))
        return
    if not any("noheader" in word for word in words):
        say(query)
    for index in range(number):
        say(", ".join({"index": str(index), "count": str(number)}.get(field.strip(), f"GPU {index}") for field in query.split(",")))


def is_script(path: str) -> bool:
    """True if a file is a shell script."""
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
    """The command with output redirections into the mirror; empty without redirections."""
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
    """Act as the program whose name is the last part of a path."""
    own = name.rpartition("/")[2]
    if own == "megaplan-redirects":
        say(redirected(words[0]))
    elif own == "megaplan-target":
        say(target(words[0]))
    elif own == "megaplan-folder":
        say(target(f"{words[0]}/.")[:-2])
    else:
        return run(words if own == "megaplan-stub" else [own, *words])
    return 0
