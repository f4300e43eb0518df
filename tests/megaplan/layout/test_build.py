"""Holders of each block: layers, embeddings, head, MTP, relation bias and their copies."""

import pytest

from megaplan.errors import MegaplanError
from megaplan.inventory.features import SIDE_EMBEDDINGS
from megaplan.inventory.tensors import Block, Group, Inventory, Outside, Owner, ParamTensor, make_block
from megaplan.layout.build import build_layout, cuts_of, slot_parameters, span_problems, spans_of
from megaplan.spec.models import Spec


def make_spec(pp: int = 2, vpp: int = 1, kind: str = "1f1b") -> Spec:
    model = {"pattern": "AD", "num_layers": 4, "hidden_size": 8, "vocab_size": 16}
    mesh, schedule = {"pp": pp, "vpp": vpp}, {"kind": kind, "num_microbatches": 4}
    batch = {"micro_batch_size": 1, "seq_length": 8}
    return Spec.model_validate(
        {"format": "megaplan.spec/1", "name": "t", "model": model, "mesh": mesh, "schedule": schedule, "batch": batch}
    )


def make_inventory(letters: str, outside: str = "embedding final_norm head", *, tied: bool = False) -> Inventory:
    """Blocks of one tensor each; layer i has 10 + i elements, the outside blocks 1000, 2000, ..."""

    def block(family: str, elements: int) -> Block:
        return make_block(family, (ParamTensor("weight", (elements,), Owner.REPLICATED, Group.OTHER),))

    layers = tuple(block(letter, 10 + index) for index, letter in enumerate(letters))
    names = outside.split()
    return Inventory(layers, tuple((n, block(Outside(n.split(".")[0]), 1000 * (i + 1))) for i, n in enumerate(names)), tied, 0)


@pytest.mark.requirement("R-8")
def test_embedding_first_head_last() -> None:
    layout = build_layout(make_spec(), make_inventory("ADAD"), ((0, 1), (1, 4)))
    first, last = layout.slots
    assert first.blocks == ("embedding", "layers.0")
    assert last.blocks == ("layers.1", "layers.2", "layers.3", "final_norm", "head")
    assert first.copies == last.copies == ()
    assert (first.start, first.stop, last.start, last.stop) == (0, 1, 1, 4)


@pytest.mark.requirement("R-9")
def test_side_embeddings_stand_on_the_first_slot() -> None:
    inventory = make_inventory("ADAD", "embedding ngram structure platform final_norm head")
    first, last = build_layout(make_spec(), inventory, ((0, 2), (2, 4))).slots
    assert first.blocks == ("embedding", "ngram", "structure", "platform", "layers.0", "layers.1")
    assert last.blocks[:2] == ("layers.2", "layers.3")


@pytest.mark.requirement("R-18")
def test_every_side_embedding_declares_its_home_its_maker_and_its_checkpoint_rule() -> None:
    """The declared home is where the layout puts it, and nowhere else."""
    names = ("ngram", "structure", "platform", "layer_embeddings")
    inventory = make_inventory("AD", f"embedding {' '.join(names)} final_norm head")
    first, last = build_layout(make_spec(), inventory, ((0, 1), (1, 2))).slots
    assert {family.value for family in SIDE_EMBEDDINGS} == set(names)
    for family, side in SIDE_EMBEDDINGS.items():
        assert side.home == "first"
        assert "token" in side.maker
        assert "parameters, once" in side.checkpoint
        assert family.value in first.blocks
        assert family.value not in (*last.blocks, *first.copies)


@pytest.mark.requirement("R-10")
def test_mtp_stands_on_the_last_slot_with_a_copy_of_the_embedding() -> None:
    inventory = make_inventory("ADAD", "embedding final_norm head mtp.0 mtp.1")
    first, last = build_layout(make_spec(), inventory, ((0, 2), (2, 4))).slots
    assert last.blocks == ("layers.2", "layers.3", "final_norm", "head", "embedding", "mtp.0", "mtp.1")
    assert (first.copies, last.copies) == ((), ("embedding",))


def test_one_copy_serves_a_tied_head_and_mtp() -> None:
    inventory = make_inventory("ADAD", "embedding final_norm mtp.0", tied=True)
    first, last = build_layout(make_spec(), inventory, ((0, 2), (2, 4))).slots
    assert last.blocks == ("layers.2", "layers.3", "final_norm", "embedding", "mtp.0")
    assert last.copies == ("embedding",)
    assert slot_parameters(inventory, first) == 1000 + 10 + 11
    assert slot_parameters(inventory, last) == 12 + 13 + 2000 + 1000 + 3000


def test_one_slot_needs_no_copy() -> None:
    inventory = make_inventory("AD", "embedding relation_bias final_norm mtp.0", tied=True)
    (only,) = build_layout(make_spec(pp=1), inventory, ((0, 2),)).slots
    assert only.blocks == ("embedding", "relation_bias", "layers.0", "layers.1", "final_norm", "mtp.0")
    assert only.copies == ()
    assert slot_parameters(inventory, only) == inventory.parameters


@pytest.mark.requirement("R-12")
def test_relation_bias_stands_where_attention_does_and_the_first_such_slot_owns_it() -> None:
    inventory = make_inventory("DDADDDAA", "embedding relation_bias final_norm head")
    layout = build_layout(make_spec(pp=2, vpp=2, kind="interleaved_1f1b"), inventory, ((0, 2), (2, 4), (4, 6), (6, 8)))
    assert ["relation_bias" in slot.blocks for slot in layout.slots] == [False, True, False, True]
    assert [slot.copies for slot in layout.slots] == [(), (), (), ("relation_bias",)]


def test_every_block_has_exactly_one_owner() -> None:
    inventory = make_inventory("DDADDDAA", "embedding ngram relation_bias final_norm head mtp.0")
    layout = build_layout(make_spec(pp=2, vpp=2, kind="interleaved_1f1b"), inventory, ((0, 2), (2, 4), (4, 6), (6, 8)))
    owned = [name for slot in layout.slots for name in slot.blocks if name not in slot.copies]
    assert sorted(owned) == sorted(name for name, _ in inventory.blocks())


def test_loop_placement_gives_ranks_and_chunks() -> None:
    layout = build_layout(make_spec(pp=2, vpp=2, kind="interleaved_1f1b"), make_inventory("ADAD"), ((0, 1), (1, 2), (2, 3), (3, 4)))
    assert [(slot.pp_rank, slot.chunk) for slot in layout.slots] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert [slot.index for slot in layout.of_rank(1)] == [1, 3]
    assert layout.placement == "loop"


@pytest.mark.requirement("R-27")
@pytest.mark.parametrize("kind", ["zbv", "dualpipev"])
def test_v_placement_turns_on_the_last_rank(kind: str) -> None:
    layout = build_layout(make_spec(pp=2, vpp=2, kind=kind), make_inventory("ADAD"), ((0, 1), (1, 2), (2, 3), (3, 4)))
    assert [(slot.pp_rank, slot.chunk) for slot in layout.slots] == [(0, 0), (1, 0), (1, 1), (0, 1)]
    assert [slot.index for slot in layout.of_rank(0)] == [0, 3]
    assert "embedding" in layout.of_rank(0)[0].blocks
    assert "head" in layout.of_rank(0)[1].blocks


@pytest.mark.parametrize(
    ("spans", "code", "words"),
    [
        (((0, 4),), "MP324", "1 spans"),
        (((0, 0), (0, 4)), "MP326", "slot 0 is empty"),
        (((0, 2), (3, 4)), "MP325", r"layers \[2, 3\) are in no slot"),
        (((0, 3), (2, 4)), "MP325", r"layers \[2, 3\) are in two slots"),
        (((0, 2), (2, 3)), "MP325", "num_layers = 4"),
        (((1, 2), (2, 4)), "MP325", r"layers \[0, 1\) are in no slot"),
    ],
)
def test_spans_that_do_not_tile_the_layers_are_refused(spans: tuple[tuple[int, int], ...], code: str, words: str) -> None:
    with pytest.raises(MegaplanError, match=f"(?s){code}.*{words}"):
        build_layout(make_spec(), make_inventory("ADAD"), spans)


def test_all_span_problems_are_reported_together() -> None:
    assert [found.code for found in span_problems(((0, 0), (1, 9)), 4, 3, 1)] == ["MP324", "MP326", "MP325", "MP325"]


def test_spans_and_cuts_are_inverse() -> None:
    assert spans_of((3, 5), 9) == ((0, 3), (3, 5), (5, 9))
    assert cuts_of(((0, 3), (3, 5), (5, 9))) == (3, 5)
    assert spans_of((), 9) == ((0, 9),)
