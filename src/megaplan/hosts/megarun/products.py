"""Operations of megakernels with products of a GEMM library, whose workspace is allocated when the first of them runs.

Linears use the library too. Every block of layers has one of these: the router's products are the library's for all kernels,
and all other families project their input. So every rank has the workspace from its first forward on. The trace, which records operations
but not products inside them, gets their names from here.
"""

ROUTERS = ("route", "route_sigmoid", "route_scored", "route_scored_sigmoid")
HEAD_AND_LOSS = ("linear_cross_entropy", "linear_slice_statistics")
IN_EIGHT_BITS = ("fp8_linears",)
LIBRARY_OPERATIONS = tuple(f"megakernels.{name}.default" for name in (*ROUTERS, *HEAD_AND_LOSS, *IN_EIGHT_BITS))
"""Names in torch of megakernels' operations with products of the GEMM library."""
