"""`megarun compile`, and the compilation before the first step: a cache that the launcher reads, also a moved one; a failure costs time."""

import json
import os
import shutil
import subprocess
import sys
from multiprocessing import current_process
from pathlib import Path
from typing import Any, cast

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from megaplan.plan.make import make_plan, write_plan
from megaplan.spec.models import Spec
from megarun.cli.main import run
from megarun.kernels.ahead import KernelsAhead
from megarun.kernels.target import Target

pytest.importorskip("triton")
pytestmark = [pytest.mark.runtime, pytest.mark.jobs]
HERE = Path(__file__).parent


def run_python(words: list[str], cache: Path) -> subprocess.CompletedProcess[str]:
    variables = {key: value for key, value in os.environ.items() if not key.startswith(("TRITON_", "PYTEST_", "LOCAL_"))}
    variables |= {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(cache)}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, env=variables, check=False)


def steps(names: str, plan: Path, cache: Path) -> dict[str, Any]:
    done = run_python([str(HERE / "compile_steps.py"), names, str(plan)], cache)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory, spec_with: Any) -> Path:
    """Plan with a few small kernels."""
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    changed = {"model.pattern": "D", "model.num_layers": 2, "host.kernels": "triton", "optimizer": {"matrix": "adamw"}}
    values = spec_with(changed)
    for section in ("attention", "mamba", "moe", "recurrent"):
        del values["model"][section]
    write_plan(make_plan(Spec.model_validate(values)), path)
    return path


@pytest.fixture(scope="module")
def compiled(plan: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The cache of `megarun compile`, and what it printed."""
    cache = tmp_path_factory.mktemp("compiled") / "kernels"
    unused = cache.parent / "unused"
    done = run_python(["-m", "megarun", "compile", str(plan), "--cache", str(cache), "--jobs", "2", "--json"], unused)
    assert done.returncode == 0, done.stderr
    assert not unused.exists()
    return cache, json.loads(done.stdout)


def test_every_kernel_is_compiled_once(plan: Path, compiled: tuple[Path, dict[str, Any]]) -> None:
    cache, document = compiled
    names = [each["name"] for each in document["kernels"]]
    assert {"rms_norm_forward_kernel", "rms_norm_backward_kernel", "activation_forward_kernel", "gradient_kernel"} <= set(names)
    assert [each for each in document["kernels"] if each["cached"] or each["error"]] == []
    assert len(list(cache.rglob("*.cubin"))) == len(names)
    assert document | {"format": "megarun.compile/1", "target": "sm_90", "device": "h200", "cache": str(cache)} == document
    again = run_python(["-m", "megarun", "compile", str(plan), "--cache", str(cache)], cache)
    assert again.returncode == 0
    assert "0 compiled in" in again.stdout
    assert f"{len(names)} in the cache" in again.stdout


@pytest.mark.slow
def test_a_cache_can_be_moved(plan: Path, compiled: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    cache, document = compiled
    shutil.copytree(cache, tmp_path / "copy")
    os.rename(cache, cache.with_name("moved"))
    try:
        assert steps("moved", plan, tmp_path / "copy")["moved"] == [0, len(document["kernels"]), len(document["kernels"]), True, 0]
    finally:
        os.rename(cache.with_name("moved"), cache)


@pytest.fixture(scope="module")
def ahead(plan: Path, compiled: tuple[Path, dict[str, Any]]) -> dict[str, Any]:
    """Kernels that runs find in the cache of `megarun compile`."""
    return steps("ranks,killed,stopped,threaded", plan, compiled[0])


@pytest.mark.slow
def test_the_ranks_of_a_machine_wait_for_its_first(ahead: dict[str, Any], compiled: tuple[Path, dict[str, Any]]) -> None:
    outcomes, shown = ahead["ranks"]
    number = len(compiled[1]["kernels"])
    assert outcomes[0] == outcomes[1]
    assert outcomes[0] | {"found": number, "compiled": 0, "failed": [], "error": ""} == outcomes[0]
    assert [done for done, _ in shown] == list(range(1, number + 1))
    assert shown[-1][1] == number


def test_a_compiler_that_fails_stops_no_run(ahead: dict[str, Any]) -> None:
    assert "ended with status -9" in ahead["killed"][0][0]["error"]
    assert "other threads" in ahead["threaded"][0][0]["error"]


def test_a_daemon_of_multiprocessing_starts_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Process.start` raises there; the run continues without a compiler, as with threads."""
    monkeypatch.setitem(current_process()._config, "daemon", True)  # type: ignore[attr-defined]
    monkeypatch.setattr("threading.active_count", lambda: 1)
    ahead = KernelsAhead(cast("Any", None))
    ahead.begin_for(Target((9, 0), 132), 0)
    assert "daemon of multiprocessing" in ahead.finish(HashStore(), 0, lambda: False, lambda *_: None).error


def test_a_run_that_stops_waits_for_no_kernel(ahead: dict[str, Any]) -> None:
    assert ahead["stopped"] == ["the run was asked to stop", "ended"]


@pytest.mark.parametrize(
    ("changed", "words", "said"),
    [
        ({"host.kernels": "reference"}, [], "host.kernels = reference: the plan runs plain torch"),
        ({}, ["--device", "mi300x"], "not of NVIDIA"),
        ({}, ["--cache", "/dev/null/kernels"], "--cache /dev/null/kernels"),
    ],
)
def test_what_cannot_be_compiled_is_refused(
    changed: dict[str, Any], words: list[str], said: str, tmp_path: Path, spec_with: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    write_plan(make_plan(Spec.model_validate(spec_with({"host.kernels": "triton"} | changed))), path)
    assert run(["compile", str(path), *words]) == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert "error[MP669]" in found.err
    assert said in found.err
    assert "Traceback" not in found.err
