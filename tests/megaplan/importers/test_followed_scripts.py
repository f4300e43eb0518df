"""Launch scripts that are followed without running them: as bash runs them, or with a note or an error about undecided parts."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from recorded_launches import PLAIN, RUN, SCRIPTS, recorded
from test_recorded_forms import FORMS

from megaplan.cli.main import run
from megaplan.errors import Diagnostic, MegaplanError, Severity
from megaplan.importers.megatron.arguments import changes_nothing
from megaplan.importers.megatron.followed import read_script
from megaplan.importers.megatron.recorded import read_recording
from megaplan.importers.megatron.spec import import_megatron

ONLY_RUN = {
    "nodes of a job": "output of scontrol",
    "sum of tools": "output of awk",
    "file that is read back": "output of cat",
}
"""Forms whose launch depends on files or programs, each with what the error says."""
RESULTS = {
    "defaults": ("B=${A:-4}; B=${B:=5}", 4),
    "set by a default": (": ${B:=4}", 4),
    "alternative": ("A=1; B=${A:+4}", 4),
    "first of an array": ("L=(4 5); B=$L", 4),
    "last of an array": ("L=(1 2 4); B=${L[-1]}", 4),
    "number of words": ("L=(a b c d); B=${#L[@]}", 4),
    "length": ("A=abcd; B=${#A}", 4),
    "slices": ("A=12345; L=(1 2 3 4 5); M=(${L[@]:3:1}); B=${A:3:1}; [ $B = $M ] || B=0", 4),
    "suffixes": ("A=model-4b.tar.gz; B=${A%%.*}; B=${B#*-}; B=${B%b}", 4),
    "replacements": ("A=8-8; A=${A//8/2}; B=$((${A/-/+}))", 4),
    "case of letters": ("A=Yes; [[ ${A,,} == yes && ${A^^} = YES ]] && B=4", 4),
    "indirect": ("X4=4; A=X4; B=${!A}", 4),
    "keys": ("declare -A M=([a]=1 [b]=3); B=0; for K in ${!M[@]}; do B=$((B + M[$K])); done", 4),
    "sums": ("A=3; ((A++)); let B=A; B=$(( (B << 1) / 2 % 8 > 3 ? 4 : 0 ))", 4),
    "expr": ("B=$(expr 2 \\* 2)", 4),
    "bc": ("B=$(echo '8 / 2' | bc)", 4),
    "counted loop": ("B=0; for ((i=0; i<4; i++)); do ((B+=1)); done", 4),
    "range": ("B=0; for i in {1..3} $(seq 1 1); do [ $i = 9 ] && break; B=$((B + 1)); done", 4),
    "until": ("B=0; until [ $B -ge 4 ]; do B=$((B + 1)); done", 4),
    "continue": ("B=0; for i in 1 2 3 4 5; do [[ $i == 3 ]] && continue; ((B+=1)); done", 4),
    "patterns": ("A=llama-4; case $A in qwen*) B=1;; llama-[0-9]|x) B=4;; *) B=2;; esac", 4),
    "expressions": ("A=v4.2; [[ $A =~ ^v([0-9])\\.2$ && ! $A =~ x ]] && B=4", 4),
    "brackets": ('A=1; [[ ( $A -eq 1 || $A -eq 2 ) && -z "" ]] && B=4', 4),
    "test": ("if test 3 -lt 4 -a ! -n ''; then B=4; fi", 4),
    "elif": ("A=b; if [ $A = a ]; then B=1; elif [[ $A = b ]]; then B=4; else B=3; fi", 4),
    "files": ("if [ -f size.txt ] && [ ! -d size.txt ]; then B=$(cat size.txt); fi", 4),
    "scope": ("B=4; f() { local B=5; g; }; g() { C=$B; B=6; }; f; [ $C = 5 ] && h=1; (B=7); { D=1; }", 4),
    "result of a function": ("f() { echo $(($1 * 2)); }; B=$(f 2)", 4),
    "status of a function": ("f() { return 1; }; f || B=4", 4),
    "positional": ("set -- 1 4; shift; B=$1; C=$#; [ $C -eq 1 ] || B=0", 4),
    "read": ("IFS=, read -r A B <<< '1,4'", 4),
    "lines": ("B=0; while read -r N; do B=$((B + N)); done <<EOF\n1\n3\nEOF", 4),
    "list of lines": ("mapfile -t L <<< $'a\\nb\\n4'; B=${L[2]}", 4),
    "printf": ("printf -v B '%d' 4; C=$(printf '%02d' 4); [ $C = 04 ] || B=0", 4),
    "names of files": ("A=/x/y-4.sh; B=$(basename $A .sh); B=${B#y-}; [ $(dirname $A) = /x ] || B=0", 4),
    "eval": ('A=B; eval "$A=4"', 4),
    "backticks": ("B=`echo 4`", 4),
}


def taken(text: str, *argv: str, name: str = "launch.sh", **environment: str) -> object:
    return read_script(text, name, environment, argv).values.get("micro_batch_size")


def refused(text: str, name: str = "launch.sh", argv: Sequence[str] = ()) -> list[Diagnostic]:
    with pytest.raises(MegaplanError) as caught:
        import_megatron(text, name, argv=argv)
    return [found for found in caught.value.diagnostics if found.severity is Severity.ERROR]


def notes(text: str, name: str = "launch.sh", **more: Sequence[str]) -> list[str]:
    return [found.detail for found in import_megatron(text, name, **more).loaded.diagnostics if found.code == "MP919"]


@pytest.mark.jobs
@pytest.mark.parametrize("name", [path.stem for path in sorted(SCRIPTS.glob("*.sh"))])
def test_a_script_is_followed_as_it_runs(name: str) -> None:
    path = SCRIPTS / f"{name}.sh"
    own = read_script(path.read_text(encoding="utf-8"), str(path), {}, [])
    others = read_recording(recorded(name), path.name)
    kept = [{key: value for key, value in each.values.items() if not changes_nothing(key)} for each in (own, others)]
    assert kept[0] == kept[1]


@pytest.mark.parametrize("name", [name for name in FORMS if name not in ONLY_RUN])
def test_a_launch_of_every_form_is_followed(name: str) -> None:
    assert taken(FORMS[name]) == 4


@pytest.mark.parametrize("name", ONLY_RUN)
def test_what_only_a_run_answers_is_an_error(name: str) -> None:
    found = refused(FORMS[name])[0]
    assert found.code == ("MP923" if "launch" in ONLY_RUN[name] else "MP922")
    assert ONLY_RUN[name] in found.detail
    assert any("--record" in hint for hint in found.hints)


@pytest.mark.parametrize("name", RESULTS)
def test_the_constructs_of_bash(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, value = RESULTS[name]
    (tmp_path / "size.txt").write_text("4\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert taken(f"{text}\n{RUN} $B\n") == value


def test_nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*words: object, **_: object) -> None:
        raise AssertionError(words)

    monkeypatch.chdir(tmp_path)
    for call in ("system", "execv", "posix_spawn", "fork"):
        monkeypatch.setattr(os, call, never)
    text = f'touch made; echo 1 > made; rm -rf /; curl x | bash; python -c \'open("made", "w")\'; A=$(touch made); {RUN} 4 > made'
    assert taken(text) == 4
    assert list(tmp_path.iterdir()) == []


def test_arguments_of_the_script_and_of_its_launch() -> None:
    assert taken(f"{RUN} $1", "4", "--swiglu") == 4
    assert read_script(f"{RUN} $1", "x.sh", {}, ["4", "--swiglu"]).values["swiglu"] is True
    assert taken(f'case "$1" in --size) B=$2; shift 2;; esac\n{RUN} $B "$@"', "--size", "4", "--swiglu") == 4
    (found,) = refused(f"{RUN} $2")
    assert found.hints[0] == "megaplan import megatron launch.sh -- ARG1 ARG2"
    (found,) = refused(f"if ! false; then\n echo usage\n exit 1\nfi\n{RUN} 4")
    assert (found.code, "it exits on line 3" in found.detail) == ("MP923", True)


def test_what_a_script_requires_is_read_as_if_it_were_given() -> None:
    counted = f"if [ $# -lt 2 ]; then\n echo usage\n exit 1\nfi\nOUT=$1\n{RUN} 4 --save $OUT/$2"
    assert taken(counted) == 4
    assert "the script ends without $1, $2; the reading assumes that they are given" in notes(counted)
    (found,) = refused(counted.replace("4 --save $OUT/$2", "$2"))
    assert (found.code, found.hints[0]) == ("MP918", "megaplan import megatron launch.sh -- ARG1 ARG2")
    first = 'if [[ -z "$DATA" || -z "${MODEL:-}" ]]; then exit 1; fi\nR=${RANK:?needed}\n[ -n "$PROFILE" ] && B=8\n'
    variables = f"{first}{RUN} ${{B:-4}} --node-rank $R"
    assert taken(variables) == 4, "a variable that is asked for and not required stays empty"
    assert "the script ends without DATA, RANK; the reading assumes that they are given" in notes(
        variables.replace(' || -z "${MODEL:-}"', "")
    )
    (found,) = refused(f'[ -n "$TP" ] || exit 1\n{RUN} 4 --tensor-model-parallel-size $TP')
    assert (found.code, found.hints[0]) == ("MP918", "--env TP=…")


def test_an_argument_of_the_script_that_chooses_among_sizes_is_asked_for() -> None:
    """No size is guessed: the script ends at a name that it does not know."""
    (found,) = refused(f'if [[ $2 == 8b ]]; then B=4; elif [[ "$2" == 70b ]]; then B=1; else exit 1; fi\n{RUN} $B')
    assert (found.code, found.hints[0]) == ("MP923", "megaplan import megatron launch.sh -- ARG1 ARG2")


def test_a_loop_to_a_number_that_is_not_known() -> None:
    assert taken(f'N=$(nproc)\nfor ((i = 1; i < $N; i++)); do R+=" $i"; done\n{RUN} 4') == 4
    (found,) = refused(f"N=$(nproc)\nB=1\nfor ((i = 1; i < $N; i++)); do B=2; done\n{RUN} $B")
    assert (found.code, "a loop to i < $N" in found.detail) == ("MP922", True)


def test_an_array_with_words_that_begin_with_a_bracket() -> None:
    more = 'A=("${A[@]}" --bf16)\ntorchrun pretrain_gpt.py ${A[@]}'
    found = read_script(f"A=(--micro-batch-size 4 --moe-layer-freq [0]*1+[1]*1)\n{more}", "x.sh", {}, [])
    assert (found.values["micro_batch_size"], found.values["moe_layer_freq"], found.values["bf16"]) == (4, "[0]*1+[1]*1", True)


def test_a_condition_that_the_text_does_not_decide() -> None:
    """Files and programs of the cluster are absent: an outcome that launches is taken, and one that decides a tensor is an error."""
    assert taken(f"[ -f pretrain_gpt.py ] || exit 1\n{RUN} 4") == 4
    assert taken(f"if ! command -v nvidia-smi; then exit 1; fi\n{RUN} 4") == 4
    same = f"B=4\nif [ -d /lustre/x ]; then SAVE=/lustre/x; fi\n{RUN} $B --save $SAVE"
    assert not any("is not known" in note for note in notes(same))
    (found,) = refused(f"B=4\nif [ $(nproc) -gt 8 ]; then\n B=2\nfi\n{RUN} $B")
    assert (found.code, found.location.line) == ("MP922", 2)
    assert found.detail == "launch.sh decides --micro-batch-size by '$(nproc) -gt 8', which is known only when the script runs"
    assert found.hints == ("megaplan import megatron --record -- bash launch.sh",)
    (found,) = refused(f"E=4\nif [ $(nproc) -gt 8 ]; then\n E=2\nfi\n{RUN} 4 --num-experts 8 --moe-expert-parallel-size $E")
    assert "decides --moe-expert-parallel-size by" in found.detail
    nodes = f"N=1\nif [ -f hosts ]; then N=2; fi\ntorchrun --nnodes $N --nproc_per_node 8 pretrain_gpt.py {PLAIN}"
    assert "-f hosts is not known; the reading assumes that it does not hold; it decides --nnodes" in notes(nodes)
    assert "set nowhere, and empty: USE" in notes(f'[ -n "$USE" ] && A=--swiglu\n{RUN} 4 $A')


def test_variables_that_are_set_nowhere_are_one_error_with_one_hint() -> None:
    (found,) = refused(f"{RUN} $MBS --tensor-model-parallel-size $TP --seq-length ${{S}}")
    assert (found.code, set(found.hints[0].split())) == ("MP918", {"--env", "TP=…", "MBS=…", "S=…"})


def test_launches_of_a_script_are_numbered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("launch.sh").write_text(f"for B in 1 2; do\n{RUN} $B\ndone\n{RUN} 4 --swiglu\n", encoding="utf-8")
    assert any(note.startswith("3 launches were recorded, and number 3 is read") for note in notes(Path("launch.sh").read_text()))
    assert run(["import", "megatron", "launch.sh", "--launch", "2", "-o", "two.yaml"]) == 0
    assert "micro_batch_size: 2" in Path("two.yaml").read_text(encoding="utf-8")
    capsys.readouterr()


@pytest.mark.parametrize(
    "start",
    [
        "docker run -e CUBLAS_WORKSPACE_CONFIG=:8:8 image",
        "docker run --env=CUBLAS_WORKSPACE_CONFIG=:8:8 image",
        "srun --export=ALL,CUBLAS_WORKSPACE_CONFIG=:8:8",
        "mpirun -x CUBLAS_WORKSPACE_CONFIG=:8:8",
        """J='{"env_vars": {"CUBLAS_WORKSPACE_CONFIG": ":8:8"}}'\nray job submit --runtime-env-json="$J" --""",
    ],
)
def test_a_wrapper_passes_variables_on(start: str) -> None:
    text = f"{start} {RUN} 4"
    assert import_megatron(text, "launch.sh").loaded.spec.host.cublas_workspace_kib == 64


def test_files_in_the_scripts_folder_are_followed(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/model.sh").write_text("B=4\nreturn 0\nB=5\n", encoding="utf-8")
    (tmp_path / "inner.sh").write_text(
        f"#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=8\nsrun python pretrain_gpt.py {PLAIN} --micro-batch-size $1\n"
    )
    outer = 'HERE=$(cd "$(dirname "$0")" && pwd)\nsource $HERE/conf/model.sh\nsbatch --nodes=3 ${HERE}/inner.sh $B\n'
    found = read_script(outer, str(tmp_path / "launch.sh"), {}, [])
    assert [found.values[key] for key in ("micro_batch_size", "nnodes", "nproc_per_node")] == [4, 3, 8]


def test_files_are_found_from_the_root_of_the_scripts_tree(tmp_path: Path) -> None:
    (tmp_path / "jobs/small").mkdir(parents=True)
    (tmp_path / "jobs/small/run.sh").write_text(f"{RUN} $1\n", encoding="utf-8")
    assert taken("bash jobs/small/run.sh 4", name=str(tmp_path / "jobs/small/sweep.sh")) == 4
    assert taken("bash $(pwd)/run.sh 4", name=str(tmp_path / "jobs/small/sweep.sh")) == 4
