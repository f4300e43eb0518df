"""Checkpoints in an S3 server on this machine: moto's, with faults between it and the run. Run by scripts/test_s3.sh."""

import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

ROOT = Path(__file__).parents[2]
STEPS = 8
SPEC = """
format: megaplan.spec/1
name: storage
model:
  pattern: AD
  num_layers: 2
  hidden_size: 32
  vocab_size: 257
  attention: {kind: gqa, num_heads: 4, num_kv_heads: 2, head_dim: 8}
  mlp: {ffn_hidden_size: 40}
schedule: {kind: 1f1b, num_microbatches: 2}
batch: {micro_batch_size: 1, seq_length: 24}
precision: {params: fp32, grads: fp32, master: fp32, moments: fp32, reduce: fp32}
training: {steps: 8, learning_rate: 1.0e-3}
"""

Fault = Callable[[str, str], str | None]


class Server:
    """moto's S3 behind a switch.

    Attributes:
        fault: Decides by method and path: a status to answer with instead, `wait` to wait for `free` first, or None.
        seen: Method and path of every request.
    """

    def __init__(self) -> None:
        self._application = DomainDispatcherApplication(create_backend_app)
        self.fault: Fault = lambda _method, _path: None
        self.seen: list[tuple[str, str]] = []
        self.waiting, self.free = threading.Event(), threading.Event()
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def _answer(self, environ: Any, start_response: Any) -> Any:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        self.seen.append((method, path))
        answer = self.fault(method, path)
        if answer == "wait":
            self.waiting.set()
            self.free.wait(60)
        elif answer is not None:
            start_response(answer, [("Content-Type", "application/xml")])
            return [b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"]
        return self._application(environ, start_response)

    def close(self) -> None:
        self._server.shutdown()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name, value in {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(name, value)
    server = Server()
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    boto3.client("s3").create_bucket(Bucket="runs")
    yield server
    server.free.set()
    for each in boto3.client("s3").list_objects_v2(Bucket="runs").get("Contents", []):
        boto3.client("s3").delete_object(Bucket="runs", Key=each["Key"])
    server.close()


@pytest.fixture(scope="session")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with plans of one and two ranks and a token file."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "spec.yaml").write_text(SPEC)
    for name, pp in (("one", 1), ("two", 2)):
        assert called("megaplan", "split", folder / "spec.yaml", "--set", f"mesh.pp={pp}", "-o", folder / f"{name}.json").returncode == 0
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text(Path(__file__).read_text())
    words = ("data", "tokenize", folder / "text", "--tokenizer", "bytes", "-o", folder / "a.tokens")
    done = called("megarun", *words)
    assert done.returncode == 0, done.stderr
    return folder


def called(module: str, *words: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=1200)


def words(job: Path, plan: str, out: Path, url: str = "s3://runs/my") -> list[str]:
    return ["train", str(job / f"{plan}.json"), "--data", str(job / "a.tokens"), "--out", str(out), "--save-every", "2"] + (
        ["--checkpoint-url", url] if url else []
    )


def losses(*folders: Path) -> dict[int, float]:
    lines = [json.loads(line) for folder in folders for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "step_seconds" in line}


def objects() -> list[str]:
    found = boto3.client("s3").list_objects_v2(Bucket="runs", Prefix="my/").get("Contents", [])
    return sorted(each["Key"].removeprefix("my/checkpoints/") for each in found)


@pytest.fixture(scope="session")
def expected(job: Path) -> dict[int, float]:
    """Losses of a run of one process that nothing interrupts."""
    done = called("megarun", *words(job, "one", job / "expected", url=""))
    assert done.returncode == 0, done.stderr
    return losses(job / "expected")


def test_two_ranks_save_one_rank_resumes(server: Server, job: Path, expected: dict[int, float], tmp_path: Path) -> None:
    """Each node has its own disk. Every fifth request is answered with 503 or 500."""
    count = iter(range(1_000_000))

    def fault(_method: str, _path: str) -> str | None:
        number = next(count)
        return {0: "503 Slow Down", 5: "500 Internal Server Error"}.get(number % 10)

    server.fault = fault
    torchrun = ("--standalone", "--nproc-per-node", "2", "-m", "megarun")
    done = called("torch.distributed.run", *torchrun, *words(job, "two", tmp_path / "first"), "--steps", "4")
    assert done.returncode == 0, done.stderr
    assert {key.split("/")[0] for key in objects()} == {"owner.json", "step-00000002", "step-00000004"}
    assert {"step-00000004/__0_0.distcp", "step-00000004/__1_0.distcp", "step-00000004/manifest.json"} <= set(objects())
    done = called("megarun", *words(job, "one", tmp_path / "second"))
    assert done.returncode == 0, done.stderr
    assert "resumed from s3://runs/my/checkpoints/step-00000004, 4 steps done" in done.stderr
    found = losses(tmp_path / "first", tmp_path / "second")
    assert found.keys() == expected.keys()
    assert all(abs(found[step] - loss) <= 2e-6 * abs(loss) for step, loss in expected.items())
    # the newest two, and the one that this process began with
    assert {key.split("/")[0] for key in objects()} == {"owner.json", "step-00000004", "step-00000006", "step-00000008"}
    assert called("megarun", "checkpoint", "verify", "s3://runs/my").returncode == 0
    exported = called("megarun", "checkpoint", "export", "s3://runs/my", "-o", tmp_path / "weights.safetensors")
    assert exported.returncode == 0, exported.stderr


@pytest.mark.parametrize("where", ["__0_0.distcp", "index.json", "manifest.json"])
def test_a_kill_during_an_upload(where: str, server: Server, job: Path, expected: dict[int, float], tmp_path: Path) -> None:
    """SIGKILL while an object of step 4 is on its way: step 2 is whole, and the resumed losses are bitwise equal."""
    server.fault = lambda method, path: "wait" if method == "PUT" and path.endswith(f"step-00000004/{where}") else None
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen([sys.executable, "-m", "megarun", *words(job, "one", tmp_path / "run")], stderr=said, stdout=said)
    assert server.waiting.wait(600), (tmp_path / "said").read_text()
    process.send_signal(signal.SIGKILL)
    process.wait()
    server.fault = lambda _method, _path: None
    server.free.set()
    done = called("megarun", *words(job, "one", tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    start = re.search(r"resumed from s3://runs/my/checkpoints/step-0000000(\d)", done.stderr)
    # a request that was under way when its sender died may have been carried out
    assert start is not None
    assert start[1] in ("24" if where == "manifest.json" else "2")
    assert losses(tmp_path / "run") == expected
    assert {key.split("/")[0] for key in objects()} == {"owner.json", f"step-0000000{start[1]}", "step-00000006", "step-00000008"}


def test_an_outage_longer_than_the_attempts(server: Server, job: Path, expected: dict[int, float], tmp_path: Path) -> None:
    """The run ends with the storage's own words and what is whole stays; while the outage lasts, a start does not begin anew."""
    server.fault = lambda method, path: "503 Slow Down" if method == "PUT" and "step-00000004" in path else None
    done = called("megarun", *words(job, "one", tmp_path / "run"))
    assert done.returncode == 2
    assert "MP645" in done.stderr
    assert "not written in 5 attempts" in done.stderr
    server.fault = lambda _method, _path: "503 Slow Down"
    done = called("megarun", *words(job, "one", tmp_path / "elsewhere"))
    assert done.returncode == 2
    assert "error[MP666]" in done.stderr
    server.fault = lambda _method, _path: None
    done = called("megarun", *words(job, "one", tmp_path / "run"))
    assert "2 steps done" in done.stderr
    assert losses(tmp_path / "run") == expected


def test_a_bucket_that_does_not_exist(server: Server, job: Path, tmp_path: Path) -> None:
    done = called("megarun", *words(job, "one", tmp_path / "run", url="s3://nowhere/my"))
    assert done.returncode == 2
    assert "error[MP666]" in done.stderr
    assert "bucket" in done.stderr.lower()
