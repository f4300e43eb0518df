"""Copies of everything on every data rank: the text of each export for `sharding.mode: ddp`, and its reported losses."""

import json
from collections.abc import Callable

import pytest

from megaplan.exporters.deepspeed import export_deepspeed
from megaplan.exporters.fsdp2 import export_fsdp2
from megaplan.exporters.maxtext import export_maxtext
from megaplan.exporters.megatron import export_megatron
from megaplan.exporters.torchtitan import export_torchtitan
from megaplan.exporters.values import Exported, Source

Made = Callable[..., Source]

DDP = "sharding.mode=ddp"


def test_deepspeed_shards_nothing(source_of: Made) -> None:
    found = export_deepspeed(source_of(DDP, "mesh.dp_replicate=2", "mesh.dp_shard=4"))
    assert json.loads(found.text)["zero_optimization"]["stage"] == 0
    assert not {loss.key for loss in found.losses} & {"mesh.dp_replicate", "sharding.mode"}


def test_megatron_has_no_distributed_optimizer(source_of: Made) -> None:
    shards, copies = (export_megatron(source_of("mesh.dp_shard=4", *more)).text for more in ((), (DDP,)))
    assert "--use-distributed-optimizer" in shards
    assert "--use-distributed-optimizer" not in copies
    assert "--num-distributed-optimizer-instances" not in export_megatron(source_of(DDP, "mesh.dp_replicate=4")).text


@pytest.mark.parametrize("export", [export_torchtitan, export_maxtext])
def test_a_copying_axis_is_another_axis(export: Callable[[Source], Exported], source_of: Made) -> None:
    """torchtitan and MaxText copy over the axis that is dp_replicate here, and shard over that of dp_shard."""
    for mesh, lost in (("mesh={dp_replicate: 4}", False), ("mesh={dp_shard: 4}", True)):
        assert ("sharding.mode" in {loss.key for loss in export(source_of(DDP, mesh)).losses}) is lost


def test_fully_shard_shards(source_of: Made) -> None:
    assert "sharding.mode" in {loss.key for loss in export_fsdp2(source_of(DDP, "mesh.dp_shard=4")).losses}
