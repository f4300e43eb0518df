"""Report and diff of a model with an encoder: its parts by name, their bytes, and the change that causes them."""

import json

import megaplan
from megaplan.api.estimate_json import estimate_document
from megaplan.cli.diff_text import owner_text
from megaplan.plan.diff import diff_plans
from megaplan.plan.make import make_plan
from megaplan.report.document import report_document
from megaplan.report.page import report_html
from megaplan.spec.load import spec_from_document

ENCODER = {"num_layers": 3, "hidden_size": 48, "num_heads": 4, "head_dim": 12, "ffn_hidden_size": 96, "patch_values": 27, "patches": 32}
PROJECTION = {"widths": [192, 64], "joined_patches": 4}


def document(trained=None):
    """Two stages; `trained` None is the model of text alone."""
    attention = {"kind": "gqa", "num_heads": 4, "num_kv_heads": 4, "head_dim": 16}
    model = {
        "pattern": "AD",
        "num_layers": 4,
        "hidden_size": 64,
        "vocab_size": 256,
        "attention": attention,
        "mlp": {"ffn_hidden_size": 128},
    }
    if trained is not None:
        model["towers"] = {"vision": {"trained": trained, "encoder": ENCODER}, "projector": {"trained": True, "projection": PROJECTION}}
    found = {"format": "megaplan.spec/1", "name": "small", "model": model, "mesh": {"pp": 2}, "schedule": {"num_microbatches": 4}}
    return found | {"batch": {"micro_batch_size": 2, "seq_length": 64}, "split": {"mode": "equal"}}


def plan(trained=None):
    return make_plan(spec_from_document(document(trained)))


def test_a_diff_names_an_encoder_once():
    """All blocks of an encoder are one owner, on the first stage, with the parameters of the inventory."""
    before, after = plan(), plan(trained=True)
    diff = diff_plans(before, after)
    assert [owner_text(move) for move in diff.owners] == ["vision: nowhere → pp 0 chunk 0", "projector: nowhere → pp 0 chunk 0"]
    assert [change.key for change in diff.inputs] == ["model.towers"]
    first = next(change for change in diff.other if change.key == "estimates.parameters.slot 0")
    added = sum(block.elements for name, block in after.inventory.outside if name.startswith(("vision.", "projector")))
    assert first.after - first.before == added
    assert (0, 1) in diff.ranks[0].ranks


def test_a_diff_of_a_frozen_encoder_changes_its_stage_alone():
    """Freezing takes gradients, moments and kept activations from the first stage; no layer and no owner moves."""
    diff = diff_plans(plan(trained=True), plan(trained=False))
    assert (diff.moves, diff.owners) == ((), ())
    assert [change.key for change in diff.inputs] == ["model.towers.vision.trained"]
    assert [rank.stages for rank in diff.ranks] == [((0, 1),)]
    assert all(change.after < change.before for change in diff.ranks[0].columns)


def test_a_report_has_the_towers():
    found = megaplan.estimate(document(trained=False))
    data = report_document(found, estimate_document(found, found.ranks))
    towers = data["estimate"]["totals"]["towers"]
    assert {name: part["trained"] for name, part in towers.items()} == {"vision": False, "projector": True}
    assert data["slots"][0]["owns"][0] == "vision.patches"
    assert "projector" in data["slots"][0]["owns"]
    page = report_html(json.loads(json.dumps(data)))
    assert "towerNames" in page
