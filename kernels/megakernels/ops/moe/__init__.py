"""Token-choice mixture of experts: route, plan, dispatch, grouped experts, combine.

In order: `weights, indices, probs = route(...)`, `rows, counts = dispatch_plan(indices, E)`, `combine(experts(dispatch(x, rows, k),
weights, rows, ...), rows, k)`. Saved: route x, weight, probs
(of sigmoid scores logits), indices; dispatch and combine rows; experts its inputs, gate_out and up_out.

`routed_experts(x, weights, rows, counts, ...)` combines dispatch, experts and combine, and does not save dispatched rows.

If experts are on several ranks, dispatched rows are sent to them; there `rows, totals = arrival_plan(...)` sorts the received rows, and
`combine(experts(dispatch(received, rows, 1), weights, rows, totals, ...), rows, 1)` is sent back.

With router losses `route_scored` also returns their inputs, and `router_losses` adds their gradients to those of the weights.
"""

from megakernels.ops.moe.grouped_mlp import experts
from megakernels.ops.moe.losses import router_losses
from megakernels.ops.moe.permutation import arrival_plan, combine, dispatch, dispatch_plan
from megakernels.ops.moe.routed_mlp import routed_experts
from megakernels.ops.moe.routing import route, route_scored

__all__ = ["arrival_plan", "combine", "dispatch", "dispatch_plan", "experts", "route", "route_scored", "routed_experts", "router_losses"]
