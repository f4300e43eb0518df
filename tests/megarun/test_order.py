"""The order torch really executes is the plan's, and another one is refused."""

import pytest
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

from megaplan.errors import MegaplanError
from megaplan.schedule import actions
from megaplan.spec.models import Spec
from megarun.parallel.order import check_order, executed_order

pytestmark = pytest.mark.runtime


@pytest.mark.requirement("R-26")
@pytest.mark.parametrize(("pp", "num_microbatches"), [(1, 1), (1, 4), (2, 2), (2, 5), (3, 3), (4, 4), (4, 9), (8, 8)])
def test_torch_executes_the_plans_order(pp: int, num_microbatches: int) -> None:
    """1F1B, every rank."""
    planned = actions("1f1b", pp, 1, num_microbatches)
    for rank in range(pp):
        executed = executed_order(Schedule1F1B, rank, pp, num_microbatches)
        assert [f"{rank}{kind}{microbatch}" for kind, microbatch in executed] == [str(action) for action in planned[rank]]


def test_another_order_is_refused(spec_with: object) -> None:
    """The refusal names rank, position, both actions and the class."""
    spec = Spec.model_validate(spec_with({"mesh.pp": 2, "schedule.num_microbatches": 4}))  # type: ignore[operator]
    check_order(Schedule1F1B, 0, spec)
    with pytest.raises(MegaplanError) as refused:
        check_order(ScheduleGPipe, 0, spec)
    found = refused.value.diagnostics[0]
    assert found.code == "MP606"
    assert "pp rank 0, position 2: the plan has 0B0, ScheduleGPipe of torch" in found.detail
    assert "runs 0F2" in found.detail
