"""Launch scripts are followed as bash runs them: every case is run by bash too, with a function in the launcher's place."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from megaplan.errors import MegaplanError, Severity
from megaplan.importers.megatron.spec import import_megatron

PLAIN = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 --bf16"
RUN = f"torchrun pretrain_gpt.py {PLAIN} --micro-batch-size"
LAUNCHER = 'torchrun() { echo "$@"; }\nexport -f torchrun\n'

CASES = {
    "keyed array": (8, f'declare -A OF=( ["7b"]=1 ["70b"]=8 ); SIZE=70b; {RUN} ${{OF[$SIZE]}}'),
    "keyed array by elements": (1, f'declare -A OF; OF[7b]=1; OF["70b"]=8; SIZE=7b; {RUN} ${{OF["$SIZE"]}}'),
    "keys of an array": (2, f'declare -A OF=([a]=1 [b]=2); for K in "${{!OF[@]}}"; do [ $K = b ] && B=${{OF[$K]}}; done; {RUN} $B'),
    "key that is absent": (3, f"declare -A OF=([a]=1); {RUN} ${{OF[b]:-3}}"),
    "last element": (4, f"A=(1 2 4); {RUN} ${{A[-1]}}"),
    "element by a variable": (4, f"I=1; A[$I]=4; {RUN} ${{A[1]}}"),
    "array written anew": (4, f'A=(1 2); A=("${{A[@]}}" 4); {RUN} ${{A[2]}}'),
    "break": (8, f"for B in 8 4 2; do if (( 16 % B == 0 )); then break; fi; done; {RUN} $B"),
    "break of two loops": (2, f"for A in 1 2; do for B in 1 2 3; do [ $B = 2 ] && break 2; done; done; {RUN} $B"),
    "continue": (2, f"for B in 1 2 3; do [ $B = 3 ] && continue; C=$B; done; {RUN} $C"),
    "loop that counts": (2, f"for (( I = 0; I < 3; I++ )); do [ $I = 1 ] && continue; B=$I; done; {RUN} $B"),
    "while with a sum": (5, f"I=0; while (( I < 5 )); do (( I++ )); done; {RUN} $I"),
    "sum that assigns": (7, f"let B=2*2; (( B += 3 )); {RUN} $B"),
    "return": (4, f"set_it() {{ B=4; return 0; B=8; }}\nset_it\n{RUN} $B"),
    "return in a branch": (4, f"set_it() {{ if [ 1 = 1 ]; then B=4; return; fi; B=8; }}\nset_it\n{RUN} $B"),
    "return as an answer": (1, f"large() {{ [[ $1 -gt 10 ]] && return 0; return 1; }}\nif large 7; then B=4; else B=1; fi\n{RUN} $B"),
    "variable of a function": (8, f"B=8; other() {{ local B=2; }}; other; {RUN} $B"),
    "name of another variable": (
        4,
        f"declare -A MODEL; MODEL[micro-batch-size]=4; A=()\nfor part in MODEL; do declare -n of=$part\n"
        f"for key in ${{!of[@]}}; do A+=(--$key ${{of[$key]}}); done; done\n{RUN.removesuffix(' --micro-batch-size')} ${{A[@]}}",
    ),
    "default in a sum": (8, f"{RUN} $(( ${{NODES:-2}} * 4 ))"),
    "size of an array in a sum": (4, f"A=(1 2); {RUN} $(( ${{#A[@]}} * 2 ))"),
    "number of arguments in a sum": (4, f'set -- --b 4; while (( "$#" )); do case $1 in --b) B=$2; shift 2;; esac; done; {RUN} $B'),
    "tenth argument in a sum": (20, f"set -- 1 2 3 4 5 6 7 8 9 10; {RUN} $(( ${{10}} * 2 ))"),
    "quotient of a negative number": (3, f"{RUN} $(( -7 / 2 + -7 % 4 + 9 ))"),
    "whole numbers of 64 bits": (2, f"{RUN} $(( 2 ** 63 + 2 ** 63 + 2 ))"),
    "output of echo": (4, f'B=4; A=$(echo "--swiglu" --init-method-std 0.1); {RUN.replace("--bf16", "--bf16 $A")} $(echo $B)'),
    "output of expr": (6, f"{RUN} `expr 2 \\* 3`"),
    "output of cat": (4, f"B=4; A=$(cat <<EOF\n--swiglu\nEOF\n); {RUN.replace('--bf16', '--bf16 $A')} $B"),
    "read of a here-document": (
        4,
        f"B=4\nread -r -d '' A <<EOF || true\n  --swiglu\n  --micro-batch-size $B\nEOF\n{RUN.removesuffix(' --micro-batch-size')} $A",
    ),
    "case on one line": (4, f"SIZE=7b; case $SIZE in 7*) B=4;; *) B=1;; esac; {RUN} $B"),
    "sum as a condition": (4, f"T=2; if ((T>1)); then B=4; else B=1; fi; {RUN} $B"),
    "expression": (4, f'SIZE=70B; if [[ "$SIZE" =~ ^(7|70)[bB]$ ]]; then B=4; else B=1; fi; {RUN} $B'),
    "class of signs": (4, f"if [[ 12 =~ ^[[:digit:]]+$ ]]; then B=4; fi; {RUN} $B"),
    "group in a test": (4, f"if [[ 1 = 1 && ( 2 = 3 || 4 = 4 ) ]]; then B=4; fi; {RUN} $B"),
    "group that is negated": (4, f"if [[ ! ( 1 = 2 ) ]]; then B=4; fi; {RUN} $B"),
    "output into a command": (4, f"exec > >(cat) 2>&1; {RUN.replace('--bf16', '--bf16 2> >(cat >&2)')} 4"),
    "unknown output in eval": (4, f'DIR=$(pwd); CALL="{RUN.replace("--bf16", "--bf16 --save $DIR/out")} 4"; eval $CALL'),
    "unknown output in a shell": (4, f"DAY=$(date +'%y'); bash -c \"{RUN.replace('--bf16', '--bf16 --save $DAY/out')} 4\""),
}


@pytest.mark.parametrize("name", CASES)
def test_a_script_is_followed_as_bash_runs_it(name: str, tmp_path: Path) -> None:
    expected, text = CASES[name]
    assert import_megatron(text, "x.sh", gpus=8).loaded.spec.batch.micro_batch_size == expected
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash to compare with")
    said = subprocess.run([bash, "-c", LAUNCHER + text], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=20).stdout
    assert re.findall(r"--micro-batch-size (\d+)", said) == [str(expected)]


@pytest.mark.parametrize("call", ["{}", "CALL='{}'; eval $CALL"])
def test_a_parenthesis_without_quotation_marks_is_refused_as_bash_refuses_it(call: str) -> None:
    """The words behind it had been left out without a word."""
    text = call.format(f"{RUN} 2 --num-experts 2 --moe-layer-freq ([1]*2) --group-query-attention --num-query-groups 2")
    with pytest.raises(MegaplanError) as caught:
        import_megatron(text, "x.sh", gpus=8)
    (found,) = [item for item in caught.value.diagnostics if item.severity is Severity.ERROR]
    assert (found.code, found.location.line) == ("MP916", 1)
    assert "'(' stands in a command without quotation marks" in found.detail


@pytest.mark.parametrize(
    "branch", ["B=4", "export B=4", "if [ 1 = 1 ]; then B=4; fi", "for B in 4; do :; B=4; done", "case 1 in 1) B=4;; esac", "A[0]=4"]
)
def test_a_branch_that_is_left_out_is_noted_where_anything_in_it_sets_a_variable(branch: str) -> None:
    noted = [item.detail for item in import_megatron(f"B=2\nif [ -f /x ]; then {branch}; fi\n{RUN} $B", "x.sh").loaded.diagnostics]
    assert "the condition depends on the machine, and its branch is left out" in noted


def test_what_a_command_gives_is_asked_for_in_other_words_than_a_variable() -> None:
    with pytest.raises(MegaplanError) as caught:
        import_megatron(f"{RUN} $(nproc)", "x.sh", gpus=8)
    (found,) = caught.value.diagnostics
    assert found.detail == "--micro-batch-size $(nproc), and what $(nproc) gives is not known: no command is run"
    assert found.hints[0] == "write the value in a copy of the file"


def test_a_sum_without_a_value_is_told_once() -> None:
    with pytest.raises(MegaplanError) as caught:
        import_megatron(f"{RUN} $((A / B))", "x.sh", gpus=8)
    assert [item.detail for item in caught.value.diagnostics] == ["--micro-batch-size $((A / B)), and the sum $((A / B)) has no value"]


def test_gpus_that_are_given_stand_for_nodes_and_processes_that_are_not_known() -> None:
    text = f"torchrun --nnodes $NODES --nproc-per-node $GPUS pretrain_gpt.py {PLAIN}"
    assert import_megatron(text, "x.sh", gpus=8).loaded.spec.mesh.world_size == 8
    with pytest.raises(MegaplanError) as caught:
        import_megatron(text, "x.sh")
    assert [item.code for item in caught.value.diagnostics] == ["MP918", "MP918"]


def test_gpus_that_differ_from_what_the_launch_states_are_noted() -> None:
    text = f"torchrun --nnodes 2 --nproc-per-node 8 pretrain_gpt.py {PLAIN}"
    found = import_megatron(text, "x.sh", gpus=4).loaded
    assert found.spec.mesh.world_size == 4
    assert "4 GPUs, as --gpus says; the launch states 16" in [item.detail for item in found.diagnostics]
    same = import_megatron(text, "x.sh", gpus=16).loaded
    assert not any("--gpus says" in item.detail for item in same.diagnostics)


@pytest.mark.parametrize("nested", ["${A:-" * 400 + "4" + "}" * 400, "$(echo " * 400 + "4" + ")" * 400], ids=["defaults", "commands"])
def test_a_script_that_is_nested_too_deeply_is_refused(nested: str) -> None:
    with pytest.raises(MegaplanError) as caught:
        import_megatron(f"{RUN} {nested}", "x.sh", gpus=8)
    assert [item.code for item in caught.value.diagnostics] == ["MP916"]


def test_powers_of_powers_are_whole_numbers_of_64_bits_too() -> None:
    """They took all of the memory."""
    text = f"{RUN} $(( {'(' * 12}9{' ** 63)' * 12} ))"
    with pytest.raises(MegaplanError) as caught:
        import_megatron(text, "x.sh", gpus=8)
    assert [item.code for item in caught.value.diagnostics] == ["MP916"]
