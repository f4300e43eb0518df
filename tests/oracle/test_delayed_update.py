"""The launches of an update of delayed scaling, as the cost model counts them."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megakernels.ops.fp8_linear.delayed import update_factors
from megaplan.cost.outside_layers import DELAYED_LAUNCHES

pytestmark = pytest.mark.runtime


class _Launches(TorchDispatchMode):
    """Counts the operations that return no view."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        self.count += not function.is_view
        return function(*arguments, **(keywords or {}))


@pytest.mark.parametrize("most_recent", [False, True])
@pytest.mark.parametrize("operands", [3, 60])
def test_an_update_launches_as_many_kernels_as_are_priced(operands: int, most_recent: bool) -> None:
    numbers, history = torch.ones(3, operands), torch.ones(operands, 16)
    with _Launches() as launches:
        update_factors(numbers, history, 0, most_recent=most_recent, margin=0)
    assert launches.count == DELAYED_LAUNCHES - most_recent
