"""Rows that routing moves, by the numbers: the capacity, one source's share of a receive buffer, and what all sources can send (R-43)."""

from dataclasses import dataclass

from megaplan.dtypes import DType
from megaplan.families.moe.program import ExpertMesh, capacity, received_rows
from megaplan.spec.models import MixtureOfExperts


@dataclass(frozen=True, slots=True)
class RoutingBytes:
    """Buffers of one E block on one rank.

    Attributes:
        capacity: Rows that one source may send to one expert.
        count_bytes: Dispatch indices: int32 for every chosen (token, expert).
        source_bytes: Receive buffer, and combine buffer, for what one source sends to the local experts.
        num_sources: Ranks that send: ep · etp.
        receive_bytes: Receive buffer for all of them; the combine buffer is as large.
    """

    capacity: int
    count_bytes: int
    source_bytes: int
    num_sources: int
    receive_bytes: int


def routing_bytes(moe: MixtureOfExperts, num_tokens: int, hidden_size: int, mesh: ExpertMesh, dtype: DType) -> RoutingBytes:
    """Both readings of a receive buffer: what one source fills, and what the rank must hold.

    Args:
        moe: Section of the model, with a capacity factor.
        num_tokens: Tokens of the rank and microbatch.
        hidden_size: Width of a row.
        mesh: Expert-parallel degrees.
        dtype: Dtype of a row.

    Raises:
        ValueError: Dropless routing has no capacity.
    """
    limit = capacity(moe, num_tokens)
    if limit is None:
        raise ValueError("routing without a capacity factor has no capacity; its rows are those of received_rows")
    row = hidden_size * dtype.bytes
    return RoutingBytes(
        capacity=limit,
        count_bytes=num_tokens * moe.top_k * DType.INT32.bytes,
        source_bytes=limit * (moe.num_experts // mesh.ep) * row,
        num_sources=mesh.ep * mesh.etp,
        receive_bytes=received_rows(moe, num_tokens, mesh) * row,
    )
