"""Shapes between the stages of a rank, and of what enters and leaves the model, per microbatch."""

from __future__ import annotations

from megaplan.spec.models import Spec


def residual_shape(spec: Spec) -> tuple[int, int, int]:
    """The residual stream of a rank's own tokens, [B, T / (cp · tp), h]."""
    return spec.batch.micro_batch_size, spec.batch.seq_length // (spec.mesh.cp * spec.mesh.tp), spec.model.hidden_size


def token_shape(spec: Spec) -> tuple[int, int]:
    """Token ids and labels: a rank's own tokens, [B, T / (cp · tp)]; with `vocab_parallel` those of its TP group, [B, T / cp]."""
    tp = 1 if spec.mesh.vocab_parallel else spec.mesh.tp
    return spec.batch.micro_batch_size, spec.batch.seq_length // (spec.mesh.cp * tp)


def logits_shape(spec: Spec) -> tuple[int, int, int]:
    """Logits of the tokens that `token_shape` tells: all words, or with `vocab_parallel` the rank's own, [B, T / cp, V / tp]."""
    tp = spec.mesh.tp if spec.mesh.vocab_parallel else 1
    return *token_shape(spec), spec.model.vocab_size // tp
