"""Safetensors files of a model's folder: read one tensor at a time, written shard by shard."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megarun.checkpoint.index import check_name
from megarun.errors import refusal
from megarun.files import read_bounded

SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
MAX_JSON_BYTES = 1 << 28
SHARD_BYTES = 5 * 10**9
METADATA = {"format": "pt"}
"""Metadata that transformers requires of a file."""
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64, "U8": torch.uint8}


class TensorHeader(NamedTuple):
    """Dtype and shape of a stored tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass
class WeightFiles:
    """The tensors of a folder.

    Attributes:
        folder: Folder with `model.safetensors`, or an index and its shards.
        places: File of each tensor.
    """

    folder: Path
    places: dict[str, str]
    _open: dict[str, Any] = field(default_factory=dict)
    _names: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path) -> "WeightFiles":
        """The tensors of a folder; no values are read.

        Raises:
            MegaplanError: MP663 if it has no safetensors, or its index is wrong.
        """
        index = folder / INDEX
        try:
            if index.is_file():
                places = json.loads(read_bounded(index, MAX_JSON_BYTES))["weight_map"]
                for file in set(places.values()):
                    check_name(file)
                return cls(folder, dict(places))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise unreadable(index, error) from None
        if not (folder / SINGLE).is_file():
            hint = "save_pretrained writes these; older formats are converted by transformers"
            raise refusal("MP663", f"{folder} has neither {SINGLE} nor {INDEX}", hints=(hint,), file=str(folder))
        found = cls(folder, {})
        found.places = dict.fromkeys(found._file(SINGLE).keys(), SINGLE)
        return found

    def written_as(self, names: Iterable[str], others: Callable[[str], Iterable[str]]) -> "WeightFiles":
        """The same for `names`, which the files may have under one of the names in `others`."""
        for name in names:
            written = next((other for other in others(name) if other in self.places), name)
            if name not in self.places and written != name:
                self.places[name], self._names[name] = self.places.pop(written), written
        return self

    def header(self, name: str) -> TensorHeader:
        """Dtype and shape of a tensor.

        Raises:
            MegaplanError: MP663 if its file has no such tensor, or a checkpoint cannot have its dtype.
        """
        try:
            stored = self._file(self.places[name]).get_slice(self._names.get(name, name))
        except (SafetensorError, UnicodeError) as error:
            raise unreadable(self.folder / self.places[name], error) from None
        dtype = stored.get_dtype()
        if dtype not in _DTYPES:
            detail = f"{self.folder / self.places[name]}: {name} is {dtype}, and weights of {', '.join(_DTYPES)} are read"
            raise refusal("MP663", detail, hints=("dequantise the model with transformers first",), file=str(self.folder))
        return TensorHeader(_DTYPES[dtype], tuple(stored.get_shape()))

    def read(self, name: str) -> Tensor:
        """The values of a tensor, in its dtype.

        Raises:
            MegaplanError: MP663.
        """
        try:
            found: Tensor = self._file(self.places[name]).get_tensor(self._names.get(name, name))
        except (SafetensorError, UnicodeError) as error:
            raise unreadable(self.folder / self.places[name], error) from None
        return found

    def _file(self, name: str) -> Any:
        if name not in self._open:
            try:
                self._open[name] = safe_open(self.folder / name, "pt")
            except (OSError, SafetensorError, UnicodeError) as error:
                raise unreadable(self.folder / name, error) from None
        return self._open[name]


def unreadable(path: Path, error: Exception) -> Exception:
    """MP663 of a file that cannot be read."""
    said = str(error).splitlines() or [""]
    return refusal("MP663", f"{path}: {type(error).__name__}: {said[0]}", file=str(path))


class Group(NamedTuple):
    """Tensors that are written together.

    Attributes:
        sizes: Bytes of each, by name.
        values: Makes them.
    """

    sizes: Mapping[str, int]
    values: Callable[[], Mapping[str, Tensor]]


def write_shards(folder: Path, groups: Sequence[Group], num_parameters: int, limit: int = SHARD_BYTES) -> list[str]:
    """Write tensors as `model.safetensors`, or as shards of at most `limit` bytes with their index; names of the files.

    Args:
        folder: Destination folder.
        groups: Groups in order; a group is never divided, so one larger than the limit has its own shard.
        num_parameters: Number of parameters, for the index.
        limit: Bytes of a shard.
    """
    shards = list(_shards(groups, limit))
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {name: tensor for group in shard for name, tensor in group.values().items()}
        save_file(tensors, folder / file, METADATA)
        places |= dict.fromkeys(tensors, file)
    if len(shards) > 1:
        total = sum(size for group in groups for size in group.sizes.values())
        index = {"metadata": {"total_parameters": num_parameters, "total_size": total}, "weight_map": dict(sorted(places.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return list(dict.fromkeys(places.values()))


def _shards(groups: Sequence[Group], limit: int) -> Iterator[list[Group]]:
    shard: list[Group] = []
    filled = 0
    for group in groups:
        size = sum(group.sizes.values())
        if shard and filled + size > limit:
            yield shard
            shard, filled = [], 0
        shard.append(group)
        filled += size
    if shard:
        yield shard
