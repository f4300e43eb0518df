"""Types of single values, with their bounds. Nothing is coerced: no bool, text or fraction passes as an integer."""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

from megaplan.dtypes import DType
from megaplan.schedules.registry import KINDS

# Bounds keep a slip of the keyboard from becoming a list of 2^40 layers or ranks; they are far above any real model. The deepest published
# stack has 2,500 blocks (DeepNet, arXiv:2203.00555).
MAX_INT = 2**48
MAX_LAYERS = 2**12
MAX_DEGREE = 2**20
MAX_MIMO_RANK = 1024
MAX_MICROBATCHES = 2**16

PositiveInt = Annotated[int, Field(gt=0, le=MAX_INT, strict=True)]
NaturalInt = Annotated[int, Field(ge=0, le=MAX_INT, strict=True)]
LayerCount = Annotated[int, Field(gt=0, le=MAX_LAYERS, strict=True)]
MimoRank = Annotated[int, Field(gt=0, le=MAX_MIMO_RANK, strict=True)]
Degree = Annotated[int, Field(gt=0, le=MAX_DEGREE, strict=True)]
MicrobatchCount = Annotated[int, Field(gt=0, le=MAX_MICROBATCHES, strict=True)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
FactorFromOne = Annotated[float, Field(ge=1, allow_inf_nan=False, strict=True)]
FactorAboveOne = Annotated[float, Field(gt=1, allow_inf_nan=False, strict=True)]
Text = Annotated[str, Field(strict=True)]
StrictBool = Annotated[bool, Field(strict=True)]
RecomputePolicy = Literal["none", "selective", "full"]
Percent = Annotated[int, Field(gt=0, le=100, strict=True)]
Rate = Annotated[int, Field(gt=0, le=10**18, strict=True)]
Nanoseconds = Annotated[int, Field(ge=0, le=10**9, strict=True)]
ReserveName = Literal["cuda_context", "nccl", "driver", "other"]
PeakType = Literal["fp32", "bf16", "fp16", "fp8", "int8", "fp4"]
RecipeType = Literal["bf16", "fp8", "mxfp8", "nvfp4"]
StepFactor = Annotated[float, Field(ge=0.05, le=20, allow_inf_nan=False, strict=True)]
Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False, strict=True)]
BRANCH = "="
"""Beginning of a step in pydantic's locations that names a branch of a union."""
Activation = Literal["swiglu", "relu2", "gelu", "geglu"]
DenseActivation = Literal["swiglu", "relu2", "gelu", "geglu", "xielu", "relu2glu"]
"""Activations of a dense MLP; xielu has two parameters."""
GATED: frozenset[str] = frozenset({"swiglu", "geglu", "relu2glu"})
"""Activations of three matrices: gate, up and down."""
FloatType = Literal[DType.FP32, DType.BF16, DType.FP16]
MomentType = Literal[DType.FP32, DType.BF16, DType.FP16, DType.FP8]
ParamType = Literal[DType.FP32, DType.BF16, DType.FP16, DType.FP8]
if TYPE_CHECKING:
    ScheduleKind = str
else:
    ScheduleKind = Literal[KINDS]


class Section(BaseModel):
    """Base of every section: immutable, unknown keys are errors. `Attributes:` describes its keys, one line each."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)  # only the spec's validator is built, instead of thirty

    @classmethod
    def plain(cls) -> Self:
        """The section of an empty mapping, made without building its validator, which takes milliseconds."""
        return cast("Self", cls.model_construct(set()))


class OptionsSection(Section):
    """A section whose optional keys are written only if given, so that a new key changes no plan's digest.

    `options` names them; `megaplan.spec.settings` lists the keys that a spec sets, for code that cannot build sections.
    """

    options: ClassVar[frozenset[str]] = frozenset()

    @model_serializer(mode="wrap")
    def _given_options(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields = type(self).model_fields
        return {key: value for key, value in handler(self).items() if key not in self.options or getattr(self, key) != fields[key].default}
