"""The served model by rank: tensors that each axis shards, replicated tensors, and caches that sequences share."""

from collections.abc import Callable
from typing import Any

import pytest

from megaplan.budget.serving import ServingTimes, cached_tokens, serving_budget, shared_tokens, spans_of
from megaplan.budget.values import ServingBudget
from megaplan.errors import MegaplanError
from megaplan.inventory.build import build_inventory
from megaplan.post_training.engines import serving_times
from megaplan.spec.load import spec_from_document
from megaplan.spec.models import Serving, Spec

POOL = {"batch_size": 4, "context_length": 100}
ONE_STAGE = {**POOL, "pp": 1}


def serving(spec: Spec) -> ServingBudget:
    found = serving_budget(spec, build_inventory(spec))
    assert found is not None
    return found


def test_one_rank_has_no_ranks(hybrid: Callable[..., Spec]) -> None:
    found = serving(hybrid({"serving": {**POOL, "tp": 1, "pp": 1, "ep": 1}}))
    assert found.stages == ()
    assert "ranks" not in found.as_document()


def test_a_tensor_group_divides_caches_and_states(hybrid: Callable[..., Spec]) -> None:
    """4 kv heads: at tp 4 a rank has one, at tp 8 one too, which another rank has as well, with its projections."""
    whole = serving(hybrid({"serving": POOL}))
    for tp, heads in ((2, 2), (4, 1), (8, 1)):
        (rank,) = serving(hybrid({"serving": {**ONE_STAGE, "tp": tp}})).stages
        assert rank.kv_cache_bytes == 2 * 4 * 100 * 2 * heads * 8 * 2
        assert rank.recurrent_state_bytes == whole.recurrent_state_bytes // tp


def test_projections_of_shared_heads_are_held_twice(hybrid: Callable[..., Spec]) -> None:
    """Twice the ranks halve all except replicated tensors and, beyond the 4 kv heads, keys' and values' projections (64 by 8 each)."""
    sizes = [serving(hybrid({"serving": {**ONE_STAGE, "tp": tp}})).stages[0].parameters_bytes for tp in (2, 4, 8)]
    spec = hybrid()
    layers = sum(block.family == "A" for block in build_inventory(spec).layers)
    head = 2 * layers * 8 * spec.model.hidden_size * spec.precision.params.bytes  # one head's keys and values
    assert sizes[0] - sizes[1] == 2 * (sizes[1] - sizes[2]) + head


def test_latents_are_on_every_rank(nam56r: Callable[..., Spec]) -> None:
    whole = serving(nam56r())
    (rank,) = serving(nam56r({"serving.tp": 4, "serving.pp": 1, "serving.ep": 1})).stages
    assert rank.kv_cache_bytes == whole.kv_cache_bytes


@pytest.mark.parametrize("pp", [1, 2, 3, 7])
def test_stages_hold_the_whole_model_once(nam56r: Callable[..., Spec], pp: int) -> None:
    found = serving(nam56r({"serving.tp": 1, "serving.pp": pp, "serving.ep": 2}))
    single = serving(nam56r({"serving.tp": 1, "serving.pp": 1, "serving.ep": 2}))
    for name in ("kv_cache_bytes", "recurrent_state_bytes", "parameters_bytes"):
        assert sum(getattr(stage, name) for stage in found.stages) == getattr(single.stages[0], name)
    assert [stage.end for stage in found.stages[:-1]] == [stage.first for stage in found.stages[1:]]


def test_a_tied_head_is_a_copy_on_the_last_stage(hybrid: Callable[..., Spec]) -> None:
    tied = {"model.tie_embeddings": True}
    one, two = (serving(hybrid({**tied, "serving": {**POOL, "pp": pp, "tp": 1, "ep": 2}})) for pp in (1, 2))
    spec = hybrid(tied)
    table = spec.model.vocab_size * spec.model.hidden_size * spec.precision.params.bytes
    assert sum(stage.parameters_bytes for stage in two.stages) == one.stages[0].parameters_bytes + table


def test_experts_are_distributed_or_share_their_width(nam56r: Callable[..., Spec]) -> None:
    """Whichever axis of 4 ranks shards an expert bank, each rank has a quarter of it."""
    spec = nam56r()
    bank = sum(
        size
        for block in build_inventory(spec).layers
        for tensor, size in zip(block.tensors, block.sizes, strict=True)
        if tensor.owner == "expert_parallel"
    )
    sizes = {}
    for tp, ep in ((1, 1), (4, 1), (4, 2), (4, 4), (1, 4)):
        found = serving(nam56r({"serving.tp": tp, "serving.pp": 1, "serving.ep": ep}))
        sizes[tp, ep] = (found.stages or (found,))[0].parameters_bytes
    assert sizes[4, 1] == sizes[4, 2] == sizes[4, 4]
    assert sizes[1, 1] - sizes[1, 4] == bank * 3 // 4 * spec.precision.params.bytes


def test_degrees_are_those_of_the_mesh_unless_given(hybrid: Callable[..., Spec]) -> None:
    assert serving(hybrid({"serving": POOL, "mesh.tp": 2})).degrees == (2, 2, 1)
    assert serving(hybrid({"serving": {**POOL, "tp": 4}, "mesh.tp": 2})).degrees == (4, 2, 1)


@pytest.mark.parametrize(
    ("layers", "stages", "sizes"),
    [(8, 4, [2, 2, 2, 2]), (10, 4, [2, 3, 3, 2]), (9, 4, [2, 2, 3, 2]), (11, 4, [3, 3, 3, 2]), (2, 4, [1, 1])],
)
def test_stages_have_equal_numbers_of_layers(layers: int, stages: int, sizes: list[int]) -> None:
    assert [end - first for first, end in spans_of(layers, stages)] == sizes


def test_sequences_share_whole_pages_of_their_prefix() -> None:
    pool = Serving(batch_size=10, context_length=1000, cache="paged", block_size=64, shared_prefix=200)
    assert shared_tokens(pool, None) == 192
    assert shared_tokens(pool, 900) == 64  # the window begins at token 100, inside the second page
    assert shared_tokens(pool, 512) == 0
    for window in (None, 64, 500, 900, 5000):
        assert 0 <= shared_tokens(pool, window) <= cached_tokens(pool, window)


def test_a_shared_prefix_is_cached_once(nam56r: Callable[..., Spec]) -> None:
    keys = {"serving.cache": "paged", "serving.block_size": 256, "serving.context_length": 4096, "serving.batch_size": 32}
    plain, shared = (serving(nam56r({**keys, "serving.shared_prefix": prefix})) for prefix in (0, 1024))
    assert shared.kv_cache_bytes * (32 * 4096) == plain.kv_cache_bytes * (1024 + 32 * 3072)
    assert shared.recurrent_state_bytes == plain.recurrent_state_bytes


@pytest.mark.parametrize(
    ("given", "code", "key", "values"),
    [
        ({"tp": 3}, "MP218", "serving.tp", "3"),
        ({"pp": 999}, "MP218", "serving.pp", "999"),
        ({"ep": 3}, "MP218", "serving.ep", "3"),
        ({"ep": 2, "tp": 3}, "MP218", "serving.tp", "3"),
        ({"shared_prefix": 64}, "MP219", "serving.shared_prefix", "contiguous"),
        ({"cache": "paged", "shared_prefix": 128}, "MP219", "serving.shared_prefix", "128"),
    ],
)
def test_what_cannot_be_divided_or_shared_is_refused(
    hybrid: Callable[..., Spec], given: dict[str, Any], code: str, key: str, values: str
) -> None:
    document = hybrid().as_document() | {"serving": {**POOL, **given}}
    with pytest.raises(MegaplanError) as raised:
        spec_from_document(document)
    (found, *_) = raised.value.diagnostics
    assert found.code == code
    assert found.location is not None
    assert found.location.key == key
    assert values in found.detail
    assert found.hints


def times(spec: Spec) -> ServingTimes:
    found = serving_times(spec, build_inventory(spec))
    assert found is not None
    return found


def test_a_decoding_step_reads_the_cache_and_a_prompt_its_products(hybrid: Callable[..., Spec]) -> None:
    """A longer context costs a step the bandwidth of its cache; more sequences share the parameters and the host's time."""
    short, long, more = (
        times(hybrid({"serving": {**ONE_STAGE, **changes}})) for changes in ({}, {"context_length": 4_000_100}, {"batch_size": 64})
    )
    assert long.decode_ns - short.decode_ns > 0
    assert long.prefill_ns > 1000 * short.prefill_ns
    assert more.tokens_per_second > 8 * short.tokens_per_second
    assert more.prefill_ns == short.prefill_ns, "one prompt"


def test_times_are_of_a_copy_of_the_model(nam56r: Callable[..., Spec]) -> None:
    whole, group = (times(nam56r({"serving.tp": tp, "serving.pp": 1, "serving.ep": tp})) for tp in (1, 4))
    assert (whole.num_devices, group.num_devices) == (1, 4)
    assert group.decode_ns < whole.decode_ns
    assert 0 < group.low < 1 < group.high
    assert serving_times(nam56r({"serving": None}), build_inventory(nam56r())) is None


def test_a_copy_has_the_sequences_of_all_its_tensor_groups(nam56r: Callable[..., Spec]) -> None:
    """Four ranks of experts, of which each is a tensor group with its own sequences."""
    found = times(nam56r({"serving.tp": 1, "serving.pp": 1, "serving.ep": 4}))
    assert (found.num_devices, found.batch_size) == (4, 4 * nam56r().serving.batch_size)  # type: ignore[union-attr]
    assert found.tokens_per_second == pytest.approx(found.batch_size * 1e9 / found.decode_ns)
