"""`megaplan import megatron --record`: launches of scripts of every kind are recorded, and their other actions change nothing."""

import os
import signal
import subprocess
from pathlib import Path
from types import FrameType

import pytest
from recorded_launches import CONFINED, RUN, TRAIN, Record, batch

from megaplan.cli.main import run
from megaplan.errors import MegaplanError
from megaplan.importers.megatron.recorded import read_recording
from megaplan.importers.megatron.recording import record as recorder
from megaplan.importers.megatron.recording.record import kept_variables

pytestmark = pytest.mark.jobs


@pytest.mark.skipif(not CONFINED, reason="a short program runs only where the kernel confines it")
@pytest.mark.parametrize("program", ["python -c 'print(2 * 2)'", "python3 <<'EOF'\nimport math\nprint(math.isqrt(16))\nEOF\n"])
def test_a_short_program_of_the_script_runs(program: str, recorded: Record) -> None:
    assert batch(recorded(f"B=$({program})\n{RUN} $B")) == 4


def test_scripts_that_look_around_their_own_folder(recorded: Record, tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/model.sh").write_text("declare -A SIZE=([b]=4)\nMODEL=(--swiglu)\n")
    (tmp_path / "pretrain_gpt.py").touch()
    text = (
        'DIR="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"\nsource "$DIR/../conf/model.sh"\n. conf/model.sh\ncd $(dirname $0)/..\n'
        f'[ -f pretrain_gpt.py ] || exit 1\n[ -d "$(realpath $DIR/../conf)" ] || exit 1\n{RUN} ${{SIZE[b]}} ${{MODEL[@]}} --save $DIR/out\n'
    )
    found = recorded(text, name="examples/launch.sh")
    assert batch(found) == 4
    (row,) = found.of_kind("launch")
    assert row.words[-1] == str(tmp_path / "examples/out"), "paths are those outside of the mirror"
    assert (row.file, row.line) == ("examples/launch.sh", 7)


def test_a_script_may_be_executable_and_below_the_current_folder(recorded: Record, tmp_path: Path) -> None:
    inner = tmp_path / "inner.sh"
    inner.write_text(f"#!/bin/bash -l\n{RUN} $1\n")
    inner.chmod(0o755)
    assert batch(recorded("./inner.sh 4")) == 4
    assert batch(recorded(f"#!/usr/bin/env bash\n{RUN} $1\n", "4", command=())) == 4


def test_directives_are_a_jobs_variables(recorded: Record) -> None:
    head = "#!/bin/bash\n#SBATCH --nodes=2  # two\n#SBATCH --ntasks-per-node=8\nset -u\n"
    text = f"{head}srun python {TRAIN} $SLURM_NNODES --seed $SLURM_PROCID\n"
    for command in (("bash",), ("sbatch",)):
        values = read_recording(recorded(text, command=command), "launch.sh").values
        assert (values["micro_batch_size"], values["nnodes"], values["nproc_per_node"]) == (2, 2, 8)
    more = read_recording(recorded(text, command=("sbatch", "--nodes=4")), "launch.sh").values
    assert more["nnodes"] == 4
    assert read_recording(recorded(f"mpirun -np 16 python {TRAIN} 1"), "launch.sh").values["world_size"] == 16


def test_of_several_launches_the_one_with_most_arguments_is_read_or_the_one_that_is_named(recorded: Record) -> None:
    found = recorded(
        f"python tools/preprocess.py --input x\nfor B in 1 2; do {RUN} $B; done\n{RUN} 3 --swiglu\npython evaluate.py --load x\n"
    )
    assert batch(found) == 3
    assert [batch(found, number) for number in (1, 2, 3)] == [1, 2, 3]
    (said,) = [text for _, text in read_recording(found, "launch.sh").left_out if "launches were recorded" in text]
    assert said.startswith("3 launches were recorded, and number 3 is read\n--launch 1: torchrun")
    with pytest.raises(MegaplanError, match="--launch 4, and launches recorded: 3"):
        batch(found, 4)


def test_a_launch_of_every_node_is_one_launch(recorded: Record) -> None:
    found = read_recording(recorded(f"for HOST in a b c; do ssh $HOST '{RUN} 4'; done"), "launch.sh")
    assert not any("launches were recorded" in text for _, text in found.left_out)


def test_what_else_was_tried_is_listed(recorded: Record) -> None:
    found = read_recording(recorded(f"git pull\nwget -q http://x\nwget http://y\nconda activate x\nzork\n{RUN} 4\nexit 3"), "launch.sh")
    notes = [text for _, text in found.left_out]
    assert "not run: conda, git, wget (2 times), zork" in notes
    assert any(text.startswith("after the launch the script ended with status 3") for text in notes)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("set -u\ntorchrun --nnodes $SLURM_NNODES x.py\n", "SLURM_NNODES: unbound variable"),
        ("echo no data >&2; exit 7\n", "it ended with status 7"),
        ("[ -f /no/such/file ] || exit 1\n" + RUN, "no launch was recorded; it ended with status 1"),
        ("if true; then\n", "syntax error"),
        ("", "no launch was recorded"),
    ],
)
def test_a_script_that_launches_nothing_says_why(text: str, said: str, recorded: Record) -> None:
    with pytest.raises(MegaplanError) as caught:
        batch(recorded(text))
    (found,) = caught.value.diagnostics
    assert found.code == "MP923"
    assert said in found.detail
    assert ("--env SLURM_NNODES=…" in found.hints) is ("SLURM_NNODES" in text)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


RECORD = ["import", "megatron", "--record", *(["--unconfined"] if not CONFINED else [])]


@pytest.mark.usefixtures("folder")
def test_an_argument_whose_variable_is_set_nowhere_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    Path("launch.sh").write_text(f"GPUS=8\ntorchrun {TRAIN} 1 \\\n  --tensor-model-parallel-size ${{TP}} --save $OUT\n")
    assert run([*RECORD, "--", "bash", "launch.sh"]) == 2
    said = capsys.readouterr().err
    assert "--tensor-model-parallel-size $TP, and TP is set nowhere" in said
    assert "hint: --env TP=…" in said
    assert "set nowhere, and empty: OUT, TP" in said
    assert run([*RECORD, "--env", "TP=2", "--gpus", "2", "-o", "spec.yaml", "--", "bash", "launch.sh"]) == 0
    assert "tp: 2" in Path("spec.yaml").read_text(encoding="utf-8")


@pytest.mark.usefixtures("folder")
def test_a_script_without_the_flag_is_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    Path("launch.sh").write_text(f"touch ran; for B in $(nproc); do {RUN} $B; done\n")
    assert run(["import", "megatron", "launch.sh"]) == 2
    assert "hint: megaplan import megatron --record -- bash launch.sh" in capsys.readouterr().err
    assert not Path("ran").exists()


def test_what_is_run_and_what_protects_is_said_before(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy")
    Path("launch.sh").write_text("exit 1\n")
    assert run([*RECORD, "--", "bash", "launch.sh"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"recording: bash launch.sh\n  in a temporary folder with copies of {folder}, deleted at the end\n")
    assert "HTTPS_PROXY" in said
    assert said.index("limits: 60 s") < said.index("MP923")


@pytest.mark.usefixtures("folder")
def test_a_system_without_the_protections_needs_a_second_flag(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("megaplan.importers.megatron.recording.confine.missing", lambda: ("Landlock",))
    Path("launch.sh").write_text(f"touch ran; B=$(python -c 'print(8)'); {RUN} ${{B:-4}} --vocab-size 128\n")
    assert run(["import", "megatron", "--record", "--", "bash", "launch.sh"]) == 2
    said = capsys.readouterr().err
    assert "MP924" in said
    assert "hint: megaplan import megatron --record --unconfined -- bash launch.sh" in said
    assert run(["import", "megatron", "--record", "--unconfined", "--", "bash", "launch.sh"]) == 0
    answer = capsys.readouterr()
    assert "not confined: the script itself can write wherever you can" in answer.err
    assert "micro_batch_size: 4" in answer.out
    assert not Path("ran").exists()


def test_secrets_and_proxies_are_withheld() -> None:
    given = {
        **dict.fromkeys(
            ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "http_proxy", "NO_PROXY", "SSH_AUTH_SOCK", "GITHUB_TOKEN"), "x"
        ),
        **dict.fromkeys(("DB_PASSWORD", "BASH_ENV", "LD_PRELOAD", "PYTHONPATH", "BASH_FUNC_f%%", "GOOGLE_APPLICATION_CREDENTIALS"), "x"),
        "INDEX": "https://me:pass@host/x",
    }
    assert kept_variables({**given, "TP": "2", "SLURM_NNODES": "4", "MODEL": "8b"}) == {"TP": "2", "SLURM_NNODES": "4", "MODEL": "8b"}


HARMFUL = {
    "removal": ('rm -rf "$V"', "rm -rf ../kept", '/bin/rm -rf "$V"', 'find "$V" -delete', '\\rm -rf "${V:?}"/*'),
    "redirection": ('echo x > "$V/file"', "echo x >> ../kept/file", 'exec 5> "$V/new"', ': > "$V/file"'),
    "redirection of a group": ('{ echo x; } > "$V/file"', '(echo x) >> "$V/new"', 'for I in 1; do echo; done > "$V/file"'),
    "edit": (
        'sed -i s/kept/lost/ "$V/file"',
        'sort -o "$V/file" /dev/null',
        'tee "$V/file" < /dev/null',
        "awk 'BEGIN { print > \"../kept/file\" }'",
    ),
    "copy": ('cp /dev/null "$V/file"', 'mv "$V/file" /tmp/x', 'ln -sf /dev/null "$V/file"', 'mkdir -p "$V/new"', 'touch "$V/new2"'),
    "mode": ('chmod 0 "$V/file"', '/bin/chmod 0 "$V/file"', "python -c 'import os; os.chmod(os.environ[\"V\"], 0)'"),
    "program": tuple(
        f'python -c \'import os; v = os.environ["V"] + "/file"; {each}\''
        for each in ("os.remove(v)", 'open(v, "w")', "os.truncate(v, 0)", 'os.rename(v, v + "2")', 'os.system("/bin/rm " + v)')
    ),
    "program behind a tool": (
        'echo "$V/file" | xargs /bin/rm -f',
        "awk 'BEGIN { system(\"/bin/rm ../kept/file\") }'",
        'env -i /bin/rm -rf "$V"',
    ),
    "program that is built": ('cp /bin/rm own; chmod +x own; ./own -rf "$V"', 'command /bin/rm -rf "$V"', 'echo "$V" | xargs ./own -rf'),
    "loader": ('for L in /lib*/ld-linux*; do echo "$L" /bin/rm -rf "$V" | xargs env; echo /bin/rm -rf "$V" | xargs "$L"; done',),
    "protections undone": ("trap - DEBUG", "unset BASH_ENV", "PATH=/usr/bin:/bin", 'rm -rf "$V"', 'echo x > "$V/file"'),
}


@pytest.mark.skipif(not CONFINED, reason="the kernel does not confine a script here")
@pytest.mark.parametrize("name", HARMFUL)
def test_nothing_outside_is_changed(name: str, recorded: Record, tmp_path: Path) -> None:
    victim = tmp_path.parent / f"{tmp_path.name}-victim" / "kept"
    victim.mkdir(parents=True)
    (victim / "file").write_text("kept\n")
    before = [(path, path.lstat().st_mtime_ns, path.lstat().st_mode) for path in (victim.parent, victim, victim / "file")]
    recorded("\n".join((f"cd {victim}", *HARMFUL[name])), V=victim)
    assert [(path, path.lstat().st_mtime_ns, path.lstat().st_mode) for path in (victim.parent, victim, victim / "file")] == before
    assert (victim / "file").read_text() == "kept\n"
    assert [path.name for path in victim.iterdir()] == ["file"]
    assert {path.name for path in tmp_path.iterdir()} == {"launch.sh"}


@pytest.mark.skipif(not CONFINED, reason="the kernel does not confine a script here")
def test_the_network_and_other_processes_are_out_of_reach(recorded: Record) -> None:
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        program = "import socket; socket.socket()"
        text = f"(exec 3<>/dev/tcp/127.0.0.1/9) || echo closed >&2\npython -c '{program}' || echo refused >&2\nkill -9 {sleeper.pid}\n"
        found = recorded(text)
        assert "closed" in found.said
        assert "refused" in found.said
        assert "PermissionError" in found.of_kind("failed")[0].said
        assert sleeper.poll() is None
    finally:
        sleeper.kill()
        sleeper.wait()


def folders_of(tmp_path: Path) -> list[Path]:
    return list(tmp_path.parent.glob("megaplan-record-*"))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("while true; do :; done", "it ran for 1 seconds"),
        ("trap '' TERM INT HUP EXIT; cat < <(while true; do :; done)", "it ran for 1 seconds"),
        (f"{RUN} 4; for I in {{1..30}}; do (while true; do read -t 5 < /dev/zero; done) & done; wait", "processes"),
        ("for I in {1..90}; do yes > out$I & done; wait", "it wrote more than 4 MiB"),
        ("while true; do yes; done", "it ran for 1 seconds"),
    ],
    ids=["loop", "traps", "processes", "files", "output"],
)
def test_a_script_without_an_end_is_ended_with_all_of_its_processes(
    text: str, why: str, recorded: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "MAX_WRITTEN_BYTES", 2**22)
    monkeypatch.setattr(recorder, "MAX_PROCESSES", 20)
    found = recorded(text, seconds=1)
    assert found.status is None
    assert why in found.ended
    assert bool(found.of_kind("launch")) is ("torchrun" in text)
    assert folders_of(tmp_path) == []


def test_a_process_that_leaves_the_session_is_ended_too(recorded: Record, tmp_path: Path) -> None:
    if not CONFINED:
        pytest.skip("a short program runs only where the kernel confines it")
    program = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(77)\n"
    found = recorded(f"python - <<'EOF' > /dev/null 2>&1\n{program}EOF\n{RUN} 4\n")
    assert batch(found) == 4
    marks = [path for path in Path("/proc").glob("[0-9]*/environ") if _has(path, f"MEGAPLAN_FOLDER={tmp_path.parent}".encode())]
    assert marks == []


def _has(path: Path, mark: bytes) -> bool:
    try:
        return mark in path.read_bytes() and path.parent.name != str(os.getpid())
    except OSError:
        return False


def test_an_interrupt_ends_the_script_and_leaves_no_folder(recorded: Record, tmp_path: Path) -> None:

    def interrupt(_: int, frame: FrameType | None) -> None:
        if frame is not None and Path(frame.f_code.co_filename).name in ("selectors.py", "subprocess.py"):
            raise KeyboardInterrupt
        signal.setitimer(signal.ITIMER_REAL, 0.05)  # elsewhere it may be in a finalizer, which drops exceptions

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 1.0)
    try:
        with pytest.raises(KeyboardInterrupt):
            recorded("while true; do :; done\n", seconds=60)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert folders_of(tmp_path) == []
