"""C blocks: a short causal convolution between two gates."""

from megaplan.dtypes import DType
from megaplan.families.family import Family, ServingState
from megaplan.families.short_convolution.formulas import FORMULAS
from megaplan.families.short_convolution.program import short_convolution_program, short_convolution_selective, short_convolution_work
from megaplan.families.short_convolution.section import ShortConvolution
from megaplan.families.short_convolution.tensors import short_convolution_tensors


def _sharded(_short: ShortConvolution, hidden_size: int) -> dict[str, int]:
    return {"hidden_size": hidden_size}


def _served(short: ShortConvolution, hidden_size: int, _variant: None, dtype: DType) -> ServingState:
    """Serving state: the convolution's last inputs."""
    return ServingState(state_bytes=hidden_size * (short.conv_kernel - 1) * dtype.bytes)


def _kernel(short: ShortConvolution) -> int:
    return short.conv_kernel


SHORT_CONVOLUTION = Family(
    letter="C",
    title="short convolution",
    section="short_convolution",
    tensors=short_convolution_tensors,
    program=short_convolution_program,
    work=short_convolution_work,
    formulas=FORMULAS,
    selective=short_convolution_selective,
    sharded=_sharded,
    serving=_served,
    convolution=_kernel,
    timed=False,
)
