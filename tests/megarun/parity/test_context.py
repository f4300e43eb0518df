"""Packed rows over a context group: every document as if it were whole on one rank, wherever pieces of the sequence are cut."""

from typing import Any

import pytest
import torch
from parity_cells import C2, SELECTIVE, Cell, pattern
from parity_model import INDEXED, MIMO, MLA, spec_with
from parity_world import Worlds

pytestmark = [pytest.mark.runtime, pytest.mark.jobs]
DOCUMENTS = [[5, 3, 1, 16, 7], [13, 19]]
"""Lengths in each row of 32: inside a piece of 8 or 4, at its edge, over several pieces and ranks."""
LATENT, CHOOSING, ROTATING = {"model.attention": MLA}, {"model.attention": INDEXED}, {"model.mamba": MIMO}


@pytest.mark.requirement("R-33")
@pytest.mark.requirement("R-63")
@pytest.mark.parametrize(
    ("pattern", "degree", "more"),
    [
        ("AMERD", 2, {"recompute": {"default": "full", "blocks": {"M": "selective", "E": "selective"}}}),
        pytest.param("AMR", 4, LATENT, marks=pytest.mark.slow),
        pytest.param("AD", 4, CHOOSING, marks=pytest.mark.slow),
        pytest.param("M", 4, {}, marks=pytest.mark.slow),
        pytest.param("M", 2, ROTATING, marks=pytest.mark.slow),
        pytest.param("M", 4, ROTATING | {"recompute": {"default": "selective"}}, marks=pytest.mark.slow),
        pytest.param("R", 4, {}, marks=pytest.mark.slow),
        pytest.param("A", 4, {"model.attention.window_size": 6}, marks=pytest.mark.slow),
    ],
)
def test_documents_are_separate(pattern: str, degree: int, more: dict[str, object], worlds: Worlds) -> None:
    """Logits and gradients of packed rows, to 1e-5 of the largest."""
    model = {"model.pattern": pattern, "model.num_layers": 2 * len(pattern), "mesh.cp": degree, "batch.seq_length": 32}
    case = {"run": "packed", "spec": spec_with(model | more), "documents": DOCUMENTS}
    for record in worlds.train(case, degree):
        for name, (found, expected) in record.items():
            assert (found - expected).abs().max() <= 1e-5 * expected.abs().max().clamp(min=1e-6), name


@pytest.mark.slow
@pytest.mark.requirement("R-67")
@pytest.mark.parametrize("section", [{}, {"mamba": MIMO}], ids=["mamba2", "mamba3"])
def test_recompute_of_m_changes_no_bit(section: dict[str, Any], worlds: Worlds) -> None:
    """A region's second run takes what its scan made in the first, whatever the group's other ranks do meanwhile."""
    spec = pattern("M", 3, **section)
    plain, again = (worlds.train(Cell("", C2, spec=more).case, 2) for more in (spec, spec | SELECTIVE))
    for expected, found in zip(plain, again, strict=True):
        for what in ("gradients", "parameters"):
            assert expected[what].keys() == found[what].keys()
            pairs = [pair for name in expected[what] for pair in zip(expected[what][name], found[what][name], strict=True)]
            assert all(torch.equal(a, b) for a, b in pairs)
