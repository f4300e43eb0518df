"""Exit statuses: 0 yes, 1 no, 2 an error, 3 a condition of --fail-on; and forbidden ones."""

import io
import json
import os
import subprocess
import sys

import pytest

from megaplan.cli import main as main_module
from megaplan.cli.main import run

LONG = f"{'x' * 300}.json"
"""Name that no file system takes."""


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (("estimate", "plans/tiny-hybrid.yaml"), 0),
        (("estimate", "plans/tiny-hybrid.json"), 0),
        (("estimate", "plans/llama-3.1-8b.yaml", "--set", "batch.micro_batch_size=16"), 1),
        (("estimate", "plans/llama-3.1-8b.yaml", "--set", "batch.micro_batch_size=16", "--json"), 1),
        (("estimate", "plans/tiny-hybrid.yaml", "--rank", "1"), 2),
        (("estimate", "plans/tiny-hybrid.yaml", "--set", "mesh.tp=3"), 2),
        (("estimate", "nothing.yaml"), 2),
        (("estimate",), 2),
        (("estimate", "plans/tiny-hybrid.yaml", "--rank", "x"), 2),
        (("split", "plans/tiny-hybrid.yaml"), 0),
        (("split", "plans/tiny-hybrid.yaml", "-o", "-"), 0),
        (("split", "plans/tiny-hybrid.yaml", "-o", "plans"), 2),
        (("split", "plans/tiny-hybrid.yaml", "-o", "plans/tiny-hybrid.yaml"), 2),
        (("split", "plans/tiny-hybrid.yaml", "-o", "plans/llama-3.1-8b.yaml"), 2),
        (("split", "plans/tiny-hybrid.yaml", "-o", "no/such/folder/plan.json"), 2),
        (("split", "plans/tiny-hybrid.yaml", "-o", "plans/tiny-hybrid.yaml/plan.json"), 2),
        (("split", "plans/tiny-hybrid.yaml", "-o", LONG), 2),
        (("costs", "plans/tiny-hybrid.yaml", "-o", LONG), 2),
        (("report", "plans/tiny-hybrid.yaml", "-o", LONG), 2),
        (("report", LONG), 2),
        (("show", "plans/tiny-hybrid.json", "--svg", LONG), 2),
        (("diff", LONG, "plans/tiny-hybrid.json"), 2),
        (("check", f"*{LONG}"), 2),
        (("split", "plans/tiny-hybrid.yaml", "--costs", "costs.json"), 2),
        (("split", "plans/tiny-hybrid-pp2.yaml", "--objective", "step_time"), 0),
        (("split", "plans/tiny-hybrid-pp2.yaml", "--set", "split.forbid=[1,2,3,4,5,6,7,8]"), 1),
        (("split", "plans/tiny-hybrid-pp2.yaml", "--baseline", "plans/tiny-hybrid-pp2.json"), 0),
        (("search", "plans/tiny-hybrid.yaml", "--price", "nan"), 2),
        (("search", "plans/tiny-hybrid.yaml", "--price", "h100=-1"), 2),
        (("search", "plans/tiny-hybrid.yaml", "--processes", "0"), 2),
        (("show", "plans/tiny-hybrid.json"), 0),
        (("show", "plans/tiny-hybrid.json", "--set", "batch.micro_batch_size=8"), 0),
        (("show", "plans/tiny-hybrid-pp2.json", "--set", "mesh.pp=1"), 2),
        (("show", "plans/tiny-hybrid.yaml"), 2),
        (("diff", "plans/tiny-hybrid.json", "plans/tiny-hybrid.json"), 0),
        (("diff", "plans/tiny-hybrid.json", "plans/tiny-hybrid-pp2.json"), 1),
        (("diff", "plans/tiny-hybrid.json", "plans/tiny-hybrid.json", "--fail-on", "headroom<200GiB"), 3),
        (("diff", "plans/tiny-hybrid.json", "plans/tiny-hybrid-pp2.json", "--fail-on", "oom,headroom<4GiB"), 1),
        (("diff", "plans/tiny-hybrid.json", "plans/tiny-hybrid.json", "--fail-on", "headroom"), 2),
        (("diff", "plans/tiny-hybrid.json", "plans/tiny-hybrid.json", "--fail-on", "headroom<4"), 2),
        (("diff", "plans/tiny-hybrid.json", "plans/tiny-hybrid.json", "--fail-on", "step>+5%,step>1s"), 0),
        (("diff", "plans/nam56r-8xh200.json", "plans/nam56r-8xh200-equal.json", "--fail-on", "step>+0.5%"), 3),
        (("diff", "plans/nam56r-8xh200-equal.json", "plans/nam56r-8xh200.json", "--fail-on", "step>+0.5%"), 1),
        (("diff", "plans/tiny-hybrid.json", "plans/tiny-hybrid.yaml"), 2),
        (("check", "plans/tiny-hybrid.json", "--strict"), 0),
        (("check", "plans/tiny-hybrid.yaml"), 2),
        (("check", "plans/tiny-hybrid.json", "--fail-on", "oom,step>1s"), 0),
        (("check", "plans/tiny-hybrid.json", "--fail-on", "step>0.01ms"), 3),
        (("check", "plans/tiny-hybrid.json", "--fail-on", "headroom<200GiB"), 3),
        (("check", "plans/tiny-hybrid.json", "--fail-on", "step>+5%"), 2),
        (("check", "plans/tiny-hybrid.json", "--fail-on", "step>5"), 2),
        (("explain", "MP203"), 0),
        (("explain", "nothing"), 2),
        (("schema", "spec"), 0),
        (("schema", "plan"), 0),
        (("schema", "nothing"), 2),
        (("new", "tiny-hybrid"), 0),
        (("new", "list"), 0),
        (("new", "nothing"), 2),
        (("--version",), 0),
        (("--help",), 0),
        (("split", "--help"), 0),
        ((), 2),
        (("nothing",), 2),
    ],
)
def test_status(megaplan, words, status):
    ran = megaplan(*words)
    assert ran.status == status, ran.err
    if status == 2 and words:
        assert ran.out == ""
        assert ran.err.startswith("error[MP")
        assert "hint: " in ran.err


def test_a_condition_is_told_on_stderr(megaplan):
    ran = megaplan("diff", "plans/tiny-hybrid.json", "plans/tiny-hybrid.json", "--fail-on", "oom, headroom < 200GiB")
    assert ran.status == 3
    assert ran.out == "no difference\n"
    assert ran.err.startswith("headroom < 200GiB: headroom ")


def test_a_step_that_has_no_time_fails_a_condition_on_it(megaplan, here):
    """It cannot be decided."""
    model = "{pattern: GD, num_layers: 4, hidden_size: 64, vocab_size: 512, mlp: {ffn_hidden_size: 128}"
    model += ", linear_attention: {kind: gated_delta, num_key_heads: 2, num_value_heads: 4, key_dim: 16, value_dim: 16}}"
    (here / "g.yaml").write_text(
        f"format: megaplan.spec/1\nname: g\nmodel: {model}\nbatch: {{micro_batch_size: 1, seq_length: 64}}\nhost: {{name: megatron}}\n"
    )
    ran = megaplan("split", "g.yaml", "-o", "plan.json")
    assert ran.status == 0, ran.err
    ran = megaplan("check", "plan.json", "--fail-on", "step>100s")
    assert ran.status == 3
    assert ran.err.startswith("step>100s: not timed: there is no term for ")


def test_a_digest_mismatch_is_an_error_but_in_check_and_diff(megaplan, here):
    path = here / "edited.json"
    path.write_text((here / "plans" / "tiny-hybrid.json").read_text().replace('"dp_shard": 1', '"dp_shard": 2'))
    for command in ("estimate", "show"):
        ran = megaplan(command, "edited.json")
        assert ran.status == 2
        assert "error[MP406]" in ran.err
    path.write_text((here / "plans" / "tiny-hybrid.json").read_text().replace('"kernels": "triton"', '"kernels": "reference"'))
    assert megaplan("check", "edited.json").status == 1
    ran = megaplan("diff", "plans/tiny-hybrid.json", "edited.json")
    assert ran.status == 1
    assert ran.out.splitlines()[1].startswith("digest: edited.json")


def test_estimate_never_cuts_a_plan_again(megaplan, here):
    words = ("--mode", "manual", "--set", "split.spans=[[0,1],[1,9]]", "--set", "split.reason=a test")
    assert megaplan("split", "plans/tiny-hybrid-pp2.yaml", *words, "-o", "plan.json").status == 0
    stages = json.loads(megaplan("estimate", "plan.json", "--json").out)["stages"]
    assert [stage["layers"] for stage in stages] == [[0, 1], [1, 9]]
    varied = json.loads(megaplan("estimate", "plan.json", "--set", "split.mode=weighted", "--set", "split.spans=null", "--json").out)
    assert [stage["layers"] for stage in varied["stages"]] == [[0, 1], [1, 9]]


def test_split_writes_the_committed_plan_and_records_overrides(megaplan, here):
    assert megaplan("split", "plans/tiny-hybrid.yaml", "-o", "plan.json").status == 0
    assert (here / "plan.json").read_bytes() == (here / "plans" / "tiny-hybrid.json").read_bytes()
    ran = megaplan("split", "plans/tiny-hybrid.yaml", "-o", "-", "--set", "batch.micro_batch_size=8", "--mode", "equal")
    assert json.loads(ran.out)["overrides"] == ["batch.micro_batch_size=8", "split.mode=equal"]
    assert megaplan("split", "plans/tiny-hybrid.yaml", "-o", "plan.json").status == 0, "a plan is replaced by a plan"


def test_stdin(megaplan, here, monkeypatch):
    for name in ("tiny-hybrid.yaml", "tiny-hybrid.json"):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO((here / "plans" / name).read_bytes())))
        assert megaplan("estimate", "-", "--compare", "batch.micro_batch_size=1").status == 0


def test_new_writes_a_spec_that_estimates_and_replaces_nothing(megaplan, here):
    ran = megaplan("new", "tiny-hybrid", "-o", "mine.yaml")
    assert (ran.status, "megaplan schema spec > megaplan.spec.1.schema.json" in ran.out) == (0, True)
    line, _, rest = (here / "mine.yaml").read_text().partition("\n")
    assert line == "# yaml-language-server: $schema=megaplan.spec.1.schema.json"
    assert rest == (here / "plans" / "tiny-hybrid.yaml").read_text()
    assert megaplan("estimate", "mine.yaml").status == 0
    assert megaplan("new", "llama-3.1-8b", "-o", "mine.yaml").status == 2
    assert megaplan("new", "llama-3.1-8b", "-o", "mine.yaml", "--force").status == 0


def test_what_no_command_expects_is_a_bug_and_exits_2(megaplan, monkeypatch):
    def broken(*_args, **_kwargs):
        raise ZeroDivisionError("an accident")

    monkeypatch.setattr("megaplan.api.estimate.build_budget", broken)
    ran = megaplan("estimate", "plans/tiny-hybrid.yaml")
    assert ran.status == 2
    assert "error[MP499]: this is a bug in megaplan" in ran.err
    assert "ZeroDivisionError: an accident" in ran.err
    ran = megaplan("estimate", "plans/tiny-hybrid.yaml", "--json")
    assert json.loads(ran.out)["diagnostics"][0]["code"] == "MP499"


def test_an_interrupt_exits_130_quietly(capsys, monkeypatch):
    def interrupted(*_args, **_kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(main_module, "_app", lambda _words: interrupted)
    assert run(["estimate", "x"]) == 130
    assert capsys.readouterr().err == ""


def test_a_reader_that_goes_away_is_no_error(here):
    command = f"{sys.executable} -m megaplan estimate plans/tiny-hybrid.yaml --explain | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, env=_environment())
    assert "Traceback" not in done.stderr
    assert "MP499" not in done.stderr
    assert done.stdout.splitlines()[0] == "tiny-hybrid"


def _environment() -> dict[str, str]:
    """Variables of a subprocess that imports megaplan and megakernels from where this process does."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
