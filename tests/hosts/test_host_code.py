"""Exported files, read by the hosts' own parsers and config classes; skipped if the hosts are not installed."""

import importlib.util
import json
import logging
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from megaplan.exporters.hosts import EXPORTERS
from megaplan.exporters.values import Source
from megaplan.inventory.build import build_inventory
from megaplan.layout.build import build_layout
from megaplan.partition.choose import choose_cuts
from megaplan.spec.load import load_spec, load_spec_text
from megaplan.spec.models import SplitSection

PLANS = sorted((Path(__file__).parents[2] / "plans").glob("*.yaml"))
DENSE = """
format: megaplan.spec/1
name: dense
model:
  pattern: AD
  num_layers: 32
  hidden_size: 256
  vocab_size: 1024
  attention: {kind: gqa, num_heads: 8, num_kv_heads: 4, head_dim: 32}
  mlp: {ffn_hidden_size: 640}
batch: {micro_batch_size: 2, seq_length: 512}
schedule: {num_microbatches: 16}
optimizer: {matrix: adamw}
"""
MESHES = [
    "{dp_shard: 8}",
    "{dp_replicate: 2, dp_shard: 4}",
    "{pp: 2, dp_shard: 2}",
    "{pp: 4}",
    "{pp: 8, dp_shard: 2}",
    "{tp: 2, vocab_parallel: true}",
    "{pp: 2, tp: 2, vocab_parallel: true}",
    "{cp: 2}",
    "{pp: 2, vpp: 2}",
    "{pp: 4, vpp: 2}",
    "{pp: 2, vpp: 4}",
    "{pp: 4, dp_shard: 8}",
    "{}",
    "{dp_replicate: 8}",
    "{pp: 16}",
    "{pp: 2, dp_replicate: 2}",
    "{pp: 2, vpp: 8}",
    "{pp: 4, vpp: 4}",
    "{pp: 8, vpp: 2, dp_shard: 4}",
    "{pp: 4, vpp: 2, tp: 2, dp_shard: 2, vocab_parallel: true}",
]
SPANS = [
    ("{pp: 2}", "[[0, 6], [6, 32]]"),
    ("{pp: 2}", "[[0, 30], [30, 32]]"),
    ("{pp: 4}", "[[0, 2], [2, 16], [16, 30], [30, 32]]"),
    ("{pp: 4}", "[[0, 10], [10, 18], [18, 26], [26, 32]]"),
    ("{pp: 2, vpp: 2}", "[[0, 4], [4, 14], [14, 24], [24, 32]]"),
    ("{pp: 2, vpp: 2}", "[[0, 10], [10, 20], [20, 30], [30, 32]]"),
    ("{pp: 4, dp_shard: 2}", "[[0, 8], [8, 18], [18, 28], [28, 32]]"),
]
"""Meshes and cuts that are not equal."""


def _source(spec: Any) -> Source:
    inventory = build_inventory(spec)
    return Source(spec, inventory, build_layout(spec, inventory, choose_cuts(spec, inventory).spans))


def _of_mesh(mesh: str, *overrides: str) -> Source:
    kind = "interleaved_1f1b" if "vpp" in mesh else "1f1b"
    return _source(load_spec_text(DENSE, "dense.yaml", [f"mesh={mesh}", f"schedule.kind={kind}", *overrides]).spec)


def _cut_at_blocks(source: Source) -> Source:
    """The plan, with equal stages if its own stages end inside a block."""
    if all(slot.start % 2 == 0 for slot in source.slots()):
        return source
    return _source(source.spec.model_copy(update={"split": SplitSection(mode="equal")}))


def _all() -> list[Any]:
    shipped = [pytest.param(lambda path=path: _source(load_spec(str(path)).spec), id=path.stem) for path in PLANS]
    return shipped + [pytest.param(lambda mesh=mesh: _of_mesh(mesh), id=mesh) for mesh in MESHES]


@pytest.mark.requirement("R-71")
@pytest.mark.parametrize(("mesh", "spans"), [*((mesh, None) for mesh in MESHES if "pp:" in mesh), *SPANS])
def test_megatrons_layout_parser_returns_our_stages(mesh: str, spans: str | None) -> None:
    layouts = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
    cut = [] if spans is None else [f"split={{mode: manual, spans: {spans}, reason: test}}"]
    source = _of_mesh(mesh, "host={name: megatron, model: gpt}", *cut)
    text = EXPORTERS["megatron"](source).text
    (layout,) = re.findall(r"--pipeline-model-parallel-layout (\S+)", text)
    parser = layouts.PipelineParallelLayerLayout
    stages = parser.parse_str_to_list(shlex.split(layout)[0])
    assert [sum(getattr(layer, "name", layer) == "decoder" for layer in stage) for stage in stages] == [
        len(stage) // 2 for stage in source.stages
    ]
    built = parser(shlex.split(layout)[0], source.spec.mesh.pp)
    built.validate_layer_layout(num_layers=16, mtp_num_layers=0)
    for slot in source.slots():
        decoders = [layer for layer in built.layout[slot.pp_rank][slot.chunk] if layer.name == "decoder"]
        assert len(decoders) == (slot.stop - slot.start) // 2


@pytest.mark.requirement("R-71")
@pytest.mark.parametrize("make", _all())
def test_megatrons_allocation_takes_the_symbols(make: Any) -> None:
    allocation = pytest.importorskip("megatron.core.ssm.mamba_hybrid_layer_allocation")
    source = make()
    (pattern,) = re.findall(r"--hybrid-layer-pattern (\S+)", EXPORTERS["megatron"](source).text)
    main = shlex.split(pattern)[0].partition("/")[0]
    for stage, letters in zip(main.split("|"), source.stages, strict=True):
        if set(stage) <= set(allocation.Symbols.VALID):  # the published release does not know '+' and 'G'
            assert allocation.allocate_layers(len(stage), 0.0, 0.0, stage) == list(stage)
        assert len(stage) == len(letters)


@pytest.mark.requirement("R-71")
@pytest.mark.parametrize("make", _all())
def test_torchtitans_classes_take_the_sections(make: Any) -> None:
    config = pytest.importorskip("torchtitan.config")
    document = json.loads(EXPORTERS["torchtitan"](_cut_at_blocks(make())).text)
    parallelism = config.ParallelismConfig(**document["parallelism"])
    training = config.TrainingConfig(**document["training"])
    assert parallelism.pipeline_parallel_degree == document["parallelism"]["pipeline_parallel_degree"]
    assert training.seq_len == document["training"]["seq_len"]
    if parallelism.pipeline_parallel_degree > 1:
        schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
        assert schedules.get_schedule_class(parallelism.pipeline_parallel_schedule)


@pytest.mark.requirement("R-71")
@pytest.mark.parametrize("make", _all())
def test_deepspeed_loads_the_configuration(make: Any) -> None:
    runtime = pytest.importorskip("deepspeed.runtime.config")
    zero = pytest.importorskip("deepspeed.runtime.zero.config")
    source = make()
    document = json.loads(EXPORTERS["deepspeed"](source).text)
    assert zero.get_zero_config(document).stage == document["zero_optimization"]["stage"]
    pipeline = runtime.get_pipeline_config(document)
    assert pipeline["stages"] == (source.spec.mesh.pp if source.spec.mesh.pp > 1 else "auto")
    assert runtime.get_gradient_clipping(document) == document["gradient_clipping"]
    sizes = document["train_micro_batch_size_per_gpu"] * document["gradient_accumulation_steps"] * source.data_ranks
    assert document["train_batch_size"] == sizes


@pytest.fixture
def nanotron(monkeypatch: pytest.MonkeyPatch) -> Any:
    """nanotron's configuration module; its 0.4 release imports its logging and its configuration from each other, so logging stands in."""
    if importlib.util.find_spec("nanotron") is None:
        pytest.skip("nanotron is not installed")
    logger = ModuleType("nanotron.logging")
    logger.__dict__.update(
        vars(logging) | {"__name__": logger.__name__}, get_logger=logging.getLogger, log_rank=print, warn_once=print, human_format=str
    )
    monkeypatch.setitem(sys.modules, "nanotron.logging", logger)
    return pytest.importorskip("nanotron.config.config", exc_type=ImportError)


@pytest.mark.requirement("R-71")
@pytest.mark.parametrize("mesh", MESHES)
def test_nanotrons_loader_takes_the_configuration(mesh: str, nanotron: Any) -> None:
    document = yaml.safe_load(EXPORTERS["nanotron"](_of_mesh(mesh)).text)
    config = nanotron.get_config_from_dict(document, config_class=nanotron.Config)
    assert config.parallelism.pp == document["parallelism"]["pp"]
    assert config.model.model_config.num_hidden_layers == 16
