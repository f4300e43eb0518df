"""Shapes per microbatch of the residual stream, and of inputs and outputs of the model."""

from megaplan.spec.local import boundary, local_dims
from megaplan.spec.models import Spec


def residual_shape(spec: Spec) -> tuple[int, int, int]:
    """All residual streams of a rank's local tokens, [B, T / (cp · tp), n · h]: the output of a block."""
    return local_dims(spec).boundary


def boundary_shape(spec: Spec, layer: int) -> tuple[int, ...]:
    """Input of a stage that begins with a layer: a block's output; with values of earlier layers, both in one tensor [elements]."""
    sent = boundary(spec, local_dims(spec), layer)
    return (sent.bytes // sent.stream.dtype.bytes,) if sent.values else sent.stream.shape


def token_shape(spec: Spec) -> tuple[int, int]:
    """Token ids and labels of a rank's local tokens, [B, T / (cp · tp)]; with `vocab_parallel` of its TP group's tokens, [B, T / cp]."""
    tp = 1 if spec.mesh.vocab_parallel else spec.mesh.tp
    return spec.batch.micro_batch_size, spec.batch.seq_length // (spec.mesh.cp * tp)


def logits_shape(spec: Spec) -> tuple[int, int, int]:
    """Logits of the tokens of `token_shape`: the full vocabulary, or with `vocab_parallel` the local one, [B, T / cp, V / tp]."""
    tp = spec.mesh.tp if spec.mesh.vocab_parallel else 1
    return *token_shape(spec), spec.model.vocab_size // tp
