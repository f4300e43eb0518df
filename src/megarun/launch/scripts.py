"""Job scripts for SLURM and Kubernetes; plain text, without torch.

SLURM starts one task per rank: its warning signal then reaches the ranks themselves, and their exit status distinguishes a saved run, which
is queued again, from a failed one. torchrun would hide both. Kubernetes starts one pod a node with torchrun inside, because a pod has the
GPUs of its node and a Job starts it again.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megarun.errors import refusal

SAVED_STATUSES = (129, 138, 143)
"""Exit statuses of a run that a scheduler's signal has stopped after a save: SIGHUP, SIGUSR1, SIGTERM."""
PORT = 29500
GRACE_SECONDS = 120
_PLAIN = re.compile(r"[\w.:,@=/+-]+")


@dataclass(frozen=True, slots=True)
class JobShape:
    """The processes of a plan.

    Attributes:
        name: Name of the plan.
        num_nodes: Machines.
        ranks_per_node: Processes and GPUs of each.
    """

    name: str
    num_nodes: int
    ranks_per_node: int

    @classmethod
    def of(cls, name: str, world_size: int, per_node: int) -> "JobShape":
        """The shape of `world_size` ranks on machines of `per_node` GPUs.

        Raises:
            MegaplanError: MP662 if the ranks do not fill whole machines.
        """
        if world_size <= per_node:
            return cls(name, 1, world_size)
        if world_size % per_node:
            raise refusal("MP662", f"mesh.world_size = {world_size}, device.per_node = {per_node}", "device.per_node")
        return cls(name, world_size // per_node, per_node)


def slurm_script(shape: JobShape, words: Sequence[str], directives: Mapping[str, str]) -> str:
    """A batch script for `sbatch`.

    Args:
        shape: Processes of the plan.
        words: Command line after `megarun`.
        directives: More `#SBATCH` options by name, such as `time` and `partition`.

    Raises:
        MegaplanError: MP662 if a directive has characters that could end its line or begin another option.
    """
    for name, value in directives.items():
        if not _PLAIN.fullmatch(value):
            raise refusal("MP662", f"--{name} {value!r} has characters other than letters, digits and .:,@=/+-_", f"--{name}")
    options = {
        "job-name": shape.name,
        "nodes": str(shape.num_nodes),
        "ntasks-per-node": str(shape.ranks_per_node),
        "gpus-per-node": str(shape.ranks_per_node),
        "signal": f"USR1@{GRACE_SECONDS}",
        "open-mode": "append",
        **directives,
    }
    return "\n".join([
        "#!/bin/bash",
        *(f"#SBATCH --{name}={value}" for name, value in options.items()),
        "#SBATCH --requeue",
        "# One task a rank. Before the time limit SLURM sends SIGUSR1 to the ranks: they save, end with 138, and the job is queued again.",
        "set -uo pipefail",
        'read -r MASTER_ADDR < <(scontrol show hostnames "$SLURM_JOB_NODELIST") || exit 2',
        "MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}",
        "export MASTER_ADDR MASTER_PORT OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}",
        f"train=({shlex.join(['python', '-m', 'megarun', *words])})",
        "rank='export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS; exec \"$@\"'",
        'srun --kill-on-bad-exit=1 bash -c "$rank" rank "${train[@]}"',
        "status=$?",
        "case $status in",
        f'  {" | ".join(map(str, SAVED_STATUSES))}) scontrol requeue "$SLURM_JOB_ID" ;;',
        "esac",
        "exit $status",
        "",
    ])  # fmt: skip


def kubernetes_documents(shape: JobShape, words: Sequence[str], image: str, volumes: Mapping[str, str]) -> list[dict[str, Any]]:
    """A headless service, a network policy that admits the job's own pods alone, and an indexed Job.

    Args:
        shape: Processes of the plan.
        words: Command line after `megarun`.
        image: Container image with megarun.
        volumes: Persistent volume claims by mount path.
    """
    name = re.sub(r"[^a-z0-9-]+", "-", shape.name.lower()).strip("-")[:52] or "megarun"
    labels = {"app": "megarun", "run": name}
    torchrun = ["torchrun", "--nnodes", str(shape.num_nodes), "--node-rank", "$(JOB_COMPLETION_INDEX)"]
    torchrun += ["--nproc-per-node", str(shape.ranks_per_node), "--master-addr", f"{name}-0.{name}", "--master-port", str(PORT)]
    mounts = [{"name": f"volume-{index}", "mountPath": path} for index, path in enumerate(volumes)]
    claims = [{"name": f"volume-{index}", "persistentVolumeClaim": {"claimName": claim}} for index, claim in enumerate(volumes.values())]
    container = {
        "name": "train",
        "image": image,
        # `$(NAME)` is Kubernetes' own syntax for a variable; a doubled dollar is a dollar
        "command": [*torchrun, "-m", "megarun", *(word.replace("$(", "$$(") for word in words)],
        "env": [{"name": "OMP_NUM_THREADS", "value": "1"}],
        "resources": {"limits": {"nvidia.com/gpu": shape.ranks_per_node}},
        "volumeMounts": mounts,
    }
    pod = {
        "subdomain": name,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "containers": [container],
        "volumes": claims,
    }
    job = {
        "completions": shape.num_nodes,
        "parallelism": shape.num_nodes,
        "completionMode": "Indexed",
        "backoffLimit": 20 * shape.num_nodes,  # if a pod fails, every pod of the job is stopped and started again
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }
    own = [{"podSelector": {"matchLabels": labels}}]
    policy = {"podSelector": {"matchLabels": labels}, "policyTypes": ["Ingress"], "ingress": [{"from": own}]}
    service = {"clusterIP": "None", "selector": labels, "publishNotReadyAddresses": True}
    metadata = {"name": name, "labels": labels}
    return [
        {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": service},
        {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": metadata, "spec": policy},
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": job},
    ]
