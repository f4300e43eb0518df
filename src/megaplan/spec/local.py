"""Sizes of a rank: those of its blocks, and what a microbatch sends from a stage to the next."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

from megakernels.libraries import FLASH4
from megaplan.blocks.ops import Dims
from megaplan.blocks.payload import Boundary, Part, Payload
from megaplan.spec.models import Spec
from megaplan.wording import series


def local_dims(spec: Spec, *, is_last_cp_rank: bool = True) -> Dims:
    """The local sizes of a checked spec (cp and tp divide the sequence), for the last rank of a CP group or another."""
    mesh, batch = spec.mesh, spec.batch
    tokens, relation = batch.seq_length // mesh.cp, spec.model.features.relation_bias
    return Dims(
        batch=batch.micro_batch_size,
        tokens=tokens,
        residual_tokens=tokens // mesh.tp,
        hidden=spec.model.hidden_size,
        tp=mesh.tp,
        cp=mesh.cp,
        dtype=spec.precision.activations,
        packed=spec.data.packing == "documents",
        is_last_cp_rank=is_last_cp_rank,
        ep=mesh.ep,
        etp=mesh.etp,
        kernels=spec.host.uses_triton,
        gathers=spec.host.uses_triton,
        frozen=spec.lora is not None,
        relations=0 if relation is None else relation.num_relations,
        flash4=spec.host.uses(FLASH4),
        gathers_latents=mesh.gathers_latents,
        streams=spec.model.num_streams,
        gathers_tokens=spec.host.gathers_tokens,
    )


def boundary(spec: Spec, dims: Dims, cut: int) -> Boundary:
    """The tensors that a stage which begins with layer `cut` receives, and the stage before it sends."""
    stream = Part(None, dims.boundary, spec.precision.activations)
    return Boundary(stream, tuple([part for value, part in payload_parts(spec, dims) if value.crosses(cut)]))


def boundary_sizes(spec: Spec, dims: Dims) -> list[int]:
    """Bytes of the boundary before each layer from the second on."""
    stream, steps = Part(None, dims.boundary, spec.precision.activations), [0] * (spec.model.num_layers + 2)
    for value, part in payload_parts(spec, dims):
        steps[value.source + 1] += part.bytes
        steps[value.readers[-1] + 1] -= part.bytes
    return [stream.bytes + carried if carried else stream.own_bytes for carried in list(accumulate(steps))[1:-2]]


def payload_parts(spec: Spec, dims: Dims) -> list[tuple[Payload, Part]]:
    """The model's values with their sizes on a rank."""
    of_value = ((value, value.dtype or spec.precision.of(value.letter).of_products) for value in spec.model.payload)
    return [(value, Part(value, value.shape(dims), dtype)) for value, dtype in of_value]


class Inseparable(NamedTuple):
    """Layers that no cut may separate, because the host's stages pass on the stream alone.

    Attributes:
        start: Layer that makes what the others read.
        stop: Layer after the last reader.
        what: Names of the values that they read.
    """

    start: int
    stop: int
    what: str

    def has_inside(self, cut: int) -> bool:
        """True if the cut separates a reader."""
        return self.start < cut < self.stop

    @property
    def text(self) -> str:
        """The layers, behind a verb such as `parts`."""
        return f"layer {self.stop - 1} from layer {self.start}, whose {self.what} it reads and the host's stages do not pass on"


def inseparable(spec: Spec) -> tuple[Inseparable, ...]:
    """The layers of a spec's model that no cut may separate on its host."""
    if spec.host.kind.carries_values:
        return ()
    spans: dict[tuple[int, int], list[str]] = {}
    for value in spec.model.payload:
        spans.setdefault((value.source, value.readers[-1] + 1), []).append(value.title)
    return tuple([Inseparable(start, stop, series(titles, "and")) for (start, stop), titles in spans.items()])
