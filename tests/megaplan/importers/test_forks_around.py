"""Launches of forks: facts of the files around a script, arguments under other names, and layers that do nothing."""

from pathlib import Path

import pytest
from recorded_launches import PLAIN

from megaplan.errors import MegaplanError, Severity
from megaplan.importers.imported import Imported
from megaplan.importers.megatron.spec import import_megatron
from megaplan.inventory.build import build_inventory

RUN = f"torchrun --nproc_per_node 1 pretrain_gpt.py {PLAIN} --make-vocab-size-divisible-by 1"
NULL = "--tokenizer-type NullTokenizer --vocab-size 1000"
TOKENIZER = """
class {name}(Base):
    @property
    def vocab_size(self):
        {returned}

class Other:
    @property
    def vocab_size(self):
        return self._n + 1
"""


def details(found: Imported, severity: Severity = Severity.NOTE) -> list[str]:
    return [each.detail for each in found.loaded.diagnostics if each.severity is severity]


def parameters(found: Imported) -> int:
    return build_inventory(found.loaded.spec).parameters


@pytest.mark.parametrize(
    ("file", "name", "returned", "tokens"),
    [
        ("megatron/tokenizer/tokenizer.py", "_NullTokenizer", "return self._vocab_size_without_eod + 1", 1001),
        ("megatron/training/tokenizer/tokenizer.py", "_NullTokenizer", "return self._vocab_size_without_eod + 1", 1001),
        (
            "megatron/core/tokenizers/text/libraries/null_tokenizer.py",
            "NullTokenizer",
            '"""Returns vocab size."""\n        return self._vocab_size_without_eod + 1',
            1001,
        ),
        ("megatron/core/tokenizers/text/libraries/null_tokenizer.py", "NullTokenizer", "return self._vocab_size", 1000),
    ],
)
def test_a_null_tokenizer_counts_as_the_megatron_around_the_launch(
    file: str, name: str, returned: str, tokens: int, tmp_path: Path
) -> None:
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(TOKENIZER.format(name=name, returned=returned), encoding="utf-8")
    script = tmp_path / "examples/llama/launch.sh"
    script.parent.mkdir(parents=True)
    script.write_text(f"{RUN} {NULL}", encoding="utf-8")
    found = import_megatron(script.read_text(encoding="utf-8"), str(script))
    assert found.loaded.spec.model.vocab_size == tokens
    assert any("counts an end of documents beyond --vocab-size 1000" in note for note in details(found)) is (tokens == 1001)


@pytest.mark.parametrize(("size", "multiple", "said"), [(1000, 1, True), (1023, 128, False), (1024, 128, True)])
def test_a_null_tokenizer_of_no_known_megatron_is_the_newest_with_a_note_where_it_matters(size: int, multiple: int, said: bool) -> None:
    words = f"--tokenizer-type NullTokenizer --vocab-size {size} --make-vocab-size-divisible-by {multiple}"
    found = import_megatron(f"{RUN} {words}", "launch.sh")
    assert found.loaded.spec.model.vocab_size == -(-size // multiple) * multiple
    assert any("until April 2026" in note for note in details(found)) is said


@pytest.mark.parametrize(
    "path", ["/cluster/$USER/repo/conf/model.sh", "$ROOT_OF_REPO/conf/model.sh", "/cluster/someone/repo/conf/model.sh"]
)
@pytest.mark.parametrize("command", ["source", "."])
def test_files_of_another_machine_are_read_where_their_ends_are_here(path: str, command: str, tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/model.sh").write_text('SIZES="--hidden-size 128"\n', encoding="utf-8")
    (tmp_path / "jobs").mkdir()
    script = tmp_path / "jobs/launch.sh"
    script.write_text(f"{command} {path}\n{RUN} {NULL} $SIZES\n", encoding="utf-8")
    found = import_megatron(script.read_text(encoding="utf-8"), str(script))
    assert found.loaded.spec.model.hidden_size == 128
    assert f"{path} is a path on another machine; {tmp_path}/conf/model.sh is read instead" in details(found)


def test_a_file_without_its_folder_is_read_next_to_the_script_alone(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    script = tmp_path / "jobs/launch.sh"
    script.write_text(f"source /cluster/env.sh\n{RUN} {NULL} $SIZES\n", encoding="utf-8")
    (tmp_path / "env.sh").write_text('SIZES="--hidden-size 128"\n', encoding="utf-8")
    assert "/cluster/env.sh does not exist" in details(import_megatron(script.read_text(encoding="utf-8"), str(script)))
    (tmp_path / "jobs/env.sh").write_text('SIZES="--hidden-size 256"\n', encoding="utf-8")
    assert import_megatron(script.read_text(encoding="utf-8"), str(script)).loaded.spec.model.hidden_size == 256


def test_names_of_other_programs_are_read_as_megatrons() -> None:
    older = "--num-key-value-heads 2 --intermediate-size 320 --head-dim 32"
    own = "--group-query-attention --num-query-groups 2 --ffn-hidden-size 320 --kv-channels 32"
    found = import_megatron(f"{RUN} {NULL} {older}", "x.sh")
    assert found.loaded.spec.model == import_megatron(f"{RUN} {NULL} {own}", "x.sh").loaded.spec.model
    assert "--intermediate-size is of earlier releases or forks, and is read as --ffn-hidden-size" in details(found)
    both = import_megatron(f"{RUN} {NULL} --ffn-hidden-size 320 --intermediate-size 640", "x.sh")
    assert both.loaded.spec.model.mlp is not None
    assert both.loaded.spec.model.mlp.ffn_hidden_size == 320
    assert "--intermediate-size 640 has the meaning of --ffn-hidden-size, whose value is taken" in details(both, Severity.WARNING)


@pytest.mark.parametrize("name", ["hf_autotokenizer_model", "my_tokenizer_path", "tokenizer_name_or_path", "hf_tokenizer_dir"])
def test_a_tokenizer_under_a_forks_name(name: str) -> None:
    found = import_megatron(f"{RUN} --tokenizer-type HFAutoTokenizer --{name} EleutherAI/gpt-neox-20b", "x.sh")
    assert found.loaded.spec.model.vocab_size == 50_277


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("/scratch/nordic_tokenizer_131072/vocab.json", 131_072),
        ("models/own-64000.model", 64_000),
        ("models/codeparrot-small/vocab.json", 32_768),
    ],
)
def test_a_number_in_a_tokenizers_name_is_its_size_with_a_warning(name: str, tokens: int) -> None:
    argument = "--vocab-file" if name.endswith("json") else "--tokenizer-model"
    kind = "GPT2BPETokenizer" if name.endswith("json") else "GPTSentencePieceTokenizer"
    found = import_megatron(f"{RUN} --tokenizer-type {kind} {argument} {name}", "x.sh")
    assert found.loaded.spec.model.vocab_size == tokens
    assert any("as its name says" in said for said in details(found, Severity.WARNING)) is ("codeparrot" not in name)


@pytest.mark.parametrize("name", ["own_64000_32000.model", "run-20250101/own.model", "own-7b-100k.model", "v1.50000.model"])
def test_numbers_that_are_no_size_are_not_taken(name: str) -> None:
    with pytest.raises(MegaplanError, match="--vocab-size is missing"):
        import_megatron(f"{RUN} --tokenizer-type GPTSentencePieceTokenizer --tokenizer-model {name}", "x.sh")


@pytest.mark.parametrize(
    ("sizes", "tokens"),
    [
        ("--hidden-size 4096 --ffn-hidden-size 14336 --group-query-attention --num-query-groups 8 --rotary-base 500000", 128_256),
        ("--hidden-size 4096 --ffn-hidden-size 14336 --group-query-attention --num-query-groups 8", 32_000),
        ("--hidden-size 4096 --ffn-hidden-size 12288 --group-query-attention --num-query-groups 8 --rotary-base 1000000", 151_669),
        ("--hidden-size 4096 --ffn-hidden-size 11008", 32_000),
        ("--hidden-size 4096 --ffn-hidden-size 12288", None),
    ],
)
def test_a_nameless_tokenizer_is_that_of_the_public_model_of_the_sizes(sizes: str, tokens: int | None) -> None:
    text = f"{RUN} --num-attention-heads 32 {sizes} --tokenizer-type HuggingFaceTokenizer --tokenizer-model /data/tokenizer.model"
    if tokens is None:
        with pytest.raises(MegaplanError, match="--vocab-size is missing"):
            import_megatron(text, "x.sh")
        return
    found = import_megatron(text, "x.sh")
    assert found.loaded.spec.model.vocab_size == tokens
    assert any("whose sizes the model has" in said for said in details(found, Severity.WARNING))


def test_layers_that_pass_their_input_through_fill_up_stages() -> None:
    pipeline = "--pipeline-model-parallel-size 2 --num-layers 8"
    run = RUN.replace("--nproc_per_node 1", "--nproc_per_node 2")
    found = import_megatron(f"{run} {NULL} {pipeline} --noop-layers 6,7", "x.sh")
    assert "layers 6, 7 pass their input through: 6 are planned" in details(found)
    assert found.loaded.spec.model.pattern == "ADADADAD|ADAD"
    assert parameters(found) == parameters(import_megatron(f"{RUN} {NULL} --num-layers 6", "x.sh"))
    for wrong in ("8", "x", "1,x"):
        with pytest.raises(MegaplanError, match="it names layers from 0 on, of 8"):
            import_megatron(f"{run} {NULL} {pipeline} --noop-layers {wrong}", "x.sh")


@pytest.mark.parametrize(
    ("line", "gpus"),
    [
        ("export CUDA_VISIBLE_DEVICES=4,5,6,7\n", 4),
        ("export CUDA_VISIBLE_DEVICES=3\n", 1),
        ("", 8),
    ],
)
@pytest.mark.parametrize(
    "counted",
    ["import os; print(os.environ['CUDA_VISIBLE_DEVICES'].count(',') + 1)", "import torch; print(torch.cuda.device_count())"],
)
def test_gpus_that_a_line_of_python_counts(line: str, gpus: int, counted: str) -> None:
    run = RUN.replace("--nproc_per_node 1", "--nproc_per_node $GPUS")
    found = import_megatron(f'{line}GPUS=$(python -c "{counted}")\n{run} {NULL}\n', "x.sh")
    assert found.loaded.spec.mesh.world_size == gpus
    assert any("taken to be 8, one node" in said for said in details(found)) is (not line)


def test_other_lines_of_python_are_not_known() -> None:
    with pytest.raises(MegaplanError, match="only a run of the script gives the output of python"):
        import_megatron(f'SIZE=$(python -c "print(2 * 64)")\n{RUN} {NULL} --ffn-hidden-size $SIZE\n', "x.sh")


@pytest.mark.parametrize(
    ("counted", "name"),
    [
        ("$(wc -l < $PBS_NODEFILE)", "PBS_NUM_NODES"),
        ("$(cat $PBS_NODEFILE | uniq | wc -l)", "PBS_NUM_NODES"),
        ("$(sort -u $PBS_NODEFILE | wc -l)", "PBS_NUM_NODES"),
        ("$(wc -l < hostfile)", "PBS_NUM_NODES"),
        ("$SLURM_JOB_NUM_NODES", "SLURM_JOB_NUM_NODES"),
        ("$WORLD_SIZE", "WORLD_SIZE"),
    ],
)
def test_nodes_that_the_cluster_alone_knows_are_the_fewest_that_the_degrees_need(counted: str, name: str) -> None:
    words = "--micro-batch-size 1 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --global-batch-size $((NODES * 4 * 2))"
    text = f"NODES={counted}\n{RUN.replace('--nproc_per_node 1', '--nnodes $NODES --nproc_per_node 4')} {NULL}2 {words}\n"
    found = import_megatron(text, "x.sh")
    assert found.loaded.spec.mesh.world_size == 8
    assert found.loaded.spec.schedule.num_microbatches == 16
    assert f"only the cluster sets {name}; it is read as 2; --env {name}=… sets it" in details(found)
    stated = import_megatron(text, "x.sh", environment={name: "6"})
    assert (stated.loaded.spec.mesh.dp_shard, stated.loaded.spec.schedule.num_microbatches) == (3, 16)


def test_lines_of_files_that_are_here_are_counted_and_sorted(tmp_path: Path) -> None:
    (tmp_path / "hostfile").write_text("b\na\nb\nb\n", encoding="utf-8")
    script = tmp_path / "launch.sh"
    for counted, number in (
        ("wc -l < hostfile", 4),
        ("cat hostfile | uniq | wc -l", 3),
        ("sort hostfile | uniq | wc -l", 2),
        ("sort -u hostfile | wc -l", 2),
        ("cat hostfile | wc -w", 4),
    ):
        script.write_text(f"N=$({counted})\n{RUN} {NULL} --ffn-hidden-size $((N * 64))\n", encoding="utf-8")
        mlp = import_megatron(script.read_text(encoding="utf-8"), str(script)).loaded.spec.model.mlp
        assert mlp is not None
        assert mlp.ffn_hidden_size == 64 * number
