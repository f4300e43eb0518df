"""The index of a checkpoint, `index.json`: where each chunk of each tensor is; read and checked without torch.

A tensor's chunks must cover it exactly. Where one is missing, or two overlap, a resume would keep initial values in the gap or depend on
the order of reading, and no error would say so.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from megarun.checkpoint.sums import FileRecord, read_summed
from megarun.errors import refusal
from megarun.files import read_bounded
from megarun.remote import AnyPath

INDEX = "index.json"
MAX_INDEX_BYTES = 1 << 26  # a million pieces, and at most some 500 MiB while it is parsed
MOST_DIMS = 8
MOST_COMPARISONS = 20_000_000  # a limit for the chunks of one tensor; n chunks along one dim need n comparisons
Box = tuple[tuple[int, int], ...]
"""Start and end along each dim."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One stored piece of a tensor.

    Attributes:
        offsets: Start along each dim of the full tensor.
        sizes: Length along each dim.
        file: Name of its file in the checkpoint's folder.
        offset: First byte in the file.
        length: Number of bytes in the file.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """One tensor of a checkpoint: torch dtype by name, shape, and chunks."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


def read_index(checkpoint: AnyPath, record: FileRecord | None = None) -> dict[str, SavedTensor]:
    """Every tensor of a checkpoint by name.

    Args:
        checkpoint: Folder of the checkpoint.
        record: Size and sum that the manifest lists; None: it lists none.

    Raises:
        MegaplanError: MP644 if the index cannot be read, is not valid or has another sum, or if chunks do not cover a tensor exactly.
    """
    path = checkpoint / INDEX
    try:
        text = read_bounded(path, MAX_INDEX_BYTES) if record is None else read_summed(path, record, MAX_INDEX_BYTES)
        found = parse_index(text)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise refusal("MP644", f"{path}: {type(error).__name__}: {error}", file=str(path)) from None
    return found


def parse_index(text: str) -> dict[str, SavedTensor]:
    """The tensors in the text of an index.

    Raises:
        ValueError, KeyError, TypeError, AttributeError, RecursionError: It is not valid, or chunks do not cover a tensor exactly.
    """
    return {name: _tensor(name, found) for name, found in json.loads(text)["tensors"].items()}


def _tensor(name: str, found: dict[str, Any]) -> SavedTensor:
    if not isinstance(found["dtype"], str):
        raise ValueError(f"{name}: dtype = {found['dtype']!r}")
    chunks = []
    for offsets, sizes, file, offset, length in found["chunks"]:
        check_name(file)
        chunks.append(Chunk(_counts(offsets), _counts(sizes), file, count(offset), count(length)))
    shape = _counts(found["shape"])
    wrong = coverage_error(shape, [(each.offsets, each.sizes) for each in chunks])
    if wrong:
        raise ValueError(f"{name}: {wrong}")
    return SavedTensor(found["dtype"], shape, tuple(chunks))


def coverage_error(shape: Sequence[int], chunks: Sequence[tuple[Sequence[int], Sequence[int]]]) -> str | None:
    """Reason why chunks, as (offsets, sizes), do not cover a tensor exactly; None if they do."""
    if len(shape) > MOST_DIMS:
        return f"it has {len(shape)} dims, at most {MOST_DIMS} are read"
    for offsets, sizes in chunks:
        if not len(offsets) == len(sizes) == len(shape):
            return f"a chunk has {len(offsets)} offsets and {len(sizes)} sizes, the tensor {len(shape)} dims"
        if any(start + size > whole for start, size, whole in zip(offsets, sizes, shape, strict=True)):
            return f"the chunk of {list(sizes)} at {list(offsets)} ends outside of {list(shape)}"
    volume, covered = prod(shape), sum(prod(sizes) for _, sizes in chunks)
    if covered != volume:
        return f"its chunks have {covered:,} of {volume:,} elements"
    boxes: list[Box] = [tuple((start, start + size) for start, size in zip(*each, strict=True)) for each in chunks if prod(each[1])]
    overlap = _overlap(boxes)
    return f"two chunks overlap at {list(overlap)}" if overlap is not None else None


def _overlap(boxes: Sequence[Box]) -> tuple[int, ...] | None:
    """A point that two boxes share: boxes are sorted along the dim with most pieces, and compared if they overlap there."""
    dims = range(len(boxes[0])) if boxes else range(0)
    along = max(dims, key=lambda dim: len({box[dim][0] for box in boxes}), default=0)
    active: list[Box] = []
    comparisons = 0
    for box in sorted(boxes, key=lambda box: box[along : along + 1]):
        active = [each for each in active if not box or each[along][1] > box[along][0]]
        comparisons += len(active)
        if comparisons > MOST_COMPARISONS:
            raise ValueError(f"{len(boxes):,} chunks need more than {MOST_COMPARISONS:,} comparisons")
        for each in active:
            if all(low < other_high and other_low < high for (low, high), (other_low, other_high) in zip(box, each, strict=True)):
                return tuple(max(one[0], other[0]) for one, other in zip(box, each, strict=True))
        active.append(box)
    return None


def file_ends(tensors: dict[str, SavedTensor]) -> dict[str, int]:
    """The smallest possible size in bytes of each file of an index, by name."""
    ends: dict[str, int] = {}
    for chunk in _chunks(tensors):
        ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.offset + chunk.length)
    return ends


def _chunks(tensors: dict[str, SavedTensor]) -> Iterator[Chunk]:
    for tensor in tensors.values():
        yield from tensor.chunks


def check_name(name: Any) -> None:
    """Refuse a name that is not a plain file name.

    Raises:
        ValueError: The name could refer to a file outside the folder.
    """
    if not isinstance(name, str) or name in ("", ".", "..") or any(mark in name for mark in "/\\\0"):
        raise ValueError(f"{name!r} is not a plain file name")


def count(value: Any) -> int:
    """The value if it is a non-negative integer of at most 63 bits.

    Raises:
        ValueError: The file is not an index.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 63:
        raise ValueError(f"{value!r} is not a count")
    return value


def _counts(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list):
        raise ValueError(f"{values!r} is not a list of counts")
    return tuple(count(value) for value in values)
