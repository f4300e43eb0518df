"""Token-choice mixture of experts: route, plan, dispatch, grouped experts, combine.

In order: `weights, indices, probs = route(...)`, `rows, counts = dispatch_plan(indices, E)`, `combine(experts(dispatch(x, rows, k),
weights, rows, ...), rows, k)`. Saved: route x, weight, probs
(of sigmoid scores logits), indices; dispatch and combine rows; experts its inputs, gate_out and up_out.

`routed_experts(x, weights, rows, counts, ...)` combines dispatch, experts and combine, and does not save dispatched rows.

If experts are on several ranks, dispatched rows are sent to them; there `rows, totals = arrival_plan(...)` sorts the received rows, and
`combine(experts(dispatch(received, rows, 1), weights, rows, totals, ...), rows, 1)` is sent back.

With router losses `route_scored` also returns their inputs, and `router_losses` adds their gradients to those of the weights.
"""
