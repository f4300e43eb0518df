"""A search with a time limit: a good row at once, a valid bound, and excluded layouts; commands of rows print the rows' numbers."""

import re
import shlex

import pytest

import megaplan
from megaplan.cli.search_sizes import sizes_of, with_host
from megaplan.cli.search_text import search_lines
from megaplan.exploration.engine import SearchTask, explore
from megaplan.exploration.space import Space
from megaplan.exploration.start import TRIED, first_outcomes
from megaplan.spec.load import load_spec

TINY, LLAMA = "plans/tiny-hybrid-pp2.yaml", "plans/llama-3.1-8b.yaml"
MOE = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
    "norm_topk_prob": True, "vocab_size": 151936, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def space():
    job = megaplan.load(MOE, "optimizer.matrix=adamw", "schedule.num_microbatches=64")
    return Space(job.spec, 64, {}, ("recompute", "schedule", "batch"))


def test_the_first_answer_takes_few_evaluations(space):
    """Counted, not timed: an ordinary model of experts on 64 devices."""
    outcomes = list(first_outcomes(SearchTask(space, "time", 0, 10).evaluator(), limited=False))
    assert outcomes[0].best is not None
    assert len(outcomes) <= TRIED
    assert not space.illegal, "counts are those of all meshes"


def test_a_search_that_is_out_of_time_has_a_row_and_says_what_it_left_out(space):
    found = explore(SearchTask(space, "time", 0, 3, seconds=1e-9), 1)
    assert (found.stopped, found.complete) == ("time", False)
    assert found.rows
    assert found.bound_ns <= found.rows[0].step_ns
    assert sum(found.not_looked_at.values()) > 0


def test_a_first_answer_is_among_the_layouts_of_the_search():
    """Rows of a search that begins with one are those of a search that does not."""
    limited = Space(load_spec(TINY).spec, 4, {}, ("schedule", "batch"))
    own = SearchTask(limited, "time", 0, 3).evaluator()
    complete = explore(SearchTask(limited, "time", 0, 3), 1)
    for outcome in first_outcomes(own, limited=False):
        if outcome.best is not None:
            assert outcome.best.step_ns >= complete.rows[0].step_ns
            assert outcome.bound_ns <= outcome.best.step_ns


def test_the_command_of_every_row_prints_its_step_and_peak():
    found = megaplan.search(TINY, "schedule.num_microbatches=8", devices=4, top=3, vary=["schedule", "batch"], processes=1, seconds=None)
    lines = [line for line, _ in search_lines(found, ())]
    commands = [line for line in lines if line.startswith("megaplan estimate ")]
    assert len(commands) == len(found.rows) == 3
    for row, command in zip(found.rows, commands, strict=True):
        words = shlex.split(command, comments=True)
        changes = [text for option, text in zip(words[3::2], words[4::2], strict=True) if option == "--set"]
        again = megaplan.estimate(words[2], *changes)
        assert (again.peak_bytes, round(again.step_seconds * 1e9)) == (row.peak_bytes, row.exact.step_ns)


def test_where_nothing_fits_the_smallest_number_that_does_is_named():
    found = megaplan.search(TINY, "device.capacity=5000000000", devices=1, vary=[], processes=1, seconds=None)
    usable = found._evaluator.usable_bytes
    peak = megaplan.estimate(TINY, "mesh={}", "schedule={num_microbatches: 1}").peak_bytes
    small = f"device.capacity={5_000_000_000 - usable + peak * 3 // 4}"
    none = megaplan.search(TINY, small, devices=1, vary=["batch"], processes=1, seconds=None)
    if none.rows:
        pytest.skip("the smallest micro-batch fits")
    assert none.fewest is None or none.fewest.devices > 1
    text = "\n".join(line for line, _ in search_lines(none, ()))
    assert re.search(r"devices are enough|it does not fit on any of the larger numbers of devices", text)


@pytest.mark.parametrize("host", ["megarun", "megatron"])
def test_a_model_whose_state_exceeds_all_devices_is_refused_without_an_evaluation(host):
    """And the numbers of devices that are too few for its state are not tried either."""
    changes = with_host(LLAMA, ["device.name=h100-sxm", "batch.micro_batch_size=1"], host)
    found = megaplan.search(LLAMA, *changes, devices=1, vary=["recompute", "batch"], processes=1, seconds=None)
    assert (found.complete, found.rows, found.num_evaluated) == (True, (), 0)
    over = found._evaluator.fits_on_no_mesh()
    assert over > 0
    lost = [one for one in found.why_not if one.reason != "illegal"]
    assert all(one.reason == "out of memory" for one in lost)
    assert found.fewest is not None
    assert found.fewest.devices * found._evaluator.usable_bytes >= over + found._evaluator.usable_bytes
    assert found.fewest.row.headroom_bytes >= 0


def test_changes_of_a_mesh_decide_only_the_batch_of_another_host():
    changes = with_host(LLAMA, ["schedule.num_microbatches=8", "mesh.pp=1", "mesh.dp_shard=2", "batch.seq_length=2048"], "megatron")
    assert [text for text in changes if text.startswith("batch.")] == ["batch.seq_length=2048"]
    moved = megaplan.load(LLAMA, *changes).spec
    assert moved.host.name == "megatron"
    given = megaplan.load(LLAMA, "schedule.num_microbatches=8", "mesh.pp=1", "mesh.dp_shard=2").spec
    assert moved.global_batch_size == given.global_batch_size == 8 * 2 * given.batch.micro_batch_size


def test_sizes_are_every_number_with_every_device():
    found = sizes_of("8,16", "h100,B200", "h100=2.5,b200=4")
    assert [(size.devices, size.changes, size.price) for size in found] == [
        (8, ("device.name=h100-sxm",), 2.5),
        (16, ("device.name=h100-sxm",), 2.5),
        (8, ("device.name=b200",), 4.0),
        (16, ("device.name=b200",), 4.0),
    ]


@pytest.mark.parametrize("given", [("eight", None, None), ("0", None, None), ("8", "h999", None), ("8", None, "cheap")])
def test_a_wrong_size_is_one_clear_error(given):
    with pytest.raises(megaplan.MegaplanError) as caught:
        sizes_of(*given)
    assert len(caught.value.diagnostics) == 1
