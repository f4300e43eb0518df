"""The optional packages of a plan: what they run, what the log and the doctor say of them, and plans that cannot have them."""

from typing import Any

import pytest

from megakernels.libraries import FLASH4, QUACK, Loaded
from megaplan.errors import MegaplanError
from megaplan.hosts.megarun.libraries import library_texts
from megaplan.inventory.build import build_inventory
from megaplan.spec.load import load_spec
from megaplan.spec.models import Spec
from megarun.kernels import libraries

BOTH = "host.libraries=[flash-attn-4, quack-kernels]"
HYBRID = "plans/tiny-hybrid.yaml"
WINDOWS = "model.attention={kind: gqa, num_heads: 4, num_kv_heads: 2, head_dim: 16, window_size: 8, full_layers: []}"


def spec_of(*settings: str) -> Spec:
    return load_spec(HYBRID, settings).spec


def notes(spec: Spec, capability: tuple[int, int] = (9, 0)) -> dict[str, tuple[str, bool]]:
    return {each.name: (each.text, each.differs) for each in libraries.library_notes(spec, build_inventory(spec), capability)}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ((WINDOWS, "precision.params=bf16"), "runs attention of 2 of 2 layers, forward and backward, with sums in one order"),
        ((WINDOWS, "precision.params=bf16", "data.packing=documents"), "it needs the number of documents on the host"),
        ((WINDOWS, "precision.params=fp32"), "it has no fp32"),
    ],
)
def test_layers_that_a_package_takes(settings: tuple[str, ...], said: str) -> None:
    spec = spec_of(BOTH, *settings)
    assert said in library_texts(spec, build_inventory(spec))[FLASH4]


def test_products_that_a_package_takes() -> None:
    for dtype, said in (("bf16", "Muon's symmetric products"), ("fp32", "runs nothing")):
        spec = spec_of(BOTH, f"optimizer.newton_schulz_dtype={dtype}")
        assert said in library_texts(spec, build_inventory(spec))[QUACK]


def test_the_log_says_what_runs_and_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "loaded", lambda _: Loaded(None, "not installed"))
    found = notes(spec_of(BOTH))
    assert set(found) == {FLASH4, QUACK}
    for text, differs in found.values():
        assert differs
        assert "does not run: not installed" in text
        assert "within the bytes of the plan" in text
    assert "this GPU is sm_100, not sm_90" in notes(spec_of(BOTH), (10, 0))[FLASH4][0]
    monkeypatch.setattr(libraries, "loaded", lambda _: Loaded(libraries, None))  # type: ignore[arg-type]
    assert [differs for _, differs in notes(spec_of(BOTH)).values()] == [False, False]
    monkeypatch.setattr(libraries, "installed_version", lambda name: "1.0" if name == QUACK else None)
    assert notes(spec_of()) == {QUACK: ("quack-kernels 1.0 is installed, and host.libraries of the plan does not name it", False)}


@pytest.mark.parametrize(
    "settings",
    [
        (BOTH, "host.kernels=reference"),
        (BOTH, "device.name=b200"),
        ("host.libraries=[quack-kernels, quack-kernels]",),
    ],
)
def test_plans_without_them(settings: tuple[str, ...]) -> None:
    with pytest.raises(MegaplanError) as refused:
        spec_of(*settings)
    assert [each.code for each in refused.value.diagnostics] == ["MP696"]


def test_a_plan_without_them_says_nothing_of_them() -> None:
    """A key that is not given is in no document, so that digests stay."""
    document: dict[str, Any] = spec_of().model_dump()["host"]
    assert "libraries" not in document
    assert spec_of(BOTH).model_dump()["host"]["libraries"] == (FLASH4, QUACK)
