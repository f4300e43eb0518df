"""Head and loss: what joins the slices of a cut vocabulary."""

import pytest

from megaplan.hosts.megarun.head import JOINED, head_ops


@pytest.mark.parametrize("joined", [False, True], ids=["head, loss", "one operation"])
def test_a_cut_vocabularys_loss_makes_every_number_that_joins_its_slices(joined: bool) -> None:
    numbers = {f"loss_{name}" for name in JOINED}
    of_slices, of_whole = ({name for op in head_ops(sharded, joined) for name in op.makes} for sharded in (True, False))
    assert numbers < of_slices
    assert not numbers & of_whole
