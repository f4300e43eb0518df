"""Columns and phases of a rank's budget. Names are those of the JSON, without the `_bytes` suffix."""

from enum import StrEnum


class Column(StrEnum):
    """Column of a budget: the kind of tensor to which a byte belongs, the same for every degree (see `megaplan explain COLUMN`)."""

    REPLICATED_PARAMS = "replicated_params"
    TENSOR_PARALLEL_PARAMS = "tensor_parallel_params"
    EXPERT_PARALLEL_PARAMS = "expert_parallel_params"
    GRADIENTS = "gradients"
    MATRIX_OPTIMIZER = "matrix_optimizer"
    OTHER_OPTIMIZER = "other_optimizer"
    ACTIVATIONS = "activations"
    FEATURE_ACTIVATIONS = "feature_activations"
    ROUTING = "routing"
    COMMUNICATION = "communication"
    WORKSPACE = "workspace"
    OVERHEAD = "overhead"

    @property
    def key(self) -> str:
        """The JSON key."""
        return f"{self.value}_bytes"


class Phase(StrEnum):
    """The five phases; a rank's peak is the largest of their peaks."""

    INIT = "init"
    FIRST_FORWARD_BACKWARD = "first_forward_backward"
    FIRST_OPTIMIZER = "first_optimizer"
    FORWARD_BACKWARD = "forward_backward"
    OPTIMIZER = "optimizer"


class Basis(StrEnum):
    """Source and accuracy of a number.

    Counted from shapes, from a model of the runtime, from a data sheet or trace by others, measured by us, fitted to published
    measurements, or given in the spec.
    """

    EXACT = "exact"
    MODELLED = "modelled"
    PUBLISHED = "published"
    MEASURED = "measured"
    FITTED = "fitted"
    GIVEN = "given"
