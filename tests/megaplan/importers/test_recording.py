"""`megaplan import megatron --record`: what scripts of every kind launch is recorded, and what they do beside it changes nothing."""

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from recorded_launches import CONFINED

from megaplan.cli.main import run
from megaplan.errors import MegaplanError
from megaplan.importers.megatron.recorded import read_recording
from megaplan.importers.megatron.recording import record as recorder
from megaplan.importers.megatron.recording.record import Recording, kept_variables, record

PLAIN = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 --bf16 --mock-data"
TRAIN = f"pretrain_gpt.py {PLAIN} --micro-batch-size"
RUN = f"torchrun --nproc_per_node 8 {TRAIN}"
Record = Callable[..., Recording]


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Record:
    """Writes a script and records it in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(recorder.tempfile, "tempdir", str(tmp_path.parent))

    def take(text: str, *argv: str, command: tuple[str, ...] = ("bash",), name: str = "launch.sh", **more: object) -> Recording:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text, encoding="utf-8")
        environment = {key: str(value) for key, value in more.items() if key != "seconds"}
        return record([*command, name, *argv], environment, confined=CONFINED, seconds=int(str(more.get("seconds", 20))))

    return take


def batch(recording: Recording, number: int | None = None) -> object:
    return read_recording(recording, "launch.sh", number).values["micro_batch_size"]


FORMS = {
    "exec": f"exec {RUN} 4",
    "exec of a path": f"exec /opt/conda/bin/{RUN} 4 > /logs/train.log 2>&1",
    "absolute python": f"/usr/bin/python -u -m torch.distributed.run --nproc_per_node 8 {TRAIN} 4",
    "python of a variable": f'PYTHON=/opt/env/bin/python3; "$PYTHON" -m torch.distributed.launch {TRAIN} 4',
    "launcher of a variable": f'LAUNCHER="torchrun --nproc_per_node 8"; $LAUNCHER {TRAIN} 4',
    "path that a script extends": f"export PATH=/opt/conda/bin:$PATH; hash -r; {RUN} 4",
    "shell of a shell": f"bash -x -c '{RUN} 4'",
    "sh": f"sh -c '{RUN} 4'",
    "login shell": f'bash -lc "{RUN} 4"',
    "eval": f"CMD='{RUN} 4'; eval $CMD",
    "srun of a shell": f'srun -N 2 --ntasks-per-node=1 --container-image img:latest bash -c "cd /x; {RUN} 4"',
    "srun of the program": f"srun -l --output=/logs/%j.log python -u {TRAIN} 4",
    "mpirun": f"mpirun -np 8 --allow-run-as-root -x NCCL_DEBUG=INFO -hostfile hosts python {TRAIN} 4",
    "deepspeed": f"deepspeed --num_nodes 2 --num_gpus 8 {TRAIN} 4",
    "accelerate": f"accelerate launch --num_processes 8 {TRAIN} 4",
    "nohup and timeout": f"nohup timeout 3600 env A=1 numactl -N 0 {RUN} 4 > logs/out.txt 2>&1 &",
    "ssh": f"for HOST in a b; do ssh $HOST 'cd /w && {RUN} 4' & done; wait",
    "docker": f"docker run --gpus all -v /data:/data image:tag bash -c '{RUN} 4'",
    "nsys": f"nsys profile -o out --trace cuda,nvtx {RUN} 4",
    "ray": f"ray job submit --address http://head:8265 -- {RUN.replace('torchrun --nproc_per_node 8', 'python')} 4",
    "sbatch of a here-document": f"sbatch <<EOF\n#!/bin/bash\n#SBATCH --nodes=2\nsrun {RUN} 4\nEOF",
    "sbatch of a written file": f"cat > job.sub <<'EOF'\n#!/bin/bash\n#SBATCH -N 2\nsrun {RUN} $1\nEOF\nsbatch --export=ALL,A=1 job.sub 4",
    "sbatch --wrap": f'sbatch -N 2 --wrap="srun {RUN} 4"',
    "log of a missing folder": f"{RUN} 4 > logs/a/b.log 2>&1",
    "log elsewhere": f"set -e; mkdir -p /lustre/ckpt; cd /lustre/ckpt; {RUN} 4 2>&1 | tee -a /lustre/ckpt/train.log",
    "output of the whole script": f"exec > >(tee /logs/all.log) 2>&1\n{RUN} 4",
    "group with a log": f"mkdir -p out; {{ echo start; {RUN} 4; }} > out/log",
    "array": f"A=(--bf16 --micro-batch-size 4); {RUN.removesuffix(' --micro-batch-size')} ${{A[@]}}",
    "keyed arrays by name": "declare -A OF=([micro-batch-size]=4); A=(); for K in ${!OF[@]}; do A+=(--$K ${OF[$K]}); done\n"
    f'declare -n R=A; {RUN.removesuffix(" --micro-batch-size")} "${{R[@]}}"',
    "function": f"go() {{ local B=$1; shift; {RUN} $B $*; }}\ngo 4 --swiglu",
    "here-document into a variable": f"B=4; read -r -d '' A <<EOF || true\n--swiglu --micro-batch-size $B\nEOF\n{RUN} 1 $A",
    "printf into a variable": f"printf -v B '%d' 4; {RUN} $B",
    "conda and modules": f"set -e; source /opt/conda/etc/profile.d/conda.sh; conda activate x; module load cuda; ulimit -n 65536; {RUN} 4",
    "options of set": f"set -euxo pipefail; trap 'echo bad' ERR; {RUN} 4",
    "nodes of a job": f'mapfile -t HOSTS < <(scontrol show hostnames "$SLURM_JOB_NODELIST"); {RUN} ${{#HOSTS[@]}}',
    "GPUs of the machine": f"N=$(nvidia-smi --query-gpu=name --format=csv,noheader | wc -l); M=$(nvidia-smi -L|wc -l); {RUN} $((N+M-12))",
    "sum of tools": f"B=$(echo '2 2' | awk '{{print $1*$2}}'); C=$(expr $B - 4 || true); {RUN} $((B + C))",
    "file that is read back": f"echo 4 > /tmp/of_this_script; cd /tmp; {RUN} $(cat of_this_script)",
    "machine's questions": f"[[ -x $(command -v git) ]] && git pull; pip install -e .; curl -s http://x/y | bash; {RUN} 4",
    "standard input": f"read -r -p 'go? ' ANSWER; cat > /dev/null; python -; {RUN} ${{ANSWER:-4}}",
    "rank variables": f'[ "${{RANK:-0}}" -eq 0 ] && B=4; torchrun --nnodes ${{WORLD_SIZE:-2}} --node_rank ${{RANK:-0}} {TRAIN} $B',
}


@pytest.mark.parametrize("name", FORMS)
def test_a_launch_is_recorded(name: str, recorded: Record) -> None:
    more = {"SLURM_NNODES": 4, "SLURM_JOB_NODELIST": "n[1-4]"} if name == "nodes of a job" else {}
    found = recorded(FORMS[name], **more)
    assert batch(found) == 4, found


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
    Path("launch.sh").write_text(f"touch ran; for B in 4; do {RUN} $B; done\n")
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
        ("while true; do :; done", "it ran for 2 seconds"),
        ("trap '' TERM INT HUP EXIT; cat < <(while true; do :; done)", "it ran for 2 seconds"),
        (f"{RUN} 4; for I in {{1..30}}; do (while true; do read -t 5 < /dev/zero; done) & done; wait", "processes"),
        ("for I in {1..90}; do yes > out$I & done; wait", "it wrote more than 4 MiB"),
        ("while true; do yes; done", "it ran for 2 seconds"),
    ],
    ids=["loop", "traps", "processes", "files", "output"],
)
def test_a_script_without_an_end_is_ended_with_all_of_its_processes(
    text: str, why: str, recorded: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "MAX_WRITTEN_BYTES", 2**22)
    monkeypatch.setattr(recorder, "MAX_PROCESSES", 20)
    found = recorded(text, seconds=2)
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
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 1.0)
    try:
        with pytest.raises(KeyboardInterrupt):
            recorded("while true; do :; done\n", seconds=60)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert folders_of(tmp_path) == []
