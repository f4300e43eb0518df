"""Values of the wrong name, type or size: code, place, value and repair, and all of them at once."""

import pytest
from spec_samples import SAMPLE, Refused

# name, edits, code, key, line, what the detail shows, a hint
CASES = {
    "misspelt key": (("tp: 1", "tpp: 1"), "MP120", "mesh.tpp", 18, "'tpp' is no key of mesh", "did you mean mesh.tp?"),
    "key of another section": (
        ("split:", "num_layers: 3\nsplit:"),
        "MP120",
        "num_layers",
        25,
        "no key of a spec",
        "did you mean model.num_layers?",
    ),
    "another tool's key": (
        ("top_k", "num_experts_per_tok"),
        "MP120",
        "model.moe.num_experts_per_tok",
        10,
        "is no key",
        "did you mean model.moe.top_k?",
    ),
    "key of the other kind": (
        ("num_kv_heads: 2", "num_kv_heads: 2, kv_lora_rank: 64"),
        "MP120",
        "model.attention.kv_lora_rank",
        8,
        "is no key of model.attention",
        "kv_lora_rank is a key of kind mla",
    ),
    "misspelt section": (("mesh:", "mash:"), "MP120", "mash", 13, "'mash' is no key", "did you mean mesh?"),
    "yaml merge key": (
        ("  pp: 2", "  <<: {pp: 2}"),
        "MP120",
        "mesh.<<",
        14,
        "'<<' is no key of mesh",
        "merge keys are not read; write the keys out",
    ),
    "missing key": (
        ("num_heads: 4, num_kv", "num_kv"),
        "MP121",
        "model.attention.num_heads",
        8,
        "which kind gqa needs",
        "add num_heads below model.attention",
    ),
    "missing section": (
        ("batch: {micro_batch_size: 2, seq_length: 128}\n", ""),
        "MP121",
        "batch",
        None,
        "the spec lacks batch",
        "add batch at the top level",
    ),
    "no kind": (("kind: gqa, ", ""), "MP122", "model.attention", 8, "the kinds are gqa and mla", "kind: gqa"),
    "unknown kind": (
        ("kind: gqa", "kind: mha"),
        "MP123",
        "model.attention.kind",
        8,
        "'mha', and the legal values are gqa and mla",
        "kind: gqa",
    ),
    "unknown schedule": (("kind: 1f1b", "kind: 2f1b"), "MP123", "schedule.kind", 22, "schedule.kind = '2f1b'", "kind: 1f1b"),
    "torch's dtype name": (
        ("split:", "precision: {params: bfloat16}\nsplit:"),
        "MP123",
        "precision.params",
        25,
        "'bfloat16'",
        "params: bf16",
    ),
    "unknown policy": (
        ("split:", "recompute: {blocks: {A: half}}\nsplit:"),
        "MP123",
        "recompute.blocks.A",
        25,
        "'half'",
        "use none, selective or full",
    ),
    "unknown letter": (
        ("split:", "recompute: {blocks: {X: full}}\nsplit:"),
        "MP120",
        "recompute.blocks.X",
        25,
        "its keys are A, M, E, R and D",
        None,
    ),
    "whole float": (("tp: 1", "tp: 8.0"), "MP124", "mesh.tp", 18, "mesh.tp = 8.0", "tp: 8"),
    "exponent for an integer": (("tp: 1", "tp: 1e3"), "MP124", "mesh.tp", 18, "mesh.tp = 1000.0", "tp: 1000"),
    "fraction": (("tp: 1", "tp: 1.5"), "MP124", "mesh.tp", 18, "mesh.tp = 1.5", None),
    "bool for an integer": (("tp: 1", "tp: true"), "MP124", "mesh.tp", 18, "mesh.tp = true (a switch)", None),
    "quoted integer": (("tp: 1", 'tp: "8"'), "MP124", "mesh.tp", 18, "mesh.tp = '8' (text)", "tp: 8"),
    "underscore": (("tp: 1", "tp: 1_000"), "MP124", "mesh.tp", 18, "another number to another YAML reader", "tp: 1000"),
    "octal": (("tp: 1", "tp: 010"), "MP124", "mesh.tp", 18, "another number to another YAML reader", "tp: 10"),
    "sexagesimal": (("tp: 1", "tp: 1:30"), "MP124", "mesh.tp", 18, "mesh.tp = '1:30' (another number", None),
    "hexadecimal": (("tp: 1", "tp: 0x10"), "MP124", "mesh.tp", 18, "'0x10'", "tp: 16"),
    "empty integer": (("tp: 1", "tp:"), "MP124", "mesh.tp", 18, "mesh.tp = null (empty)", None),
    "list for an integer": (("tp: 1", "tp: [1, 2]"), "MP124", "mesh.tp", 18, "mesh.tp = [1, 2] (a list)", None),
    "not a number for an integer": (("tp: 1", "tp: .nan"), "MP124", "mesh.tp", 18, "mesh.tp = .nan", None),
    "thousands of digits": (("tp: 1", "tp: " + "9" * 5000), "MP124", "mesh.tp", 18, "…", None),
    "hundreds of digits": (("tp: 1", "tp: " + "9" * 500), "MP130", "mesh.tp", 18, "a number of 1661 bits", None),
    "text for a number": (
        ("split:", "training: {learning_rate: fast}\nsplit:"),
        "MP125",
        "training.learning_rate",
        25,
        "'fast' (text)",
        None,
    ),
    "quoted number": (
        ("split:", "training: {learning_rate: '3e-4'}\nsplit:"),
        "MP125",
        "training.learning_rate",
        25,
        "'3e-4'",
        "learning_rate: 3e-4",
    ),
    "bool for a number": (
        ("split:", "training: {weight_decay: false}\nsplit:"),
        "MP125",
        "training.weight_decay",
        25,
        "false (a switch)",
        None,
    ),
    "bool for a number or null": (
        ("split:", "training: {gradient_clip: true}\nsplit:"),
        "MP125",
        "training.gradient_clip",
        25,
        "true",
        None,
    ),
    "NO for a switch": (("  pp: 2", "  vocab_parallel: NO\n  pp: 2"), "MP126", "mesh.vocab_parallel", 14, "'NO'", "vocab_parallel: false"),
    "on for a switch": (("  pp: 2", "  vocab_parallel: on\n  pp: 2"), "MP126", "mesh.vocab_parallel", 14, "'on'", "vocab_parallel: true"),
    "one for a switch": (("  pp: 2", "  vocab_parallel: 1\n  pp: 2"), "MP126", "mesh.vocab_parallel", 14, "= 1", "vocab_parallel: true"),
    "number for a name": (("name: sample", "name: 56"), "MP127", "name", 2, "name = 56", 'name: "56"'),
    "empty name": (("name: sample", "name:"), "MP127", "name", 2, "name = null", None),
    "number for a pattern": (("pattern: AMERD", "pattern: 4"), "MP127", "model.pattern", 4, "model.pattern = 4", None),
    "scalar for a section": (("split: {mode: weighted}", "split: weighted"), "MP128", "split", 25, "split = 'weighted'", None),
    "empty section": (("split: {mode: weighted}", "split:"), "MP128", "split", 25, "split is empty", "remove split to keep its defaults"),
    "list for a section": (("split: {mode: weighted}", "split: [weighted]"), "MP128", "split", 25, "split = ['weighted']", None),
    "scalar for a list": (("{mode: weighted}", "{pin: 4}"), "MP129", "split.pin", 25, "split.pin = 4", "pin: [4]"),
    "zero": (("tp: 1", "tp: 0"), "MP130", "mesh.tp", 18, "mesh.tp = 0, and it must be above 0", None),
    "negative": (("hidden_size: 64", "hidden_size: -64"), "MP130", "model.hidden_size", 6, "-64", None),
    "negative cut": (
        ("{mode: weighted}", "{pin: [-4]}"),
        "MP130",
        "split.pin[0]",
        25,
        "split.pin[0] = -4, and it must be at least 0",
        None,
    ),
    "too many layers": (("num_layers: 10", "num_layers: 1099511627776"), "MP130", "model.num_layers", 5, "at most 65,536", None),
    "beyond 2^48": (
        ("vocab_size: 256", "vocab_size: 281474976710657"),
        "MP130",
        "model.vocab_size",
        7,
        "at most 281,474,976,710,656",
        None,
    ),
    "negative rate": (("split:", "training: {learning_rate: -1e-4}\nsplit:"), "MP130", "training.learning_rate", 25, "above 0", None),
    "infinite rate": (("split:", "training: {learning_rate: .inf}\nsplit:"), "MP131", "training.learning_rate", 25, ".inf", None),
    "overflowing rate": (("split:", "training: {learning_rate: 1e999}\nsplit:"), "MP131", "training.learning_rate", 25, ".inf", None),
    "triple as a span": (("{mode: weighted}", "{spans: [[0, 4, 8]]}"), "MP132", "split.spans[0]", 25, "has 3 items", None),
    "single as a span": (
        ("{mode: weighted}", "{spans: [[0, 4], [4]]}"),
        "MP132",
        "split.spans[1][1]",
        25,
        "split.spans[1] = [4] has 1 items",
        None,
    ),
    "name with spaces": (("name: sample", "name: my model!"), "MP133", "name", 2, "'my model!'", "name: my-model"),
    "path as a name": (("name: sample", "name: ../x"), "MP133", "name", 2, "'../x'", "name: x"),
    "long name": (("name: sample", "name: " + "x" * 101), "MP133", "name", 2, "1 to 100", None),
    "sequence parallel degree": (
        ("tp: 1", "tp: 1\n  sp: 2"),
        "MP217",
        "mesh.sp",
        19,
        "exactly when mesh.tp > 1, and mesh.tp = 1",
        "remove mesh.sp",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_one_wrong_value(refused: Refused, name: str) -> None:
    edit, code, key, line, detail, hint = CASES[name]
    found = [item for item in refused(edit) if item.location.key == key]
    assert [item.code for item in found] == [code]
    assert found[0].location.line == line
    assert detail in found[0].detail
    assert hint is None or hint in found[0].hints


def test_all_are_reported_together_in_reading_order(refused: Refused) -> None:
    found = refused(
        ("name: sample", "name: 5"), ("AMERD", "AM*"), ("tp: 1", "tp: x"), ("ep: 1", "ep: 0"), ("kind: 1f1b", "kind: y"), ("split", "spilt")
    )
    assert [item.code for item in found] == ["MP127", "MP301", "MP124", "MP130", "MP123", "MP120"]
    assert [item.location.line for item in found] == [2, 4, 18, 19, 22, 25]


def test_a_flood_is_cut_with_its_count(refused: Refused) -> None:
    found = refused(text=SAMPLE + "".join(f"k{index}: 1\n" for index in range(5000)))
    assert len(found) == 61
    assert (found[-1].code, found[-1].detail) == ("MP116", "4,940 more findings of the same document")


@pytest.mark.parametrize(
    ("edit", "detail", "hint"),
    [
        (("format: megaplan.spec/1\n", ""), "the document has no key format", "format: megaplan.spec/1"),
        (
            ("megaplan.spec/1", "megaplan.spec/2"),
            "format = 'megaplan.spec/2', and this version reads megaplan.spec/1",
            "format: megaplan.spec/1",
        ),
        (("megaplan.spec/1", "megaplan.plan/1"), "format = 'megaplan.plan/1'", "this is a plan; read it with megaplan show PLAN"),
        (("megaplan.spec/1", "1"), "format = 1,", "format: megaplan.spec/1"),
    ],
)
def test_another_format_is_the_only_finding(refused: Refused, edit: tuple[str, str], detail: str, hint: str) -> None:
    (found,) = refused(edit, ("tp: 1", "tp: x"))
    assert found.code == "MP115"
    assert detail in found.detail
    assert hint in found.hints
