"""`megaplan schedule`: one document, one file torch loads, one drawing; and its refusals."""

import csv
import io
import json
from types import SimpleNamespace

import pytest

from megaplan.schedules import KINDS, SlotTimes, actions, in_flight, num_copies, placement, replay, slot_owner, slots_of_rank

SIZES = {kind: (4, 1 if kind in ("gpipe", "1f1b", "dualpipe") else 2, 8) for kind in KINDS}
ONE_COPY = [kind for kind in KINDS if num_copies(placement(kind)) == 1]
DOCUMENT = {"format", "ranks", "makespan"}
RANK = {"rank", "actions", "peak_inflight", "inflight_vectors", "bubble", "bubble_inside"}


def words(kind: str, *more: str) -> tuple[str, ...]:
    pp, vpp, m = SIZES[kind]
    return ("schedule", "--kind", kind, "--pp", str(pp), "--vpp", str(vpp), "--microbatches", str(m), *more)


@pytest.mark.requirement("R-26")
@pytest.mark.parametrize("kind", KINDS)
def test_the_document_is_the_schedule(megaplan, kind):
    pp, vpp, m = SIZES[kind]
    ran = megaplan(*words(kind, "--forward", "4", "--input", "5", "--weight", "3", "--p2p", "2", "--json"))
    assert (ran.status, ran.err) == (0, "")
    found = json.loads(ran.out)
    assert set(found) == DOCUMENT
    assert found["format"] == "megaplan.schedule/1"
    copies = num_copies(placement(kind))
    step = replay(actions(kind, pp, vpp, m), SlotTimes.equal(pp * vpp * copies, 4, 5, 3), p2p=2, copies=copies)
    assert found["makespan"] == step.makespan
    assert [rank["bubble"] for rank in found["ranks"]] == list(step.bubbles)
    assert [rank["bubble_inside"] for rank in found["ranks"]] == list(step.bubbles_inside)
    for rank, order, vectors in zip(found["ranks"], actions(kind, pp, vpp, m), in_flight(kind, pp, vpp, m), strict=True):
        assert set(rank) == RANK
        assert rank["actions"] == [str(action) for action in order]
        assert rank["inflight_vectors"] == [{"full": list(full), "pending_weight": list(pending)} for full, pending in vectors]
        assert rank["peak_inflight"] == max(sum(full) + sum(pending) for full, pending in vectors)


def test_two_copies_are_not_written_for_torch(megaplan):
    ran = megaplan(*words("dualpipe", "--csv"))
    assert (ran.status, ran.out) == (2, "")
    assert "--csv: torch's schedules hold one copy of the model, but dualpipe holds two" in ran.err


@pytest.mark.parametrize("kind", ONE_COPY)
def test_torch_reads_every_cell_of_the_csv(megaplan, kind):
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    ran = megaplan(*words(kind, "--csv"))
    rows = list(csv.reader(io.StringIO(ran.out)))
    read = [[str(schedules._Action.from_str(cell)) for cell in row] for row in rows]
    assert read == [[str(action) for action in order] for order in actions(kind, *SIZES[kind])]


@pytest.mark.parametrize("kind", ONE_COPY)
def test_torchs_runtime_loads_the_file_and_adds_its_communication(megaplan, tmp_path, kind):
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    pp, vpp, m = SIZES[kind]
    path = tmp_path / "schedule.csv"
    path.write_text(megaplan(*words(kind, "--csv")).out)
    last = pp * vpp - 1
    stages = [
        SimpleNamespace(
            stage_index=slot,
            num_stages=last + 1,
            group_size=pp,
            group_rank=0,
            submod=None,
            is_first=slot == 0,
            is_last=slot == last,
            group=None,
        )
        for slot in slots_of_rank(placement(kind), 0, pp, vpp)
    ]
    runtime = schedules._PipelineScheduleRuntime(stages, m)
    runtime._load_csv(str(path), format="compute_only")
    kinds = {"FORWARD", "FULL_BACKWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT", "OVERLAP_F_B"}
    computed = {
        rank: [str(action) for action in order if action is not None and action.computation_type.name in kinds]
        for rank, order in runtime.pipeline_order_with_comms.items()
    }
    assert computed == {rank: [str(action) for action in order] for rank, order in enumerate(actions(kind, pp, vpp, m))}
    sent = sum(
        action is not None and action.computation_type.name == "SEND_F"
        for order in runtime.pipeline_order_with_comms.values()
        for action in order
    )
    assert sent == m * sum(slot_owner(placement(kind), slot, pp)[0] != slot_owner(placement(kind), slot + 1, pp)[0] for slot in range(last))


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_fits_80_columns_and_draws_every_slot(megaplan, kind):
    ran = megaplan(*words(kind))
    assert ran.status == 0
    assert max(map(len, ran.out.splitlines())) <= 80
    assert ran.out.count(" chunk ") == SIZES[kind][0] * SIZES[kind][1] * num_copies(placement(kind))


@pytest.mark.parametrize(
    ("options", "code", "hint"),
    [
        (("--kind", "dualpipev", "--pp", "2", "--microbatches", "3"), "MP311", "--microbatches 4"),
        (("--kind", "zbv", "--pp", "2", "--vpp", "3", "--microbatches", "4"), "MP313", "--vpp 2"),
        (("--kind", "interleaved_1f1b", "--pp", "4", "--microbatches", "9"), "MP312", "--microbatches 8"),
        (("--kind", "1f1b", "--pp", "2", "--microbatches", "4", "--csv", "--json"), "MP480", "megaplan schedule --help"),
        (("--kind", "gpipe", "--pp", "60000", "--microbatches", "1000000"), "MP480", None),
        (("--kind", "bogus", "--pp", "2", "--microbatches", "4"), "MP480", "megaplan schedule --help"),
        (("--kind", "1f1b", "--pp", "0", "--microbatches", "4"), "MP480", "megaplan schedule --help"),
    ],
)
def test_refusals_name_the_option(megaplan, options, code, hint):
    ran = megaplan("schedule", *options)
    assert ran.status == 2
    found = ran.out + ran.err
    assert code in found
    assert hint is None or hint in found
    assert "--set" not in found
