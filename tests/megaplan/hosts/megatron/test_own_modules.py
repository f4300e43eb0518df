"""Megatron's own modules and those of forks: what is refused, memory of layers with one norm and of shared checkpoints, cuts, import."""

from random import Random
from typing import Any

import pytest

import megaplan
from megaplan.errors import MegaplanError
from megaplan.importers.megatron.spec import import_megatron
from megaplan.inventory.build import build_inventory
from megaplan.partition.choose import choose_cuts

LOCAL = {"name": "megatron", "model": "gpt", "transformer_impl": "local", "hidden_dropout": 0.0, "attention_dropout": 0.0}


def document(host: dict[str, Any], mesh: dict[str, Any] | None = None, layers: int = 4, **model: Any) -> dict[str, Any]:
    attention = {"kind": "gqa", "num_heads": 8, "num_kv_heads": 8, "head_dim": 32}
    mesh = mesh or {"tp": 2, "vocab_parallel": True}
    return {
        "format": "megaplan.spec/1",
        "name": "m",
        "model": {
            **{"pattern": "AD", "num_layers": 2 * layers, "hidden_size": 256, "vocab_size": 4096, "attention": attention},
            **{"mlp": {"ffn_hidden_size": 1024, "activation": "gelu"}, **model},
        },
        "mesh": mesh,
        "schedule": {"num_microbatches": 8},
        "batch": {"micro_batch_size": 2, "seq_length": 512},
        "optimizer": {"matrix": "adamw"},
        "host": LOCAL | host,
        "device": {"name": "a100-40gb"},
    }


def activations(spec: dict[str, Any]) -> int:
    found = megaplan.estimate(spec)
    return found.worst.columns["activations"]


@pytest.mark.parametrize(
    ("host", "model", "key"),
    [
        ({"transformer_impl": "transformer_engine", "framework": "gpt-neox"}, {}, "host.framework"),
        ({"transformer_impl": "transformer_engine", "flash_version": 2}, {}, "host.flash_version"),
        ({"transformer_impl": "transformer_engine", "rope_fusion": False}, {}, "host.rope_fusion"),
        ({"transformer_impl": "transformer_engine", "all_reduce_gradients": True}, {}, "host.all_reduce_gradients"),
        ({"transformer_impl": "transformer_engine"}, {"parallel_layers": [1]}, "model.parallel_layers"),
        ({"model": "hybrid"}, {"parallel_layers": [1]}, "model.parallel_layers"),
        ({}, {"parallel_layers": [2]}, "model.parallel_layers"),
        ({"distribute_saved_activations": True}, {}, "host.distribute_saved_activations"),
        ({"distribute_saved_activations": True, "recompute_num_layers": 1}, {}, "host.distribute_saved_activations"),
    ],
)
def test_what_its_modules_do_not_have_is_refused_by_name(host, model, key):
    with pytest.raises(MegaplanError) as caught:
        megaplan.estimate(document(host, **model))
    assert [(found.code, found.location.key) for found in caught.value.diagnostics if found.code == "MP902"] == [("MP902", key)]


def test_a_shared_norm_is_kept_once():
    alone, together = (document({}, **model) for model in ({}, {"parallel_layers": [1, 3, 5, 7]}))
    stream = 2 * 2 * 512 * 256 // 2  # bytes of a sequence-parallel rank's stream: 16 bits, two sequences of 512
    statistics = 4 * 2 * 512 // 2
    assert activations(alone) - activations(together) == 4 * (2 * stream + statistics)
    assert megaplan.estimate(together).step_time.seconds < megaplan.estimate(alone).step_time.seconds


def test_tensor_ranks_share_what_a_checkpoint_keeps():
    host = {"sequence_parallel": False, "recompute_num_layers": 1}
    whole, shared = (document(host | more) for more in ({}, {"distribute_saved_activations": True}))
    stream = 2 * 2 * 512 * 256
    assert activations(whole) - activations(shared) == 4 * stream // 2
    seconds = [megaplan.estimate(each).step_time.seconds for each in (whole, shared)]
    assert seconds[0] < seconds[1]


@pytest.mark.parametrize("seed", range(6))
def test_cuts_of_a_gpt_model_are_between_its_layers(seed):
    draw = Random(seed)
    pp, mode = draw.choice([2, 3, 4]), draw.choice(["weighted", "equal"])
    spec = document({}, {"pp": pp, "tp": 1}, layers=draw.randint(pp, 12), vocab_size=draw.choice([512, 65536]))
    loaded = megaplan.load(spec | {"split": {"mode": mode}}).spec
    cuts = choose_cuts(loaded, build_inventory(loaded))
    assert all(start % 2 == 0 for start, _ in cuts.spans)


LAUNCH = """torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 512 \\
  --max-position-embeddings 512 --micro-batch-size 1 --global-batch-size 16 --vocab-size 4096 --bf16 --transformer-impl local \\
  --tensor-model-parallel-size 2 --recompute-granularity {} --recompute-method uniform --recompute-num-layers 1 \\
  --distribute-saved-activations
"""


def test_a_launch_says_that_checkpoints_are_shared():
    shared = ({**import_megatron(LAUNCH.format(kind), "run.sh").document["host"]} for kind in ("full", "selective"))
    assert [host.get("distribute_saved_activations") for host in shared] == [True, None]
