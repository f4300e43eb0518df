"""`megaplan import torchtitan`: the host of a job that torchtitan's own estimate lacks, its errors, and its number of GPUs."""

import pytest

from megaplan.errors import MegaplanError, Severity
from megaplan.importers.imported import Imported
from megaplan.importers.structure import Policy
from megaplan.importers.torchtitan.spec import import_torchtitan

EXPERTS = """
[model]
name = "deepseek_v3"
flavor = "16B"
[training]
local_batch_size = 8
[activation_checkpoint]
mode = "full"
[parallelism]
tensor_parallel_degree = 2
"""
BEYOND = {
    "experts": EXPERTS,
    "expert groups across nodes": EXPERTS + "expert_parallel_degree = 32\n",
    "a pipeline": EXPERTS + 'pipeline_parallel_degree = 4\npipeline_parallel_schedule = "1F1B"\n',
    "context": EXPERTS.replace("tensor", "context"),
    "eight bits": EXPERTS.replace("tensor_parallel_degree = 2", "").replace("[training]", 'converters = ["float8"]\n[training]'),
}
"""Jobs with something that torchtitan's own estimate lacks; some have warnings too."""


def imported(text: str, *overrides: str, gpus: int = 64) -> Imported:
    return import_torchtitan(text, "job.toml", overrides, gpus)


def errors_of(text: str, *overrides: str, gpus: int = 64, strict: bool = False) -> list[tuple[str, str, tuple[str, ...]]]:
    with pytest.raises(MegaplanError) as caught:
        import_torchtitan(text, "job.toml", overrides, gpus, policy=Policy(strict=strict))
    return [(each.code, each.detail, each.hints) for each in caught.value.diagnostics if each.severity is Severity.ERROR]


@pytest.mark.parametrize("name", BEYOND)
def test_a_job_beyond_torchtitans_estimate_is_of_megarun_with_one_warning(name: str) -> None:
    found = imported(BEYOND[name]).loaded
    assert (found.spec.host.name, found.spec.mesh.world_size) == ("megarun", 64)
    assert [each.severity for each in found.diagnostics if each.code == "MP919"] == [Severity.NOTE, Severity.WARNING]
    assert imported(BEYOND[name], "host.name=megarun").loaded.spec == found.spec
    refused = errors_of(BEYOND[name], strict=True)
    assert {code for code, _, _ in refused} == {"MP902"}
    assert {hints[0] for _, _, hints in refused} == {"--set host.name=megarun"}


@pytest.mark.parametrize("name", [name for name in BEYOND if name != "eight bits"])
@pytest.mark.parametrize("override", ["mesh.vpp=2", "batch.seq_length=4097", "recompute.blocks={E: full}"])
def test_errors_that_both_hosts_have_are_those_of_the_second(name: str, override: str) -> None:
    """They are the same with and without features that torchtitan's estimate lacks, which a warning names."""
    with pytest.raises(MegaplanError) as caught:
        imported(BEYOND[name], override)
    found = caught.value.diagnostics
    errors = {each.code for each in found if each.severity is Severity.ERROR}
    assert errors
    assert "MP902" not in errors
    assert [each.severity for each in found if each.code == "MP919"] == [Severity.WARNING]
    assert {code for code, _, _ in errors_of(BEYOND[name], override, "host.name=megarun")} == errors


@pytest.mark.parametrize(
    ("override", "mesh"),
    [
        ("mesh.tp=1", {"tp": 1, "dp_shard": 16}),
        ("mesh.tp=4", {"tp": 4, "dp_shard": 4}),
        ("mesh.pp=2", {"pp": 2, "dp_shard": 16}),
        ("mesh.dp_replicate=2", {"dp_replicate": 2, "dp_shard": 4}),
        ("mesh.ep=4", {"ep": 4, "dp_shard": 8}),
    ],
)
def test_ranks_that_are_left_are_those_of_the_degrees_that_are_set(override: str, mesh: dict[str, int]) -> None:
    spec = imported(BEYOND["a pipeline"], override).loaded.spec
    assert spec.mesh.world_size == 64
    assert {axis: getattr(spec.mesh, axis) for axis in mesh} == mesh
    assert len(spec.split.spans or ()) == spec.mesh.pp


@pytest.mark.parametrize("override", ["mesh.tp=3", "mesh.dp_shard=4", "mesh={tp: 4, dp_shard: 4, vocab_parallel: true}"])
def test_degrees_that_make_other_ranks_than_the_jobs_are_one_error(override: str) -> None:
    ((code, detail, _),) = errors_of(BEYOND["experts"], override)
    assert code == "MP914"
    assert "ranks, and --gpus 64" in detail


def test_a_batch_follows_the_ranks_of_the_degrees_that_are_set() -> None:
    job = EXPERTS.replace("local_batch_size = 8", "local_batch_size = 1\nglobal_batch_size = 64")
    for tp in (1, 2, 4):
        spec = imported(job, f"mesh.tp={tp}").loaded.spec
        assert (spec.mesh.dp_shard, spec.schedule.num_microbatches, spec.global_batch_size) == (64 // tp, tp, 64)
