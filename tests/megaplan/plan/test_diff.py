"""Statements of a diff, and that it makes none about equal plans."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megaplan.cli.diff_text import ranks_label
from megaplan.columns import Column
from megaplan.errors import MegaplanError
from megaplan.plan.causes import diff_with_causes
from megaplan.plan.diff import diff_plans, stale_topics
from megaplan.plan.document import PlanDocument
from megaplan.plan.make import make_plan, plan_text
from megaplan.plan.read import parse_plan
from megaplan.spec.load import load_spec_text

HIDDEN = 64
SECTIONS = {
    "A": "attention: {kind: gqa, num_heads: 4, num_kv_heads: 2, head_dim: 16}",
    "M": "mamba: {kind: mamba2, expand: 2, head_dim: 16, state_dim: 16, num_groups: 2, conv_kernel: 4}",
    "E": "moe: {num_experts: 4, top_k: 2, ffn_hidden_size: 96}",
    "R": "recurrent: {kind: m2rnn, num_heads: 4, key_dim: 16, value_dim: 8}",
    "D": "mlp: {ffn_hidden_size: 160}",
}


@st.composite
def spec_texts(draw):
    """Small hybrids on small meshes, of every letter, with and without features."""
    pattern = draw(st.text(alphabet="AMERD", min_size=1, max_size=6))
    pp, vpp = draw(st.sampled_from([(1, 1), (2, 1), (2, 2), (3, 1)]))
    num_layers = draw(st.integers(max(pp * vpp, len(pattern)), 16))
    letters = (pattern * num_layers)[:num_layers]
    sections = [SECTIONS[letter] for letter in sorted(set(letters))]
    if "A" in letters and draw(st.booleans()):
        sections.append("features: {mtp: {depth: 1, ffn_hidden_size: 128}}")
    schedule = "1f1b" if vpp == 1 else "interleaved_1f1b"
    microbatches = pp * draw(st.integers(1, 4))
    return (
        f"format: megaplan.spec/1\nname: random\nmodel:\n  pattern: {pattern}\n  num_layers: {num_layers}\n  hidden_size: {HIDDEN}\n"
        f"  vocab_size: 256\n  tie_embeddings: {str(draw(st.booleans())).lower()}\n"
        + "".join(f"  {section}\n" for section in sections)
        + f"mesh: {{pp: {pp}, vpp: {vpp}, dp_shard: {draw(st.sampled_from([1, 2, 3]))}}}\n"
        f"schedule: {{kind: {schedule}, num_microbatches: {microbatches}}}\n"
        f"batch: {{micro_batch_size: {draw(st.integers(1, 3))}, seq_length: 64}}\n"
        f"split: {{mode: {draw(st.sampled_from(['equal', 'weighted']))}}}\n"
        f"training: {{learning_rate: {draw(st.floats(1e-9, 1.0))!r}}}\n"
    )


def plan_of(text):
    return make_plan(load_spec_text(text).spec)


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(spec_texts())
def test_a_plan_is_written_read_and_diffed_with_itself_without_a_difference(text):
    plan = plan_of(text)
    loaded = parse_plan(plan_text(plan), "plan.json")
    assert loaded.tampered == ()
    assert plan_text(loaded.plan) == plan_text(plan)
    diff = diff_with_causes(plan, loaded.plan)
    assert diff.same
    assert not diff.ranks
    assert not diff.growth


@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(spec_texts(), spec_texts())
def test_differences_are_the_same_both_ways(left, right):
    a, b = plan_of(left), plan_of(right)
    forth, back = diff_plans(a, b), diff_plans(b, a)
    assert forth.same == back.same
    assert {(c.key, str(c.before), str(c.after)) for c in forth.inputs} == {(c.key, str(c.after), str(c.before)) for c in back.inputs}
    assert {(m.start, m.stop, m.before, m.after) for m in forth.moves} == {(m.start, m.stop, m.after, m.before) for m in back.moves}
    assert sorted((g.column, g.before, g.after) for g in forth.growth) == sorted((g.column, g.after, g.before) for g in back.growth)


@pytest.fixture
def one_cut_moved(planned):
    manual = ("split.mode=manual", "split.reason=a test")
    return (
        planned("tiny-hybrid-pp2", *manual, "split.spans=[[0,4],[4,9]]"),
        planned("tiny-hybrid-pp2", *manual, "split.spans=[[0,6],[6,9]]"),
    )


@pytest.mark.requirement("R-53")
def test_a_moved_cut_names_its_layers_and_every_changed_rank_s_bytes_by_column(one_cut_moved):
    before, after = one_cut_moved
    diff = diff_with_causes(before, after)
    [move] = diff.moves
    assert (move.start, move.stop, move.letters) == (4, 6, "RA")
    assert (move.before, move.after) == ((1, 0), (0, 0))
    assert {rank for change in diff.ranks for run in change.ranks for rank in range(*run)} == {0, 1}
    for change in diff.ranks:
        for column in change.columns:
            assert column.before == change.before.columns[column.key]
            assert column.after == change.after.columns[column.key]
        told = sum(column.after - column.before for column in change.columns)
        assert told == change.after.peak_bytes - change.before.peak_bytes
    assert {key for growth in diff.growth for key, _ in growth.causes} == {"cuts"}


@pytest.mark.requirement("R-53")
def test_a_lost_fit_comes_first_and_counts_as_a_flip(planned):
    small = planned("llama-3.1-8b")
    large = planned("llama-3.1-8b", "batch.micro_batch_size=16")
    diff = diff_plans(small, large)
    assert diff.fits == (True, False)
    assert all(rank.flip == (True, False) for rank in diff.flips)
    assert diff.flips
    assert diff_plans(large, small).flips[0].flip == (False, True)


@pytest.mark.requirement("R-53")
def test_owners_that_move_are_named(planned):
    diff = diff_plans(planned("tiny-hybrid-pp2"), planned("tiny-hybrid-pp2", "model.tie_embeddings=true"))
    moved = {move.block: (move.before, move.after) for move in diff.owners}
    assert moved["head"] == (((1, 0),), ())
    assert moved["embedding"] == (((0, 0),), ((0, 0), (1, 0)))


@pytest.mark.requirement("R-49")
def test_more_experts_grow_banks_and_their_states_not_attention(planned):
    diff = diff_with_causes(planned("mixtral-8x7b"), planned("mixtral-8x7b", "model.moe.num_experts=16"))
    grown = {growth.column: growth for growth in diff.growth if growth.after > growth.before}
    assert {Column.EXPERT_PARALLEL_PARAMS, Column.GRADIENTS, Column.MATRIX_OPTIMIZER} <= set(grown)
    assert Column.TENSOR_PARALLEL_PARAMS not in grown
    assert all(growth.causes[0][0] == "model.moe.num_experts" for growth in diff.growth)


@pytest.mark.requirement("R-49")
def test_two_changes_are_told_apart_by_column(planned):
    changed = planned("mixtral-8x7b", "model.moe.num_experts=16", "batch.micro_batch_size=2")
    diff = diff_with_causes(planned("mixtral-8x7b"), changed)
    causes = {growth.column: dict(growth.causes) for growth in diff.growth}
    assert set(causes[Column.EXPERT_PARALLEL_PARAMS]) == {"model.moe.num_experts"}
    assert causes[Column.ACTIVATIONS]["batch.micro_batch_size"] > 0
    assert "batch.micro_batch_size" not in causes[Column.MATRIX_OPTIMIZER]


def test_inputs_without_bytes_are_no_cause_and_hide_none(planned):
    changed = planned("mixtral-8x7b", "device.name=b200", "model.moe.num_experts=16", "split.reason=kept")
    diff = diff_with_causes(planned("mixtral-8x7b"), changed)
    assert {key for growth in diff.growth for key, _ in growth.causes} - {"cuts"} == {"model.moe.num_experts"}


def test_another_world_size_is_compared_stage_by_stage(planned):
    diff = diff_plans(planned("llama-3.1-8b"), planned("llama-3.1-8b", "mesh.dp_shard=8"))
    assert [change.before.coordinate["pp"] for change in diff.ranks] == [change.after.coordinate["pp"] for change in diff.ranks]
    gone = diff_plans(planned("llama-3.1-8b"), planned("llama-3.1-8b", "mesh.pp=1"))
    assert [change.after is None for change in gone.ranks] == [False, True]


EIGHT_EQUAL_LAYERS = """\
format: megaplan.spec/1
name: a
model: {pattern: D, num_layers: 8, hidden_size: 64, vocab_size: 16, mlp: {ffn_hidden_size: 256}}
batch: {micro_batch_size: 1, seq_length: 64}
"""


def test_stages_that_share_a_budget_are_compared_one_by_one():
    """A budget of several stages is each one's; it was listed as the first one's alone, and the others as new or removed."""

    def planned(kind: str, dp_shard: int) -> PlanDocument:
        settings = f"mesh: {{pp: 4, dp_shard: {dp_shard}}}\nschedule: {{kind: {kind}, num_microbatches: 8}}\nsplit: {{mode: equal}}\n"
        return make_plan(load_spec_text(EIGHT_EQUAL_LAYERS + settings, "a.yaml").spec)

    shared, wide, varied = planned("gpipe", 1), planned("gpipe", 2), planned("1f1b", 2)
    assert len(shared.estimates.ranks) == len(wide.estimates.ranks) == 3
    assert len(varied.estimates.ranks) == 4
    assert [change.stages for change in diff_plans(shared, wide).ranks] == [((0, 1),), ((1, 3),), ((3, 4),)]
    assert ranks_label(diff_plans(shared, wide).ranks[1]) == "ranks 2-5 (pp 1-2)"
    for before, after in ((shared, varied), (varied, shared)):
        changes = diff_plans(before, after).ranks
        assert all(change.before is not None and change.after is not None for change in changes)
        assert [change.stages for change in changes] == [((stage, stage + 1),) for stage in range(4)]
    same_size = diff_plans(wide, varied).ranks
    assert sorted(change.stages for change in same_size) == [((stage, stage + 1),) for stage in range(4)]


def test_training_alone_changes_neither_digest_nor_memory(planned):
    diff = diff_plans(planned("tiny-hybrid"), planned("tiny-hybrid", "training.steps=7"))
    assert not diff.same
    assert [change.key for change in diff.training] == ["training.steps"]
    assert not diff.inputs
    assert not diff.ranks
    assert diff.digests[0] == diff.digests[1]


@pytest.mark.requirement("R-25")
def test_a_kept_reason_over_changed_grounds_is_stale(planned):
    manual = ("split.mode=manual", "split.reason=R begins a stage", "split.spans=[[0,4],[4,9]]")
    decided = planned("tiny-hybrid-pp2", *manual)
    assert stale_topics(decided) == ()
    costlier = planned("tiny-hybrid-pp2", *manual, "model.mlp.ffn_hidden_size=640")
    assert set(diff_plans(decided, costlier).stale) == {"costs_D"}
    other_reason = planned("tiny-hybrid-pp2", *manual[:1], "split.reason=looked again", manual[2], "model.mlp.ffn_hidden_size=640")
    assert diff_plans(decided, other_reason).stale == ()


@pytest.mark.requirement("R-25")
def test_a_baseline_keeps_what_a_manual_split_was_decided_against(planned):
    manual = ("split.mode=manual", "split.reason=R begins a stage", "split.spans=[[0,4],[4,9]]")
    decided = planned("tiny-hybrid-pp2", *manual)
    spec = planned("tiny-hybrid-pp2", *manual, "schedule.num_microbatches=8").spec
    kept = make_plan(spec, baseline=decided)
    assert kept.decisions.split.decided_against == decided.decisions.split.decided_against
    assert stale_topics(kept) == ("schedule",)
    assert stale_topics(make_plan(spec)) == ()


def test_a_split_that_cannot_be_is_an_error(planned):
    with pytest.raises(MegaplanError):
        planned("tiny-hybrid-pp2", "split.forbid=[1,2,3,4,5,6,7,8]")


TIGHT = """
format: megaplan.spec/1
name: tight
model:
  {pattern: AD, num_layers: 4, hidden_size: 64, vocab_size: 256, mlp: {ffn_hidden_size: 160},
   attention: {kind: gqa, num_heads: 4, num_kv_heads: 2, head_dim: 16}}
mesh: {pp: 2}
schedule: {kind: 1f1b, num_microbatches: 4}
batch: {micro_batch_size: 1, seq_length: 64}
"""


def with_headroom(plan, headroom_bytes):
    """The plan with another headroom of every rank."""
    ranks = tuple(rank.model_copy(update={"headroom_bytes": headroom_bytes, "fits": headroom_bytes >= 0}) for rank in plan.estimates.ranks)
    estimates = plan.estimates.model_copy(update={"ranks": ranks, "fits": headroom_bytes >= 0})
    return plan.model_copy(update={"estimates": estimates})


def test_a_narrow_fit_of_a_plan_is_named_as_that_of_an_estimate():
    """The bound is the most that measured runs have reserved above the fullest rank's peak; the plan still fits."""
    plan = plan_of(TIGHT)
    most = max(rank.peak_bytes for rank in plan.estimates.ranks) * plan.spec.host.kind.more_reserved(plan.spec.host)
    words = {int(most) + 1: "fits", int(most) - 1: "fits narrowly", -1: "does not fit"}
    plans = {word: with_headroom(plan, headroom) for headroom, word in words.items()}
    for word, one in plans.items():
        assert one.verdict == word
        assert one.fit_text.lower().startswith(word)
        for other, then in plans.items():
            diff = diff_plans(one, then)
            assert diff.verdicts == (word, other)
            assert diff.fits == (word != "does not fit", other != "does not fit")
            assert diff.same or ("fits narrowly" in diff.verdict) == ("fits narrowly" in (word, other))
