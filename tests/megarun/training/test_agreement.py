"""Ranks that were given something else than rank 0: every one of them ends with one error that names rank and key, and none hangs."""

import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megaplan.errors import MegaplanError
from megaplan.plan.make import make_plan, write_plan
from megaplan.spec.models import Spec
from megarun.data.corpus import read_corpus
from megarun.data.tokenize import tokenize
from megarun.data.tokenizer import TokenizerKind
from megarun.job.run import Checkpoints, Run, read_job
from megarun.launch.process_group import Launch
from megarun.training.agreement import differences, inputs_of, require_agreement
from megarun.training.prepare import hold_out, prepare

pytestmark = pytest.mark.runtime
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, spec_with: Any) -> Path:
    """Two token files, a copy of one under another name, and plans of two ranks."""
    found = tmp_path_factory.mktemp("agreement")
    for name, text in (("one", Path(__file__).read_text()), ("two", Path(__file__).read_text()[::-1])):
        (found / name).mkdir()
        (found / name / "a.txt").write_text(text)
        tokenize(read_corpus(found / name), TokenizerKind.BYTES, 257, found / f"{name}.tokens")
    (found / "copy.tokens").write_bytes((found / "one.tokens").read_bytes())
    for name, changes in {
        "pp": {"mesh": {"pp": 2}},
        "dp": {"mesh": {"dp_shard": 2}},
        "pools": {"mesh": {"pp": 2}, "device": {"name": "h100-sxm"}, "pools": [{"count": 1, "device": {"name": "a100-80gb"}}]},
        "rate": {"mesh": {"pp": 2}, "training.learning_rate": 1.0e-4},
        "cut": {"mesh": {"pp": 2}, "split": {"mode": "manual", "spans": [[0, 1], [1, 5]], "reason": "a test"}},
    }.items():
        keys = {"model.vocab_size": 257, "schedule.num_microbatches": 2, "training.steps": 4} | changes
        write_plan(make_plan(Spec.model_validate(spec_with(keys))), found / f"{name}.json")
    return found


def of_rank(folder: Path, plan: str = "pp", *, seed: int | None = None, data: tuple[str, ...] = ("one",), **more: Any) -> Run:
    """Input of one rank."""
    fraction = more.pop("fraction", None)
    words = [name.replace(".", ".tokens") if "=" in name else f"{name}.tokens" for name in data]
    planned = read_job(str(folder / f"{plan}.json"), seed)
    steps = more.pop("steps", None)
    paths = [str(folder / word) for word in words]
    run = prepare(planned, paths, folder / "out", steps, Checkpoints(**more), num_processes=2, command="")
    return run if fraction is None else hold_out(run, fraction, 2, None)


def accounts(*runs: Run, timeout: float = 20, devices: tuple[str, ...] = ()) -> list[str | None]:
    """Error of each rank, None for a rank that continues; ranks are threads that share a store. Without `devices` all have a CPU."""
    store = dist.HashStore()  # type: ignore[attr-defined]

    def compare(rank: int) -> str | None:
        try:
            launch, device = Launch(rank, len(runs), rank, store, timeout), devices[rank] if devices else "cpu"
            require_agreement(runs[rank], launch, device)
        except MegaplanError as error:
            (found,) = error.diagnostics
            return f"{found.code}: {found.detail}"
        return None

    with ThreadPoolExecutor(len(runs)) as pool:
        return list(pool.map(compare, range(len(runs))))


DIFFERENCES = {
    "mesh": ({"plan": "dp"}, "mesh.dp_shard = 2, rank 0's = 1"),
    "cuts": ({"plan": "cut"}, "spans = [[0, 0, 1], [1, 1, 5]], rank 0's = "),
    "learning rate": ({"plan": "rate"}, "training.learning_rate = 0.0001, rank 0's = 0.003"),
    "seed": ({"seed": 3}, "training.seed = 3, rank 0's = 0"),
    "steps": ({"steps": 3}, "--steps = 3, rank 0's = 4"),
    "save-every": ({"save_every": 2}, "--save-every = 2, rank 0's = 0"),
    "resume": ({"resume": "never"}, "--resume = never, rank 0's = auto"),
    "validation fraction": ({"fraction": "0.5"}, '--validation-fraction = "0.5", rank 0\'s = "0"'),
    "token file": ({"data": ("two",)}, "--data = two.tokens=1: "),
    "mix": ({"data": ("one.=1", "two.=1")}, "two.tokens=1: "),
}


@pytest.mark.parametrize("what", DIFFERENCES)
def test_a_rank_that_differs_is_named_to_all(what: str, folder: Path) -> None:
    changes, line = DIFFERENCES[what]
    first, second = accounts(of_rank(folder), of_rank(folder, **changes))
    assert first == second
    assert first is not None
    assert first.startswith(f"MP656: rank 1 (pp 1) on {socket.gethostname()}:\n  ")
    assert line in first


SOFTWARE = ("python", "torch version", "triton version", "megaplan version", "source code", "device")


@pytest.mark.parametrize("what", SOFTWARE)
def test_a_rank_with_other_software_or_another_device_differs(what: str, folder: Path) -> None:
    ours = inputs_of(of_rank(folder), "cuda, model 1")
    (line,) = differences(ours, {**ours, what: ("other", "other")})
    assert line == f"{what} = {ours[what][1]}, rank 0's = other"


H100, A100 = "cuda, NVIDIA H100 80GB HBM3", "cuda, NVIDIA A100-SXM4-80GB"
POOLED = {
    "as planned": ((H100, A100), None),
    "the CPU": (("cpu", "cpu"), None),
    "one model": ((H100, H100), "rank 1 (pp 1) on {host}:\n  device = NVIDIA H100 80GB HBM3, planned a100-80gb"),
    "another order": (
        (A100, H100),
        "rank 0 (pp 0) on {host}:\n  device = NVIDIA A100-SXM4-80GB, planned h100-sxm\n"
        "rank 1 (pp 1) on {host}:\n  device = NVIDIA H100 80GB HBM3, planned a100-80gb",
    ),
}


@pytest.mark.parametrize("what", POOLED)
def test_each_rank_has_the_device_of_its_pool(what: str, folder: Path) -> None:
    devices, said = POOLED[what]
    run = of_rank(folder, "pools")
    expected = None if said is None else f"MP681: {said.format(host=socket.gethostname())}"
    assert accounts(run, run, devices=devices) == [expected, expected]


def test_the_same_data_may_have_another_name(folder: Path) -> None:
    assert accounts(of_rank(folder), of_rank(folder, data=("copy",))) == [None, None]


def test_ranks_with_equal_differences_share_a_line(folder: Path) -> None:
    run, other = of_rank(folder), of_rank(folder, seed=1)
    found = accounts(run, other, run, other)
    assert len(set(found)) == 1
    assert found[0] == f"MP656: ranks 1, 3 on {socket.gethostname()}:\n  training.seed = 1, rank 0's = 0"


def test_a_rank_that_says_nothing_is_named(folder: Path) -> None:
    """Rank 1 of two has joined and hangs: rank 0 waits for its time limit."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    with pytest.raises(MegaplanError) as refused:
        require_agreement(of_rank(folder), Launch(0, 2, 0, store, 0.2), "cpu")
    (found,) = refused.value.diagnostics
    assert (found.code, found.detail) == ("MP650", "started, but did not publish their settings within 0.2 s: rank 1")


@pytest.mark.jobs
def test_two_processes_with_other_meshes_both_end(folder: Path, golden: Any) -> None:
    """Nothing stops the ranks without torchrun: rank 1 has another mesh, and each would wait in groups that the other never creates."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "kernels")])
    processes = []
    for rank, plan in enumerate(("pp", "dp")):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        environment = {**os.environ, **place, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        words = ["train", str(folder / f"{plan}.json"), "--data", str(folder / "one.tokens"), "--out", str(folder / "out")]
        command = [sys.executable, "-m", "megarun", *words]
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    try:
        said = [process.communicate(timeout=100)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [2, 2], said
    message = next(each for each in said if "error[" in each)
    golden("MP656", message)
    assert not (folder / "out").exists()
