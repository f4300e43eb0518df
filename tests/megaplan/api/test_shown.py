"""Results as Python shows them, and sources that Python has: mappings and config objects."""

import sys
from types import ModuleType

import pytest

import megaplan

CONFIG = {
    "model_type": "qwen3", "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "intermediate_size": 512, "vocab_size": 4096, "rope_theta": 1e6,
}  # fmt: skip


class Config:
    """A config object as transformers has them."""

    def to_dict(self) -> dict[str, object]:
        return dict(CONFIG)


def test_an_estimate_is_shown_in_a_line_and_as_a_table() -> None:
    found = megaplan.estimate("plans/nam56r-8xh200.yaml")
    assert repr(found).startswith("Estimate(nam56r-8xh200: 8 x h200, fits: peak ")
    assert len(repr(found)) < 240
    assert repr(found.job) == "LoadedJob(nam56r-8xh200: spec plans/nam56r-8xh200.yaml, 8 x h200)"
    table = found._repr_html_()
    assert table.count("<tr>") > 8
    assert "<th>activations</th>" in table
    document = found.to_dict()
    assert document["format"] == "megaplan.estimate/1"
    assert document["ranks"][0]["peak_bytes"] == found.peak_bytes


def test_a_frame_has_a_row_for_each_group_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    found = megaplan.estimate("plans/tiny-hybrid-pp2.yaml")
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        found.to_frame()
    stub = ModuleType("pandas")
    stub.DataFrame = list  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pandas", stub)
    rows = found.to_frame()
    assert [row["peak_bytes"] for row in rows] == [rank.peak_bytes for rank in found.ranks]
    assert (
        sum(value for key, value in rows[0].items() if key not in ("ranks", "fits", "peak_bytes", "headroom_bytes"))
        == rows[0]["peak_bytes"]
    )


def test_a_config_object_a_mapping_and_a_size() -> None:
    of_object, of_mapping = megaplan.estimate(Config()), megaplan.estimate(CONFIG)
    assert of_object.parameters == of_mapping.parameters
    found = megaplan.estimate(Config(), gpus=4, device="H100", global_batch=16, seq_length=1024)
    assert (found.job.spec.mesh.world_size, found.job.spec.device.name) == (4, "h100-sxm")
    assert found.job.spec.global_batch_tokens == 16 * 1024


def test_an_error_shows_its_hints() -> None:
    with pytest.raises(megaplan.MegaplanError) as caught:
        megaplan.estimate("plans/tiny-hybrid.yaml", device__name="h300")
    assert "hint: --set device.name=h200" in str(caught.value)


def test_names_of_the_package_are_the_public_ones() -> None:
    assert [name for name in dir(megaplan) if not name.startswith("__")] == megaplan.__all__
