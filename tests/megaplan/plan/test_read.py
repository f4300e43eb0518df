"""Bad plans are refused with a code, a place and values; a changed byte of inputs or decisions never passes."""

import json

import pytest

from megaplan.errors import MegaplanError
from megaplan.plan.canonical import dumps
from megaplan.plan.digests import plan_digest
from megaplan.plan.make import plan_text
from megaplan.plan.read import inspect_plan, parse_plan, read_plan
from megaplan.plan.text import parse_json


@pytest.fixture
def text(planned):
    return plan_text(planned("tiny-hybrid-pp2"))


@pytest.fixture
def document(text):
    return json.loads(text)


def write(tmp_path, content) -> str:
    path = tmp_path / "plan.json"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content if isinstance(content, str) else dumps(content))
    return str(path)


def refusal(path: str):
    with pytest.raises(MegaplanError) as caught:
        read_plan(path)
    first = caught.value.diagnostics[0]
    assert first.location.file == path
    assert first.detail
    assert first.hints
    return first


def signed(document):
    """The document with the digest of its changed content, as a careful hand leaves it."""
    document["digests"]["plan"] = plan_digest(document["inputs"], document["decisions"])
    return document


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "MP105"),
        (b"  \n", "MP105"),
        (b"\x89PNG\r\n\x1a\n\x00\x00", "MP106"),
        (b"{\xff\xfe", "MP107"),
        (b"garbage, not JSON", "MP109"),
        (b"[" * 100_000, "MP117"),
        (b'{"a": 1, "a": 2}', "MP110"),
        (b'{"format": "megaplan.plan/1", "format_minor": 0.5}', "MP401"),
        (b'{"format": "megaplan.plan/1", "format_minor": NaN}', "MP401"),
        (b'{"a": ' + b"9" * 5000 + b"}", "MP401"),
        (b"[]", "MP403"),
        (b"{}", "MP403"),
        (b"3", "MP403"),
        (b'{"format": 1}', "MP403"),
        (b'{"format": "megaplan.estimate/1"}', "MP403"),
        (b"format: megaplan.spec/1\nname: x\n", "MP403"),
        (b'{"format": "megaplan.spec/1", "name": "x"}', "MP403"),
        (b'{"format": "megaplan.plan/2"}', "MP404"),
        (b'{"format": "megaplan.plan/0"}', "MP404"),
        (b'{"format": "megaplan.plan/x"}', "MP403"),
        (b'{"format": "megaplan.plan/1"}', "MP405"),
        (b'{"format": "megaplan.plan/1", "format_minor": -1}', "MP405"),
        (b'{"format": "megaplan.plan/1", "format_minor": true}', "MP405"),
        (b'{"format": "megaplan.plan/1", "format_minor": 0}', "MP405"),
        (b'{"format": "megaplan.plan/1", "format_minor": 7, "inputs": []}', "MP405"),
        (b"x" * (10 * 2**20), "MP109"),
        (b"\x00" * (10 * 2**20), "MP106"),
        (b"x" * (17 * 2**20), "MP104"),
        (b"[" + b"0," * (5 * 2**20) + b"0]", "MP403"),
    ],
)
def test_what_is_no_plan(tmp_path, content, code):
    assert refusal(write(tmp_path, content)).code == code


@pytest.mark.parametrize(
    ("written", "word", "hint"),
    [
        ("megaplan.plan/0", "older", "megaplan split SPEC -o plan.json"),
        ("megaplan.plan/2", "newer", "pip install --upgrade megaplan"),
        ("megaplan.plan/10", "newer", "pip install --upgrade megaplan"),
    ],
)
def test_another_major_version_is_older_or_newer(tmp_path, written, word, hint):
    found = refusal(write(tmp_path, f'{{"format": "{written}"}}'.encode()))
    assert f"{written}, {word} than megaplan.plan/1" in found.detail
    assert found.hints[0] == hint


def test_no_file_and_a_directory(tmp_path):
    assert refusal(str(tmp_path / "none.json")).code == "MP101"
    assert refusal(str(tmp_path)).code == "MP102"


def test_a_plan_may_be_cut_off_anywhere(text):
    """After a closing brace too, which ends an object and not the plan."""
    whole = text.rstrip()
    for stop in (*range(1, len(whole), 7), *(index + 1 for index, letter in enumerate(whole[:-1]) if letter == "}")):
        with pytest.raises(MegaplanError) as caught:
            parse_json(whole[:stop], "plan.json")
        assert [found.code for found in caught.value.diagnostics] == ["MP402"], whole[stop - 40 : stop]


@pytest.mark.parametrize("share", [0.001, 0.1, 0.5, 0.9, 0.999])
def test_a_plan_that_is_cut_off(tmp_path, text, share):
    assert refusal(write(tmp_path, text[: max(1, int(len(text.rstrip()) * share))])).code == "MP402"


def test_a_newer_minor_version_is_read_without_its_new_keys_and_says_so(tmp_path, document):
    document["format_minor"] = 3
    document["novelty"] = {"a": 1}
    document["decisions"]["split"]["novelty"] = 1
    document["inputs"]["mesh"]["novelty"] = 1
    loaded = inspect_plan(write(tmp_path, signed(document)))
    assert not loaded.tampered
    [warning] = loaded.warnings
    assert warning.code == "MP409"
    for key in ("novelty", "decisions.split.novelty", "inputs.mesh.novelty"):
        assert key in warning.detail
    assert loaded.plan.spec.name == "tiny-hybrid-pp2"


@pytest.mark.parametrize("depth", [30, 300, 600, 900])
def test_nesting_is_refused_or_read_at_any_depth(tmp_path, text, depth):
    nested = "[" * depth + "]" * depth
    newer = text.replace('"format_minor": 0', f'"format_minor": 1,\n  "novelty": {nested}')
    assert outcome(write(tmp_path, newer)) in ("MP409", "MP117")


def outcome(path: str) -> str:
    try:
        return inspect_plan(path).warnings[0].code
    except MegaplanError as error:
        return error.diagnostics[0].code


@pytest.mark.parametrize(
    ("path", "value", "code", "place"),
    [
        (("novelty",), 1, "MP405", "novelty"),
        (("decisions", "stages", 0, "novelty"), 1, "MP405", "decisions.stages.0.novelty"),
        (("decisions", "stages", 1, "layers"), [4], "MP405", "decisions.stages.1.layers"),
        (("decisions", "mesh", "pp"), "2", "MP405", "decisions.mesh.pp"),
        (("inputs", "mesh", "pp"), "2", "MP405", "inputs.mesh.pp"),
        (("inputs", "model", "attention", "num_heads"), 0, "MP405", "inputs.model.attention.num_heads"),
        (("inputs", "model", "norm_eps"), "1e-5", "MP405", "inputs.model.norm_eps"),
        (("estimates", "ranks", 0, "peak_bytes"), -1, "MP405", "estimates.ranks.0.peak_bytes"),
        (("digests", "plan"), "sha256:0", "MP405", "digests.plan"),
    ],
)
def test_a_wrong_field_is_named_at_its_line(tmp_path, document, path, value, code, place):
    parent = document
    for step in path[:-1]:
        parent = parent[step]
    parent[path[-1]] = value
    found = refusal(write(tmp_path, document))
    assert (found.code, found.location.key) == (code, place)
    line = dumps(document).split("\n")[found.location.line - 1]
    assert str(path[-1]) in line


def test_a_missing_key_is_named(tmp_path, document):
    del document["decisions"]["stages"][1]["letters"]
    found = refusal(write(tmp_path, document))
    assert found.code == "MP405"
    assert "decisions.stages.1.letters is missing" in found.detail


@pytest.mark.requirement("R-52")
@pytest.mark.parametrize(
    "path",
    [
        ("inputs", "mesh", "dp_shard"),
        ("inputs", "model", "moe", "num_experts"),
        ("decisions", "stages", 0, "chunk"),
        ("decisions", "schedule", "global_batch_size"),
        ("decisions", "split", "certificate", "value"),
    ],
)
def test_a_plan_edited_by_hand_does_not_match_its_digest(tmp_path, document, path):
    parent = document
    for step in path[:-1]:
        parent = parent[step]
    parent[path[-1]] += 1
    path_of_file = write(tmp_path, document)
    found = refusal(path_of_file)
    assert found.code == "MP406"
    assert document["digests"]["plan"] in found.detail
    assert [item.code for item in inspect_plan(path_of_file).tampered] == ["MP406"]


def test_training_is_outside_the_digest(tmp_path, document):
    document["inputs"]["training"]["steps"] += 1
    assert read_plan(write(tmp_path, document)).spec.training.steps == document["inputs"]["training"]["steps"]


@pytest.mark.parametrize(
    ("path", "value", "place"),
    [
        (("decisions", "stages", 0, "layers"), [0, 3], "decisions.stages"),
        (("decisions", "stages", 0, "letters"), "AMEDD", "decisions.stages.0.letters"),
        (("decisions", "stages", 1, "owns"), [], "decisions.stages.1.owns"),
        (("decisions", "stages", 1, "pp_rank"), 0, "decisions.stages.1.pp_rank"),
        (("decisions", "pattern", "expanded"), "AAAAAAAAA", "decisions.pattern.expanded"),
        (("decisions", "mesh", "dp_shard"), 2, "decisions.mesh.dp_shard"),
        (("decisions", "code_order"), ["optimizer"], "decisions.code_order"),
        (("decisions", "schedule", "placement"), "loop", "decisions.schedule.placement"),
        (("inputs", "training", "learning_rate"), "0.0030", "inputs.training.learning_rate"),
        (("digests", "model"), "sha256:" + "0" * 64, "digests.model"),
        (("decisions", "split", "certificate", "gap"), 7, "decisions.split.certificate.gap"),
        (("decisions", "split", "certificate", "value"), 7, "decisions.split.certificate.gap"),
        (("decisions", "split", "certificate", "measures"), "rank", "decisions.split.certificate.measures"),
        (("decisions", "split", "certificate", "costs"), [1], "decisions.split.certificate.costs"),
        (("estimates", "stages", 1, "slot"), 0, "estimates.stages"),
        (("estimates", "fits"), False, "estimates.fits"),
        (("estimates", "ranks", 0, "columns", "overhead_bytes"), 0, "estimates.ranks.0"),
        (("estimates", "ranks", 0, "headroom_bytes"), 0, "estimates.ranks.0"),
        (("estimates", "ranks", 0, "ranks"), [[0, 2**40]], "estimates.ranks"),
        (("estimates", "ranks", 1, "coordinate", "pp"), 0, "estimates.ranks.1.coordinate.pp"),
        (("estimates", "device", "reserve_bytes"), 0, "estimates.device"),
    ],
)
def test_parts_that_contradict_each_other_are_refused_even_under_a_renewed_digest(tmp_path, document, path, value, place):
    parent = document
    for step in path[:-1]:
        parent = parent[step]
    assert parent[path[-1]] != value
    parent[path[-1]] = value
    with pytest.raises(MegaplanError) as caught:
        read_plan(write(tmp_path, signed(document)))
    found = [(item.code, item.location.key) for item in caught.value.diagnostics]
    assert any(code in ("MP405", "MP406", "MP407") and key is not None and key.startswith(place) for code, key in found), found


def test_the_value_of_a_bottleneck_is_that_of_its_costs(tmp_path, planned):
    document = json.loads(plan_text(planned("tiny-hybrid-pp2", "split.objective=bottleneck")))
    document["decisions"]["split"]["certificate"]["value"] = 7
    with pytest.raises(MegaplanError) as caught:
        read_plan(write(tmp_path, signed(document)))
    assert ("MP407", "decisions.split.certificate.value") in [(item.code, item.location.key) for item in caught.value.diagnostics]


def test_inputs_that_break_a_rule_of_specs_are_refused_at_their_place(tmp_path, document):
    document["inputs"]["model"]["attention"]["num_kv_heads"] = 3
    found = refusal(write(tmp_path, signed(document)))
    assert found.location.key.startswith("inputs.")
    assert found.location.line is not None


def test_the_spec_of_a_plan_is_the_spec_that_was_planned(planned, text):
    loaded = parse_plan(text, "plan.json").plan
    plan = planned("tiny-hybrid-pp2")
    assert loaded.spec == plan.spec
    assert isinstance(loaded.spec.training.learning_rate, float)
    assert loaded.layout() == plan.layout()
    assert loaded.spans == plan.spans
