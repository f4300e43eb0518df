"""Token-choice mixture of experts: route, plan, dispatch, grouped experts, combine.

In order: `weights, indices = route(...)`, `rows, counts = dispatch_plan(indices, E)`, `combine(experts(dispatch(x, rows, k), weights, rows,
...), rows, k)`. Saved: route x, weight, probs, indices; dispatch and combine rows; experts its inputs, gate_out and up_out.
"""

from megakernels.moe.grouped_mlp import experts
from megakernels.moe.permutation import combine, dispatch, dispatch_plan
from megakernels.moe.routing import route

__all__ = ["combine", "dispatch", "dispatch_plan", "experts", "route"]
