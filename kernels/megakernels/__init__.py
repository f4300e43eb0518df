"""Operations that decide what training keeps for backward.

One folder an operation: `__init__.py` is the public function and its registration, `reference.py` the plain torch formulas, `kernel.py` a
Triton kernel where there is one. Import an operation from its folder, `from megakernels.attention import attention`. The contract, with
every saved tensor, is docs/reference/ops.md.
"""

from megakernels._common.device import use_kernels
from megakernels._common.scratch import scratch_bytes

__all__ = ["scratch_bytes", "use_kernels"]
