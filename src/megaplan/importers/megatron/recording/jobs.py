"""Variables of a job of Slurm or MPI, from options and directives, while a launch script is recorded."""

from __future__ import annotations

import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import MutableMapping, Sequence

_DIRECTIVE = re.compile(r"^#SBATCH\s+(.*)$", re.MULTILINE)
_SLURM = {
    **dict.fromkeys(("-N", "--nodes"), ("SLURM_NNODES", "SLURM_JOB_NUM_NODES")),
    **dict.fromkeys(("-n", "--ntasks"), ("SLURM_NTASKS", "SLURM_NPROCS")),
    "--ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
    "--gpus-per-node": ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"),
    "--gres": ("SLURM_GPUS_ON_NODE",),
    **dict.fromkeys(("-c", "--cpus-per-task"), ("SLURM_CPUS_PER_TASK",)),
}
JOB = {"SLURM_JOB_ID": "1", "SLURM_JOBID": "1", "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0", "SLURM_JOB_NAME": "job"}


def tasks(words: Sequence[str], environment: MutableMapping[str, str]) -> None:
    """Note the number of processes that an MPI launcher starts."""
    if words[0].rpartition("/")[2] in ("mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prun", "prterun", "horovodrun", "jsrun", "aprun"):
        for place, word in enumerate(words[:-1]):
            if word in ("-n", "-np", "--np", "-c", "--n") and words[place + 1].isdigit():
                environment["MEGAPLAN_TASKS"] = words[place + 1]


def slurm(words: Sequence[str], environment: MutableMapping[str, str]) -> None:
    """Set the variables of a job with these options."""
    for place, word in enumerate(words):
        key, equals, value = word.partition("=")
        if not equals and re.fullmatch(r"-[NncG]\d+", word):
            key, value = word[:2], word[2:]
        elif not equals:
            value = words[place + 1] if place + 1 < len(words) else ""
        number = re.search(r"(\d+)$", value)
        if key in _SLURM and number is not None:
            environment.update(dict.fromkeys(_SLURM[key], number[1]))
        if key == "--export":
            environment.update({pair[0]: pair[2] for part in value.split(",") if (pair := part.partition("="))[1]})
    nodes, each = environment.get("SLURM_NNODES"), environment.get("SLURM_NTASKS_PER_NODE")
    if nodes is not None and nodes.isdigit():
        environment["SLURM_NODELIST"] = environment["SLURM_JOB_NODELIST"] = f"node[1-{nodes}]" if int(nodes) > 1 else "node1"
        if each is not None and each.isdigit():
            environment.setdefault("SLURM_NTASKS", str(int(nodes) * int(each)))


QUEUED_FROM = ("SLURM_SUBMIT_DIR", "PBS_O_WORKDIR", "LS_SUBCWD")
"""Variables with the folder in which a job was queued, which is the script's here."""


def directives(text: str, environment: MutableMapping[str, str], folder: str = ".") -> None:
    """Set the variables of the job that the #SBATCH lines of a script describe, and its folder; variables that are already set are kept."""
    for key in QUEUED_FROM:
        if re.search(rf"\$\{{?{key}\b", text):
            environment.setdefault(key, folder)
    found = _DIRECTIVE.findall(text)
    if found:
        for key, value in JOB.items():
            environment.setdefault(key, value)
        given = {key: value for key, value in environment.items() if key.startswith("SLURM_")}
        slurm([word for line in found for word in line.partition(" #")[0].split()], environment)
        environment.update(given)
