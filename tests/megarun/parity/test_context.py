"""Packed rows over a context group: every document as if it were whole on one rank, wherever pieces of the sequence are cut."""

import pytest
from parity_model import INDEXED, MLA, spec_with
from parity_world import Worlds

pytestmark = pytest.mark.runtime
DOCUMENTS = [[5, 3, 1, 16, 7], [13, 19]]
"""Lengths in each row of 32: inside a piece of 8 or 4, at its edge, over several pieces and ranks."""
LATENT, CHOOSING = {"model.attention": MLA}, {"model.attention": INDEXED}


@pytest.mark.requirement("R-33")
@pytest.mark.requirement("R-63")
@pytest.mark.parametrize(
    ("pattern", "degree", "more"),
    [
        ("AMERD", 2, {"recompute": {"default": "full", "blocks": {"M": "none", "E": "selective"}}}),
        pytest.param("AMR", 4, LATENT, marks=pytest.mark.slow),
        pytest.param("AD", 4, CHOOSING, marks=pytest.mark.slow),
        pytest.param("M", 4, {}, marks=pytest.mark.slow),
        pytest.param("R", 4, {}, marks=pytest.mark.slow),
        pytest.param("A", 4, {"model.attention.window_size": 6}, marks=pytest.mark.slow),
    ],
)
def test_documents_are_kept_apart(pattern: str, degree: int, more: dict[str, object], worlds: Worlds) -> None:
    """Logits and gradients of packed rows, to 1e-5 of the largest."""
    model = {"model.pattern": pattern, "model.num_layers": 2 * len(pattern), "mesh.cp": degree, "batch.seq_length": 32}
    case = {"run": "packed", "spec": spec_with(model | more), "documents": DOCUMENTS}
    for record in worlds.train(case, degree):
        for name, (found, expected) in record.items():
            assert (found - expected).abs().max() <= 1e-5 * expected.abs().max().clamp(min=1e-6), name
