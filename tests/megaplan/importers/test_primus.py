"""Configurations of Primus for torchtitan and MaxText are the jobs of those programs that state the same."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from megaplan.errors import MegaplanError
from megaplan.importers.maxtext.spec import import_maxtext
from megaplan.importers.torchtitan.spec import import_torchtitan

TITAN = {"model": {"name": "llama3", "flavor": "8B"}, "job": {"description": "x"}}
DEFAULTS = {
    "training": {"local_batch_size": 8, "seq_len": 2048, "steps": 10},
    "activation_checkpoint": {"mode": "none"},
    "trainable": False,
}
OVERRIDES = {"training": {"local_batch_size": 2, "seq_len": "${LENGTH:4096}"}, "parallelism": {"tensor_parallel_degree": 2}}


def written(folder: Path, framework: str, model: dict[str, Any], module: dict[str, Any], overrides: dict[str, Any]) -> Path:
    """A configuration in a tree of Primus's files, each of which extends another."""
    for kind, name, held in (("models", "model", model), ("modules", "pre_trainer", module)):
        place = folder / "primus/configs" / kind / framework
        place.mkdir(parents=True)
        (place / "base.yaml").write_text(yaml.safe_dump(held), encoding="utf-8")
        (place / f"{name}.yaml").write_text(yaml.safe_dump({"extends": ["base.yaml"], "own": None}), encoding="utf-8")
    part = {"framework": framework, "config": "pre_trainer.yaml", "model": "model.yaml", "overrides": overrides}
    path = folder / "examples/job.yaml"
    path.parent.mkdir()
    path.write_text(yaml.safe_dump({"work_group": "x", "modules": {"pre_trainer": part}}, sort_keys=False), encoding="utf-8")
    return path


def test_a_job_of_torchtitan_builds_on_the_files_that_it_names(tmp_path: Path) -> None:
    path = written(tmp_path, "torchtitan", TITAN, DEFAULTS, OVERRIDES)
    read = import_torchtitan(path.read_text(encoding="utf-8"), str(path), gpus=8).loaded.spec
    toml = (
        '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 2\nseq_len = 4096\nsteps = 10\n'
        '[parallelism]\ntensor_parallel_degree = 2\n[activation_checkpoint]\nmode = "none"\n'
    )
    assert read == import_torchtitan(toml, "job.toml", gpus=8).loaded.spec


@pytest.mark.parametrize("blocks", [3, 32])
def test_layers_over_those_of_a_flavor_are_taken(tmp_path: Path, blocks: int) -> None:
    path = written(tmp_path, "torchtitan", TITAN, DEFAULTS, {**OVERRIDES, "model": {"n_layers": blocks}})
    assert import_torchtitan(path.read_text(encoding="utf-8"), str(path), gpus=8).loaded.spec.model.num_layers == 2 * blocks


def test_a_run_of_maxtext_builds_on_the_files_that_it_names(tmp_path: Path) -> None:
    model = {"model_name": "default", "base_emb_dim": 256, "base_num_decoder_layers": 2, "rope_max_timescale": "1_000_000"}
    path = written(tmp_path, "maxtext", model, {"remat_policy": "full", "steps": 9}, {"per_device_batch_size": 2, "steps": 7})
    words = (
        "base_emb_dim=256 base_num_decoder_layers=2 rope_max_timescale=1000000 remat_policy=full steps=7 per_device_batch_size=2 name=job"
    )
    read, stated = import_maxtext([str(path)], devices=8).loaded.spec, import_maxtext(words.split()[:-1], devices=8).loaded.spec
    assert read.model_copy(update={"name": "x"}) == stated.model_copy(update={"name": "x"})
    assert read.model.attention.rope_theta == 1_000_000


@pytest.mark.parametrize(
    ("stated", "hint"),
    [
        ("maxtext", "megaplan import maxtext {}"),
        ("megatron", "megaplan import megatron {}"),
        ("megatron_bridge", "megaplan import megatron run_config.yaml   # the configuration that a run of Megatron-Bridge writes"),
        ("diffusion", "megaplan estimate MODEL --gpus 8"),
    ],
)
def test_another_framework_is_named_with_the_command_that_reads_it(tmp_path: Path, stated: str, hint: str) -> None:
    path = written(tmp_path, stated, TITAN, DEFAULTS, OVERRIDES)
    with pytest.raises(MegaplanError) as caught:
        import_torchtitan(path.read_text(encoding="utf-8"), str(path))
    (found,) = caught.value.diagnostics
    assert (found.code, found.hints[0]) == ("MP926", hint.format(path))


def test_a_copy_outside_the_tree_says_what_it_lacks(tmp_path: Path) -> None:
    path = written(tmp_path, "torchtitan", TITAN, DEFAULTS, OVERRIDES)
    (tmp_path / "primus/configs/models/torchtitan/model.yaml").unlink()
    with pytest.raises(MegaplanError) as caught:
        import_torchtitan(path.read_text(encoding="utf-8"), str(path))
    (found,) = caught.value.diagnostics
    assert "has primus/configs/models/torchtitan/model.yaml" in found.detail
    assert found.hints[0].startswith("megaplan import torchtitan Primus/examples/job.yaml")
