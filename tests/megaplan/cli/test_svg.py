"""The picture of a plan: well-formed, self-contained, and drawn from the plan's own numbers."""

import itertools
import re
from collections import Counter
from xml.etree import ElementTree

import pytest

from megaplan.budget.peaks import build_budget
from megaplan.budget.slots import kept_bytes, memory_over_time
from megaplan.columns import Phase
from megaplan.cost.times import model_times
from megaplan.inventory.build import build_inventory
from megaplan.layout.build import build_layout, spans_of
from megaplan.partition.values import equal_cuts
from megaplan.schedules import KINDS, SPLIT_BACKWARD, SlotTimes, actions, computations, replay
from megaplan.spec.load import load_spec

SVG = "{http://www.w3.org/2000/svg}"
ONE_SLOT = ("gpipe", "1f1b", "dualpipe")


def planned(megaplan, kind: str) -> str:
    vpp = 1 if kind in ONE_SLOT else 2
    words = (
        "mesh.pp=4",
        f"mesh.vpp={vpp}",
        f"schedule.kind={kind}",
        "schedule.num_microbatches=9" if kind == "zbv" else "schedule.num_microbatches=8",
    )
    overrides = [word for value in words for word in ("--set", value)]
    assert megaplan("split", "plans/tiny-hybrid-pp2.yaml", "-o", "plan.json", *overrides).status == 0
    return "plan.json"


@pytest.mark.parametrize("kind", KINDS)
def test_every_action_is_drawn_once(megaplan, here, kind):
    ran = megaplan("show", planned(megaplan, kind), "--svg", "picture.svg")
    assert ran.status == 0
    text = (here / "picture.svg").read_text()
    root = ElementTree.fromstring(text)
    titles = Counter(group.find(f"{SVG}title").text.partition(":")[0] for group in root.iter(f"{SVG}g") if group.get("class") == "action")
    pp, vpp = 4, 1 if kind in ONE_SLOT else 2
    expected = Counter(
        (part.kind.name, part.slot, part.microbatch)
        for order in actions(kind, pp, vpp, 9 if kind == "zbv" else 8)
        for part in computations(order)
    )
    assert set(titles.values()) == {1}
    assert len(titles) == len(expected)
    assert {group.get("id") for group in root.iter(f"{SVG}g") if group.get("id")} == {f"rank{rank}" for rank in range(pp)}


def test_the_picture_needs_no_other_file_and_says_what_it_is(megaplan, here):
    assert megaplan("show", planned(megaplan, "zbv"), "--svg", "picture.svg").status == 0
    text = (here / "picture.svg").read_text()
    assert re.findall(r"(?:href|src|@import|<script|<image|<style)", text) == []
    assert re.findall(r"url\(([^)]*)\)", text)
    assert set(re.findall(r"url\(([^)]*)\)", text)) == {"#input", "#weight"}
    assert set(re.findall(r'https?://[^"\s]*', text)) == {"http://www.w3.org/2000/svg"}
    root = ElementTree.fromstring(text)
    assert root.find(f"{SVG}title").text == "tiny-hybrid-pp2: zbv, pp 4 × vpp 2, 9 microbatches"
    assert "microbatches of a step" in root.find(f"{SVG}desc").text
    width, height = int(root.get("width")), int(root.get("height"))
    for rect in root.iter(f"{SVG}rect"):
        if rect.get("x") is not None:
            assert 0 <= float(rect.get("x")) <= float(rect.get("x")) + float(rect.get("width")) <= width
            assert float(rect.get("y")) + float(rect.get("height")) <= height


def test_no_two_kinds_of_action_look_alike_and_the_legend_has_each(megaplan, here):
    assert megaplan("show", planned(megaplan, "dualpipev"), "--svg", "picture.svg").status == 0
    root = ElementTree.fromstring((here / "picture.svg").read_text())
    fills = {}
    for group in root.iter(f"{SVG}g"):
        if group.get("class") == "action":
            fills.setdefault(group.find(f"{SVG}title").text.partition(" of microbatch")[0], set()).add(group.find(f"{SVG}rect").get("fill"))
    assert set(fills) == {"forward", "backward", "input gradients", "weight gradients"}
    assert all(len(found) == 1 for found in fills.values())
    assert len(set.union(*fills.values())) == 4
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {f"{name} of microbatch 3" for name in fills} <= set(texts)
    assert any(text.startswith("memory: 0 to ") for text in texts)
    assert texts.count("time") == 2


def test_more_than_a_picture_can_show_is_refused_with_a_number_that_works(megaplan, here):
    plan = planned(megaplan, "interleaved_1f1b")
    refused = megaplan("show", plan, "--svg", "picture.svg", "--set", "schedule.num_microbatches=40000")
    assert (refused.status, (here / "picture.svg").exists()) == (2, False)
    assert "MP481" in refused.err
    assert "have up to 960,000" in refused.err
    fewer = re.search(r"--set (\S+) draws", refused.err)[1]
    assert int(fewer.partition("=")[2]) * 3 * 8 <= 100_000
    assert megaplan("show", plan, "--svg", "picture.svg", "--set", fewer).status == 0


def test_show_says_when_a_step_is_too_long_to_replay(megaplan):
    ran = megaplan("show", planned(megaplan, "interleaved_1f1b"), "--set", "schedule.num_microbatches=60000")
    assert ran.status == 0
    assert "up to 1,440,000 actions per step are too many to replay" in ran.out


@pytest.mark.parametrize("kind", KINDS)
def test_show_states_the_step_of_the_plans_own_slots(megaplan, here, kind):
    plan = planned(megaplan, kind)
    shown = " ".join(megaplan("show", plan).out.split())
    picture = megaplan("show", plan, "--svg", "-").out
    length = re.search(r'<desc id="about">microbatches of a step ([^,]*),', picture)[1]
    assert f"this plan: microbatches of a step {length}; " in shown
    assert "drawn with equal slots, F = I = W = 1: " in shown


def test_stdout_gets_the_picture_alone_and_no_other_file_is_replaced(megaplan, here):
    plan = planned(megaplan, "1f1b")
    ran = megaplan("show", plan, "--svg", "-")
    assert ran.status == 0
    ElementTree.fromstring(ran.out)
    refused = megaplan("show", plan, "--svg", plan)
    assert refused.status == 2
    assert "is not an SVG" in refused.err
    assert megaplan("show", plan, "--svg", "picture.svg").status == megaplan("show", plan, "--svg", "picture.svg").status == 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_curve_peaks_at_the_budget(here, kind):
    vpp = 1 if kind in ONE_SLOT else 2
    overrides = ("mesh.pp=2", f"mesh.vpp={vpp}", f"schedule.kind={kind}", "schedule.num_microbatches=8")
    spec = load_spec("plans/tiny-hybrid-pp2.yaml", overrides).spec
    inventory = build_inventory(spec)
    spans = spans_of(equal_cuts(spec.model.num_layers, 2 * vpp), spec.model.num_layers)
    layout = build_layout(spec, inventory, spans)
    budget, times = build_budget(spec, inventory, layout), model_times(spec, inventory).of_slots(spans) * spec.num_copies
    slots = SlotTimes(tuple(t.forward_ns for t in times), tuple(t.input_ns for t in times), tuple(t.weight_ns for t in times))
    step = replay(actions(kind, 2, vpp, 8), slots, copies=spec.num_copies)
    curves = memory_over_time(spec, inventory, layout, budget, step)
    kept = kept_bytes(spec, inventory, layout)
    assert all(slot.full > 0 and (slot.pending > 0) == (kind in SPLIT_BACKWARD) for slot in kept)
    for rank, curve in enumerate(curves):
        assert max(size for _, size in curve) == budget.of_rank(rank).phases[Phase.FORWARD_BACKWARD]
        assert curve[0][1] == curve[-1][1]  # every microbatch that came has gone
        rises = Counter(after - before for (_, before), (_, after) in itertools.pairwise(curve))
        for size, count in Counter(kept[slot.index].full for slot in layout.of_rank(rank)).items():
            assert rises[size] >= 8 // spec.num_copies * count
