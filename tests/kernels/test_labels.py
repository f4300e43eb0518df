"""Labels that the losses accept."""

import pytest
import torch

from megakernels import check_labels, cross_entropy, linear_cross_entropy


@pytest.mark.parametrize("label", [-1, 5, -99, 1 << 40])
def test_labels_outside_the_vocabulary_are_refused(label: int) -> None:
    """The losses refuse them as torch's `cross_entropy` does."""
    x, weight, labels = torch.randn(3, 4), torch.randn(5, 4), torch.tensor([0, label, -100])
    message = rf"cross_entropy: labels must be in 0 … V − 1 or ignore_index; got label = {label}, V = 5, ignore_index = -100"
    for call in (
        lambda: cross_entropy(x @ weight.mT, labels),
        lambda: linear_cross_entropy(x, weight, labels),
        lambda: check_labels(labels, 5),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    kept = torch.tensor([0, 4, -100])
    assert linear_cross_entropy(x, weight, kept).isfinite()
