"""Costs files: written files are read back, and every kind of error has one diagnostic."""

import json
import math
from typing import Any

import pytest

from megaplan.cost.file import MAX_COSTS_BYTES, costs_document, parse_costs, read_costs
from megaplan.cost.times import model_times
from megaplan.cost.values import MeasuredCosts, StoredBytes
from megaplan.errors import MegaplanError, render_diagnostic
from megaplan.inventory.build import build_inventory
from megaplan.partition.choose import choose_cuts
from megaplan.partition.values import stack_costs
from megaplan.scalars import MAX_LAYERS
from megaplan.spec.models import Spec


@pytest.fixture
def spec(make_spec) -> Spec:
    return make_spec("AEMR", 8, mesh={"pp": 4}, schedule={"num_microbatches": 4})


@pytest.fixture
def document(spec) -> dict[str, Any]:
    """The model's own values, as a file holds them."""
    written: dict[str, Any] = json.loads(json.dumps(costs_document(model_times(spec, build_inventory(spec)))))
    return written


def parse(document: Any, spec: Spec) -> MeasuredCosts:
    text = document if isinstance(document, str) else json.dumps(document)
    return parse_costs(text, "costs.json", spec, build_inventory(spec))


def test_what_is_written_is_read_back(spec, document):
    inventory = build_inventory(spec)
    measured, times = parse(document, spec), model_times(spec, inventory)
    assert measured.times == times
    assert measured.static_bytes == measured.activation_bytes == (None,) * 8
    assert measured.first == measured.last == StoredBytes()
    assert costs_document(measured.times) == document
    weights = stack_costs(spec, inventory, measured)
    assert weights.layers == tuple(layer.forward_ns + layer.input_ns + layer.weight_ns for layer in times.layers)
    assert (weights.first, weights.last, weights.unit) == (times.first.total_ns, times.last.total_ns, "ns")
    cuts = choose_cuts(spec, inventory, costs=weights)
    assert cuts.certificate.unit == "ns"
    assert cuts.certificate.optimal


def test_a_measured_layer_moves_the_cuts(spec, document):
    """One layer that takes longer than all others together stands alone."""
    document["layers"][3]["forward_ns"] = 10**11
    by_largest = spec.model_copy(update={"split": spec.split.model_copy(update={"objective": "bottleneck"})})
    cuts = choose_cuts(by_largest, build_inventory(spec), costs=stack_costs(spec, build_inventory(spec), parse(document, spec)))
    assert (3, 4) in cuts.spans


def test_memory_and_edges_are_taken_over(spec, document):
    document["layers"][2] |= {"static_bytes": 5, "activation_bytes": 0}
    document["edges"] = {"embedding": None, "head": {"forward_ns": 1, "input_ns": 2, "weight_ns": 3, "static_bytes": 4}}
    document["boundary_ns"] = 7
    measured = parse(document, spec)
    assert measured.static_bytes == (None, None, 5, None, None, None, None, None)
    assert measured.activation_bytes[2] == 0
    assert measured.times.first.total_ns == 0
    assert (measured.times.last.total_ns, measured.last, measured.times.boundary_ns) == (6, StoredBytes(static_bytes=4), 7)


def test_without_a_boundary_the_model_s_own_stands(spec, document):
    expected = document.pop("boundary_ns")
    assert parse(document, spec).times.boundary_ns == expected > 0
    assert parse({**document, "boundary_ns": None}, spec).times.boundary_ns == expected


def test_the_digest_is_of_the_values(spec, document):
    digest = parse(document, spec).digest
    assert digest.startswith("sha256:")
    assert parse(json.dumps(document, indent=3, sort_keys=True), spec).digest == digest
    bare = json.loads(json.dumps(document))
    for layer in bare["layers"]:
        del layer["static_bytes"], layer["activation_bytes"]
    assert parse(bare, spec).digest == digest
    seen = {digest}
    for edit in (
        lambda d: d["layers"][0].update(weight_ns=d["layers"][0]["weight_ns"] + 1),
        lambda d: d["layers"][0].update(static_bytes=0),
        lambda d: d["edges"].update(embedding=None),
        lambda d: d.update(boundary_ns=None),
        lambda d: d["layers"].reverse(),
    ):
        changed = json.loads(json.dumps(document))
        edit(changed)
        seen.add(parse(changed, spec).digest)
    assert len(seen) == 6


def put(*path: str | int, value: Any) -> Any:
    def edit(document: dict[str, Any]) -> dict[str, Any]:
        inside: Any = document
        for step in path[:-1]:
            inside = inside[step]
        inside[path[-1]] = value
        return document

    return edit


def drop(*path: str | int) -> Any:
    def edit(document: dict[str, Any]) -> dict[str, Any]:
        inside: Any = document
        for step in path[:-1]:
            inside = inside[step]
        del inside[path[-1]]
        return document

    return edit


BAD = [
    (
        "another-format",
        put("format", value="megaplan.costs/2"),
        "MP340",
        "format = 'megaplan.costs/2', but this version reads megaplan.costs/1",
    ),
    ("a-plan", put("format", value="megaplan.plan/1"), "MP340", "format = 'megaplan.plan/1'"),
    ("no-format", drop("format"), "MP340", "the document has no key `format`"),
    ("a-list", lambda _: "[]", "MP340", "the document is []"),
    ("a-number", lambda _: "3", "MP340", "the document is 3"),
    ("no-layers", drop("layers"), "MP341", "a costs file lacks layers"),
    ("no-edges", drop("edges"), "MP341", "a costs file lacks edges"),
    ("no-embedding", drop("edges", "embedding"), "MP341", "edges lacks embedding"),
    ("no-head", drop("edges", "head"), "MP341", "edges lacks head"),
    ("an-edge-too-many", put("edges", "mtp", value=None), "MP341", "edges has 'mtp', but its keys are embedding and head"),
    ("a-key-too-many", put("units", value="ns"), "MP341", "a costs file has 'units'"),
    ("a-missing-time", drop("layers", 3, "input_ns"), "MP341", "layers[3] lacks input_ns"),
    ("a-missing-edge-time", drop("edges", "head", "weight_ns"), "MP341", "edges.head lacks weight_ns"),
    ("a-misspelt-key", put("layers", 3, "static_byte", value=1), "MP341", "layers[3] has 'static_byte'"),
    ("layers-no-list", put("layers", value={}), "MP342", "layers = {}, but it takes a list"),
    ("edges-no-object", put("edges", value=[]), "MP342", "edges = [], but it takes an object"),
    ("a-layer-no-object", put("layers", 1, value=7), "MP342", "layers[1] = 7, but it takes an object"),
    ("a-null-layer", put("layers", 1, value=None), "MP342", "layers[1] = null, but it takes an object"),
    ("an-edge-no-object", put("edges", "head", value=7), "MP342", "edges.head = 7, but it takes an object"),
    ("negative", put("layers", 2, "forward_ns", value=-1), "MP342", "layers[2].forward_ns = -1, but it takes a whole number"),
    ("negative-edge", put("edges", "head", "input_ns", value=-1), "MP342", "edges.head.input_ns = -1"),
    ("a-fraction", put("layers", 2, "forward_ns", value=1.5), "MP342", "layers[2].forward_ns = 1.5"),
    ("a-float", put("layers", 2, "forward_ns", value=2.0), "MP342", "layers[2].forward_ns = 2.0"),
    ("text", put("layers", 2, "forward_ns", value="12"), "MP342", "layers[2].forward_ns = '12'"),
    ("true", put("layers", 2, "forward_ns", value=True), "MP342", "layers[2].forward_ns = true"),
    ("a-null-time", put("layers", 2, "forward_ns", value=None), "MP342", "layers[2].forward_ns = null"),
    ("nan", put("layers", 2, "forward_ns", value=math.nan), "MP342", "layers[2].forward_ns = .nan"),
    ("infinite", put("layers", 2, "forward_ns", value=math.inf), "MP342", "layers[2].forward_ns = .inf"),
    ("a-day", put("layers", 2, "forward_ns", value=86_400 * 10**9), "MP342", "layers[2].forward_ns = 86400000000000"),
    ("negative-bytes", put("layers", 2, "static_bytes", value=-4), "MP342", "layers[2].static_bytes = -4"),
    ("fractional-bytes", put("layers", 2, "activation_bytes", value=0.5), "MP342", "layers[2].activation_bytes = 0.5"),
    ("a-petabyte", put("layers", 2, "activation_bytes", value=2**50), "MP342", "layers[2].activation_bytes = 1125899906842624"),
    ("negative-boundary", put("boundary_ns", value=-1), "MP342", "boundary_ns = -1"),
    ("a-layer-too-few", drop("layers", 0), "MP343", "the file has 7 layers, but model.num_layers = 8"),
    ("no-layer", put("layers", value=[]), "MP343", "the file has 0 layers, but model.num_layers = 8"),
    (
        "twice",
        lambda _: '{"format": "megaplan.costs/1", "format": "megaplan.costs/1"}',
        "MP110",
        "the key 'format' occurs twice in one object",
    ),
    ("many-digits", lambda _: '{"format": "megaplan.costs/1", "layers": ' + "9" * 5000 + "}", "MP342", "a number has 5,000 digits"),
    ("cut-off", lambda document: json.dumps(document)[:-20], "MP109", "column"),
    ("yaml", lambda _: "format: megaplan.costs/1\nlayers: []\n", "MP109", "expecting value"),
    ("deep", lambda _: "[" * 200_000, "MP117", "nested thousands of levels deep"),
]


@pytest.mark.parametrize(("edit", "code", "detail"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_a_bad_file_gets_one_diagnostic(spec, document, edit, code, detail):
    with pytest.raises(MegaplanError) as caught:
        parse(edit(document), spec)
    (found,) = caught.value.diagnostics
    shown = render_diagnostic(found)
    assert found.code == code
    assert detail in shown or (code == "MP109" and found.location.line is not None)
    assert "costs.json" in shown
    assert len(found.hints) >= 1
    assert len(shown) < 1200


def test_all_findings_are_reported_and_many_are_counted(spec, document):
    document["layers"][0]["forward_ns"] = -1
    del document["edges"]["head"]
    document["layers"].pop()
    with pytest.raises(MegaplanError) as caught:
        parse(document, spec)
    assert [found.code for found in caught.value.diagnostics] == ["MP342", "MP343", "MP341"]
    document["layers"] = [7] * 1000
    with pytest.raises(MegaplanError) as caught:
        parse(document, spec)
    assert len(caught.value.diagnostics) == 21
    assert caught.value.diagnostics[-1].code == "MP116"


def test_a_fraction_s_fix_is_the_rounded_number(spec, document):
    document["layers"][2]["forward_ns"] = 1331.6
    with pytest.raises(MegaplanError) as caught:
        parse(document, spec)
    assert caught.value.diagnostics[0].hints[0] == "write 1332"


@pytest.mark.parametrize(
    ("content", "code"),
    [(None, "MP101"), (b"", "MP105"), (b"\xff\xfe{\x00", "MP106"), (b"\xe9", "MP107"), (b" " * (MAX_COSTS_BYTES + 1), "MP104")],
)
def test_a_file_that_is_no_text_is_refused(spec, tmp_path, content, code):
    path = tmp_path / "costs.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(MegaplanError) as caught:
        read_costs(str(path), spec, build_inventory(spec))
    (found,) = caught.value.diagnostics
    assert found.code == code
    assert "megaplan costs" in found.hints[0]


def test_the_most_layers_that_a_model_may_have_are_read(make_spec, tmp_path):
    spec = make_spec("AD", MAX_LAYERS)
    inventory = build_inventory(spec)
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(costs_document(model_times(spec, inventory))))
    assert len(read_costs(str(path), spec, inventory).times.layers) == MAX_LAYERS
