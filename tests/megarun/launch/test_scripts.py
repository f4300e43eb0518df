"""Job scripts as a scheduler runs them: substitutes for its commands start the ranks."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from megaplan.errors import MegaplanError
from megaplan.plan.make import make_plan, write_plan
from megaplan.spec.models import Spec
from megarun.cli.main import run
from megarun.launch.scripts import JobShape, kubernetes_documents, slurm_script

pytestmark = pytest.mark.runtime
SRUN = """#!/bin/bash
shift  # --kill-on-bad-exit=1
worst=0
for rank in 0 1 2 3; do
  SLURM_PROCID=$rank SLURM_LOCALID=$((rank % 2)) SLURM_NTASKS=4 "$@" || worst=$?
done
exit $worst
"""
SCONTROL = """#!/bin/bash
echo "$@" >> "$LOG"
[ "$1" = show ] && printf 'node7\\nnode8\\n'
exit 0
"""
PYTHON = """#!/bin/bash
echo "$RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR $MASTER_PORT: $#: $*" >> "$LOG"
exit $STATUS
"""
WORDS = ["train", "plan 1.json", "--data", "a$(touch x).tokens", "--out", "it's"]


@pytest.fixture
def cluster(tmp_path: Path) -> Any:
    """Run a batch script with substitutes for srun, scontrol and python: its exit status, and what they were given."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("python", PYTHON)):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)

    def submit(script: str, status: int) -> tuple[int, list[str]]:
        (tmp_path / "job.sh").write_text(script)
        log = tmp_path / "log"
        log.write_text("")
        place = {"SLURM_JOB_ID": "12345", "SLURM_JOB_NODELIST": "node[7-8]", "LOG": str(log), "STATUS": str(status)}
        environment = {"PATH": f"{commands}{os.pathsep}{os.environ['PATH']}", **place}
        done = subprocess.run(["bash", "job.sh"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=60)
        return done.returncode, log.read_text().splitlines()

    return submit


@pytest.mark.parametrize(("status", "requeued"), [(0, False), (2, False), (129, True), (138, True), (143, True)])
def test_a_saved_run_is_queued_again(status: int, requeued: bool, cluster: Any, tmp_path: Path) -> None:
    """Every rank has its place and the words as they were given; only a run that a signal has stopped is queued again."""
    script = slurm_script(JobShape("four", 2, 2), WORDS, {"time": "24:00:00"})
    found, log = cluster(script, status)
    assert found == status
    ranks = [line for line in log if "megarun" in line]
    words = f"8: -m megarun {' '.join(WORDS)}"
    assert ranks == [f"{rank} {rank % 2} 4 node7 22345: {words}" for rank in range(4)]
    assert ("requeue 12345" in log) == requeued
    assert not (tmp_path / "x").exists()


def test_directives_are_what_the_plan_needs() -> None:
    script = slurm_script(JobShape("four", 2, 8), WORDS, {"time": "1:00:00", "partition": "gpu"})
    directives = [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")]
    expected = {"nodes=2", "ntasks-per-node=8", "gpus-per-node=8", "signal=USR1@120", "requeue", "time=1:00:00", "partition=gpu"}
    assert expected <= set(directives)
    assert script.splitlines()[0] == "#!/bin/bash"


@pytest.mark.parametrize("value", ["gpu\n#SBATCH --uid=0", "a b", "$(id)", "", ";", "`id`"])
def test_a_directive_is_one_word(value: str) -> None:
    with pytest.raises(MegaplanError, match="MP662"):
        slurm_script(JobShape("four", 1, 2), WORDS, {"partition": value})


def test_ranks_fill_whole_machines() -> None:
    assert JobShape.of("a", 4, 8) == JobShape("a", 1, 4)
    assert JobShape.of("a", 16, 8) == JobShape("a", 2, 8)
    with pytest.raises(MegaplanError, match=r"mesh.world_size = 12, device.per_node = 8"):
        JobShape.of("a", 12, 8)


def test_pods_admit_their_own_job_alone() -> None:
    service, policy, job = kubernetes_documents(JobShape("My plan_1", 2, 8), WORDS, "image:1", {"/data": "claim"})
    name = service["metadata"]["name"]
    assert name == "my-plan-1"
    labels = job["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == labels == policy["spec"]["podSelector"]["matchLabels"]
    assert policy["spec"]["ingress"] == [{"from": [{"podSelector": {"matchLabels": labels}}]}]
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 8}}
    assert container["volumeMounts"] == [{"name": "volume-0", "mountPath": "/data"}]
    words = container["command"]
    assert words[words.index("--master-addr") + 1] == f"{name}-0.{pod['subdomain']}"
    assert words[words.index("--data") + 1] == "a$$(touch x).tokens", "no variable of Kubernetes"


def test_the_commands(tmp_path: Path, spec_with: Any, capfd: pytest.CaptureFixture[str]) -> None:
    spec = Spec.model_validate(spec_with({"mesh": {"pp": 2}, "schedule.num_microbatches": 2}))
    plan = str(tmp_path / "plan.json")
    write_plan(make_plan(spec), plan)
    after = ["--", "--data", "a.tokens", "--out", "run"]
    assert run(["launch", "slurm", plan, "--time", "1:00:00", *after]) == 0
    script = capfd.readouterr().out
    assert f"megarun train {plan} --data a.tokens --out run" in script
    assert "#SBATCH --ntasks-per-node=2" in script
    assert run(["launch", "kubernetes", plan, "--image", "i", "--volume", "c=/data", *after]) == 0
    assert [each["kind"] for each in yaml.safe_load_all(capfd.readouterr().out)] == ["Service", "NetworkPolicy", "Job"]
    assert run(["launch", "slurm", plan, "--", "--data", "a.tokens"]) == 2
    assert "after --: --out missing" in capfd.readouterr().err
    assert run(["launch", "kubernetes", plan, "--image", "i", "--volume", "data", *after]) == 2
    assert "MP662" in capfd.readouterr().err
