"""Two torchrun nodes on one machine train pp 2 × dp 2: the losses of one process."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from megaplan.plan.make import make_plan, write_plan
from megaplan.spec.models import Spec
from megarun.data.corpus import read_corpus
from megarun.data.tokenize import tokenize
from megarun.data.tokenizer import TokenizerKind

pytestmark = [pytest.mark.runtime, pytest.mark.slow]
ROOT = Path(__file__).parents[3]
NODES = 2
NUM_MICROBATCHES, DATA_RANKS, STEPS = 2, 2, 3
TOLERANCE = 2e-6
LIMIT_SECONDS = 300
SPACES = ("megarun-node-0", "megarun-node-1")
ADDRESSES = ("10.231.7.1", "10.231.7.2")


def environment(interface: str) -> dict[str, str]:
    """Environment of a node in the guide, with the sources of this checkout."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "kernels")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": interface}


def torchrun(node: int, address: str, port: int) -> list[str]:
    """A node's launch, up to megarun's own words; every node names node 0's address and port."""
    place = f"--nnodes {NODES} --node-rank {node} --nproc-per-node 2 --master-addr {address} --master-port {port}"
    return [sys.executable, "-m", "torch.distributed.run", *place.split(), "-m", "megarun"]


def run_nodes(commands: Sequence[list[str]], environments: Sequence[dict[str, str]]) -> list[tuple[int, str]]:
    """Exit status and stderr of each node; all run at once, and none outlives the test."""
    with ExitStack() as stack:
        processes = [
            stack.enter_context(subprocess.Popen(words, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True))
            for words, env in zip(commands, environments, strict=True)
        ]
        for process in processes:
            stack.callback(process.kill)
        return [(process.returncode, said) for process, (_, said) in [(p, p.communicate(timeout=LIMIT_SECONDS)) for p in processes]]


def losses(folder: Path) -> list[float]:
    """Losses of every step, as rank 0 wrote them."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "step_seconds" in line]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, spec_with: Any) -> Path:
    """Tokens, the plan of pp 2 × dp 2, and the losses of one process that takes the same microbatches in the same order."""
    folder = tmp_path_factory.mktemp("nodes")
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text(Path(__file__).read_text())
    tokenize(read_corpus(folder / "text"), TokenizerKind.BYTES, 257, folder / "small.tokens")
    for name, mesh, count in (("four", {"pp": 2, "dp_shard": 2}, NUM_MICROBATCHES), ("one", {}, NUM_MICROBATCHES * DATA_RANKS)):
        keys = {"model.vocab_size": 257, "schedule.num_microbatches": count, "training.steps": STEPS, "mesh": mesh}
        write_plan(make_plan(Spec.model_validate(spec_with(keys))), folder / f"{name}.json")
    alone = [sys.executable, "-m", "megarun", *words(folder, "one")]
    subprocess.run(alone, env=environment("lo"), check=True, capture_output=True, timeout=LIMIT_SECONDS)
    return folder


def words(folder: Path, plan: str) -> list[str]:
    """Arguments that follow `megarun`."""
    return ["train", str(folder / f"{plan}.json"), "--data", str(folder / "small.tokens"), "--out", str(folder / f"out-{plan}")]


def check(folder: Path) -> None:
    """The nodes' losses are those of one process."""
    found, expected = losses(folder / "out-four"), losses(folder / "out-one")
    assert len(found) == len(expected) == STEPS
    assert found == pytest.approx(expected, rel=TOLERANCE, abs=0)
    shutil.rmtree(folder / "out-four")


def test_two_nodes_by_loopback_addresses(job: Path) -> None:
    """Node 0 at 127.0.0.1, node 1 at 127.0.0.2: only torchrun's rendezvous connects them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    commands = [torchrun(node, "127.0.0.1", port) + words(job, "four") for node in range(NODES)]
    commands[1][3:3] = ["--local-addr", "127.0.0.2"]  # after `python -m torch.distributed.run`
    for status, said in run_nodes(commands, [environment("lo")] * NODES):
        assert status == 0, said
    check(job)


@pytest.fixture
def namespaces() -> Iterator[None]:
    """Two network namespaces that a pair of virtual interfaces `net0` connects; only root may make them."""
    if shutil.which("ip") is None:
        pytest.skip("no `ip` command (iproute2)")

    def ip(*words: str) -> bool:
        return subprocess.run(["ip", *words], capture_output=True, check=False).returncode == 0

    made = [ip("netns", "add", space) for space in SPACES]
    try:
        if not all(made) or not ip("link", "add", "net0", "netns", SPACES[0], "type", "veth", "peer", "name", "net0", "netns", SPACES[1]):
            pytest.skip("this process may not make network namespaces")
        for space, address in zip(SPACES, ADDRESSES, strict=True):
            assert ip("-n", space, "addr", "add", f"{address}/30", "dev", "net0")
            assert all(ip("-n", space, "link", "set", device, "up") for device in ("lo", "net0"))
        yield
    finally:
        for space in SPACES:
            ip("netns", "delete", space)


@pytest.mark.usefixtures("namespaces")
def test_two_nodes_in_network_namespaces(job: Path) -> None:
    """Each node sees its own loopback and one interface, as two machines would."""
    nodes = zip(range(NODES), SPACES, strict=True)
    commands = [["ip", "netns", "exec", space, *torchrun(node, ADDRESSES[0], 29471), *words(job, "four")] for node, space in nodes]
    for status, said in run_nodes(commands, [environment("net0")] * NODES):
        assert status == 0, said
    check(job)
