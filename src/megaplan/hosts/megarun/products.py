"""Which operations of megakernels multiply with a GEMM library on the device, so that its workspace is taken when the first of them runs.

Linears are the library's too. Every block of layers has one of either: the router is plain torch whatever kernels are chosen, and all other
families project their input. So every rank has the workspace from its first forward on, and the trace, which sees operations, asks here for
those whose products it does not see.
"""

from __future__ import annotations

ROUTERS = ("route", "route_sigmoid", "route_scored", "route_scored_sigmoid")
HEAD_AND_LOSS = ("linear_cross_entropy", "linear_slice_statistics")
IN_EIGHT_BITS = ("fp8_linears",)
LIBRARY_OPERATIONS = tuple(f"megakernels.{name}.default" for name in (*ROUTERS, *HEAD_AND_LOSS, *IN_EIGHT_BITS))
"""As torch names them."""
