"""Selects the rows of the global batch that a rank trains on.

The rows of a step depend only on (step, seed), in the order [microbatch][data rank][sequence]. So D data ranks with M
microbatches each, and one process with M · D, read the same microbatches: microbatch m of data rank d is number m · D + d of the process.

CP and TP ranks share their sequences. A CP rank has two pieces of each (`megarun.parallel.groups.context`), of which a TP rank takes its
local tokens, a consecutive part; with `vocab_parallel` it takes all of them, because each rank looks up every token.

Packed rows (`data.packing: documents`) come with the document of every token. Every rank reads it from the token file, for its local rows
and whatever its stage: nothing is sent between stages. The last token of a document has no label; the number of labels of the global batch
is counted from the same table, equally on every rank.

Tokens that features read before a token and after its label are taken from complete rows, before these are split into pieces: they stay
within the row or, in packed rows, within the document.
"""

from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from megaplan.hosts.megarun.towers import tower_sizes
from megaplan.schedules import placement, slot_owner
from megaplan.spec.models import Spec
from megarun.data.images import covered_positions, image_places, made_up_patches
from megarun.dtypes import TORCH_DTYPES
from megarun.errors import refusal
from megarun.parallel.groups.context import ContextParallel
from megarun.parallel.groups.mesh import RankMesh
from megarun.parallel.groups.shapes import residual_shape, token_shape
from megarun.parallel.groups.tensor_vocabulary import IGNORE_INDEX

MISSING = -1
"""Token id that n-grams read before the first token of a row or document."""


class TokenRows(Protocol):
    """Interface of token sources; `TokenFile` and `TokenMix` implement it."""

    @property
    def bytes_per_token(self) -> float:
        """Average number of UTF-8 bytes of text per token."""
        ...

    def rows(self, step: int, seed: int, num_rows: int, seq_length: int) -> np.ndarray:
        """Global batch of 0-based `step`, int64 [num_rows, seq_length + 1]."""
        ...

    def starts(self, step: int, seed: int, num_rows: int, seq_length: int) -> np.ndarray:
        """Column of the first token of each token's document, 0 if that is before the row: int32 [num_rows, seq_length + 1]."""
        ...

    def structure_rows(self, step: int, seed: int, num_rows: int, seq_length: int) -> np.ndarray:
        """Classes of the tokens, uint8 [num_rows, seq_length + 1]."""
        ...

    def platform_rows(self, step: int, seed: int, num_rows: int, seq_length: int) -> np.ndarray:
        """Platforms of the tokens' documents, uint8 [num_rows, seq_length + 1]."""
        ...


@dataclass(frozen=True, slots=True)
class Packed:
    """Document boundaries of packed rows.

    Attributes:
        starts: int32 [num_microbatches · micro_batch_size, T / cp] on the rank's device: each token's first position of its document, as
            `ContextParallel.own_starts` counts it.
        num_targets: Number of labels of the global batch, over all microbatches and data ranks; its loss is divided by it.
    """

    starts: Tensor
    num_targets: int


WHOLE_ROWS = ("classes", "patches", "places")
"""Fields of a batch that no axis of a sequence cuts."""
FURTHER = ("following", "following_before", "following_structure", "following_platform")
"""Fields of a batch that have one tensor a depth of multi-token prediction."""


class Batch(NamedTuple):
    """A rank's part of a step; rows = num_microbatches · micro_batch_size, t = local tokens of the residual stream.

    Attributes:
        tokens: int64 [rows, local tokens] (`token_shape`) on the first stage, else None.
        labels: Each token's successor, or `IGNORE_INDEX`: the same shape on the last stage, else None.
        packed: Document boundaries; None if each row is one text.
        before: int64 [rows, n − 1, t] on the first stage of a model with n-grams of up to n tokens: the tokens 1, 2, … positions before,
            or `MISSING`.
        structure: Classes of local tokens, uint8 [rows, t], on the first stage of a model that embeds them.
        platform: Platforms of local tokens, as `structure`.
        classes: Classes of all tokens of the rows, uint8 [rows, T], on every rank of a model with a relation bias.
        patches: The rank's patches of the rows' images [rows · images, patches, values], on the first stage of a model with an encoder.
        places: Places of the images' tokens in the rank's stream of a microbatch, int64 [rows · image tokens of a row], with `patches`.
        following: On the last stage of a model with multi-token prediction, the labels of each depth, shaped like `labels`: the tokens
            2, 3, … positions after.
        following_before: If the depths add n-grams, `before` of the tokens that each depth embeds, which are 1, 2, … positions later.
        following_structure: If they add classes, `structure` of these tokens; 0 for none.
        following_platform: If they add platforms, `platform` of these tokens; 0 for none.
    """

    tokens: Tensor | None
    labels: Tensor | None
    packed: Packed | None = None
    before: Tensor | None = None
    structure: Tensor | None = None
    platform: Tensor | None = None
    following: tuple[Tensor, ...] = ()
    following_before: tuple[Tensor, ...] = ()
    following_structure: tuple[Tensor, ...] = ()
    following_platform: tuple[Tensor, ...] = ()
    classes: Tensor | None = None
    patches: Tensor | None = None
    places: Tensor | None = None

    def keyword_inputs(self) -> dict[str, Any]:
        """Keyword inputs of the stages in addition to tokens or residual stream; each stage reads only those that it needs."""
        given: dict[str, Any] = {name: getattr(self, name) for name in ("before", "structure", "platform", "labels", *WHOLE_ROWS)}
        given["starts"] = self.packed.starts if self.packed is not None else None
        for name in FURTHER:
            given[name] = getattr(self, name) or None
        return {name: value for name, value in given.items() if value is not None}

    def tensors(self) -> list[Tensor]:
        """Every tensor, in one order for all batches of a plan."""
        whole = (*(self[:2]), self.packed.starts if self.packed is not None else None, *self[3:])
        return [each for field in whole if field is not None for each in (field if isinstance(field, tuple) else (field,))]

    def copied(self) -> "Batch":
        """A copy with its own tensors."""

        def copy(field: Any) -> Any:
            if isinstance(field, Packed):
                return Packed(field.starts.clone(), field.num_targets)
            return tuple(each.clone() for each in field) if isinstance(field, tuple) else field.clone()

        return Batch._make(None if field is None else copy(field) for field in self)

    def part(self, index: int, num_parts: int) -> "Batch":
        """Rows of one of `num_parts` equal parts, as views."""

        def cut(rows: Tensor | None) -> Tensor | None:
            return None if rows is None else rows.chunk(num_parts)[index]

        packed = self.packed
        if packed is not None:
            packed = Packed(packed.starts.chunk(num_parts)[index], packed.num_targets)
        further: list[Any] = [
            tuple(rows.chunk(num_parts)[index] for rows in depths) for depths in (getattr(self, name) for name in FURTHER)
        ]
        sides = cut(self.before), cut(self.structure), cut(self.platform)
        rest = [cut(getattr(self, name)) for name in WHOLE_ROWS]
        return Batch(cut(self.tokens), cut(self.labels), packed, *sides, *further, *rest)


class Batches:
    """This rank's microbatches: token ids on the first stage, labels on the last, else None.

    Rank 0 of a V schedule has both, and so have both end ranks of DualPipe.
    """

    def __init__(self, source: TokenRows, spec: Spec, mesh: RankMesh) -> None:
        self._source, self._mesh = source, mesh
        where, parts = placement(spec.schedule.kind), spec.mesh.num_slots
        first, last = (
            {slot_owner(where, end + copy * parts, spec.mesh.pp)[0] for copy in range(spec.num_copies)} for end in (0, parts - 1)
        )
        self._reads_tokens, self._reads_labels = mesh.coordinate["pp"] in first, mesh.coordinate["pp"] in last
        self._packs, self._seed, self._seq_length = spec.data.packing == "documents", spec.training.seed, spec.batch.seq_length
        self._cp, tp = ContextParallel(spec.mesh.cp, mesh.coordinate["cp"], None), mesh.coordinate["tp"]
        shared, (_, length), (_, share, _) = self._cp.positions(self._seq_length), token_shape(spec), residual_shape(spec)
        self._share = shared[tp * share : (tp + 1) * share]
        self._own = self._share if length == share else shared
        features = spec.model.features
        self._num_before = features.ngram.max_order - 1 if features.ngram is not None else 0
        self._num_further = features.mtp.depth if features.mtp is not None else 0
        self._categories = tuple(name for name in ("structure", "platform") if getattr(features, name) is not None)
        self._sides_ahead = bool(features.sides_ahead)
        self._relates = features.relation_bias is not None
        self._spec, self._images = spec, tower_sizes(spec)
        self._covered = torch.zeros(self._seq_length + self._num_further + 1, dtype=torch.bool)
        self._covered[covered_positions(spec)] = True
        self._shape = (spec.schedule.microbatches_per_update, mesh.num_data_ranks, spec.batch.micro_batch_size)

    def at(self, step: int) -> Batch:
        """The rank's part of the batch of `step`, counted from 0, on the rank's device.

        Raises:
            MegaplanError: MP621 if packed rows leave the whole batch without a label.
        """
        batch = step, self._seed, prod(self._shape), self._seq_length
        device, packed, starts = self._mesh.device, None, None
        if self._packs:
            table = self._source.starts(*batch)
            continues = table[:, 1:] <= np.arange(self._seq_length)  # the next token belongs to the same document
            num_targets = int((continues & ~self._covered.numpy()[1 : self._seq_length + 1]).sum())
            if num_targets == 0:
                tokens = prod(self._shape) * self._seq_length
                raise refusal("MP621", f"step {step + 1}: {tokens:,} tokens, each the last of its document", "data.packing")
            starts = self._mine(table)
            packed = Packed(self._cp.own_starts(starts[:, :-1]).contiguous().to(device), num_targets)
        found = Batch(None, None, packed, classes=self._all_classes(batch))
        if not (self._reads_tokens or self._reads_labels):
            return found
        rows = self._mine(self._source.rows(*batch))
        read = {"structure": self._source.structure_rows, "platform": self._source.platform_rows}
        embeds = self._reads_tokens or self._sides_ahead
        classes = {name: self._mine(read[name](*batch)) for name in self._categories if embeds}
        if self._reads_tokens:
            patches, places = self._image_parts(step)
            found = found._replace(tokens=rows[:, self._own].to(device), patches=patches, places=places)
            if self._num_before:
                found = found._replace(before=self._before(rows, starts, 0))
            if "structure" in classes:
                found = found._replace(structure=self._classes(classes["structure"], 0))
            if "platform" in classes:
                found = found._replace(platform=self._classes(classes["platform"], 0))
        if self._reads_labels:
            first, *further = [self._labels(rows, starts, places) for places in range(1, self._num_further + 2)]
            found = found._replace(labels=first, following=tuple(further))
            if self._sides_ahead:
                ahead = range(1, self._num_further + 1)
                before = tuple(self._before(rows, starts, places) for places in ahead) if self._num_before else ()
                structure, platform = (
                    tuple(self._classes(classes[name], places) for places in ahead) if name in classes else ()
                    for name in ("structure", "platform")
                )
                found = found._replace(following_before=before, following_structure=structure, following_platform=platform)
        return found

    def _labels(self, rows: Tensor, starts: Tensor | None, places: int) -> Tensor:
        """Labels of local tokens, `places` positions after them; none under an image: int64 [n, local tokens]."""
        covered = self._covered[places : places + self._seq_length]
        return _later(rows, starts, places).masked_fill_(covered, IGNORE_INDEX)[:, self._own].to(self._mesh.device)

    def _image_parts(self, step: int) -> tuple[Tensor | None, Tensor | None]:
        """Patches of the images of the rank's rows, and their places; none without an encoder."""
        if self._images is None:
            return None, None
        device, dtype = self._mesh.device, TORCH_DTYPES[self._spec.precision.activations]
        rows = self._mine(step * prod(self._shape) + np.arange(prod(self._shape))).flatten().tolist()
        patches = made_up_patches(self._images, self._seed, rows, self._spec.batch.images)
        patches = patches.chunk(self._images.tp, 1)[self._mesh.coordinate["tp"] % self._images.tp]
        return patches.to(device, dtype).contiguous(), image_places(self._spec, len(rows), self._share).to(device)

    def _before(self, rows: Tensor, starts: Tensor | None, ahead: int) -> Tensor:
        """Tokens before those that are `ahead` positions after local ones: int64 [n, most before, t]."""
        found = [_earlier(rows, starts, places, ahead)[:, self._share] for places in range(1, self._num_before + 1)]
        return torch.stack(found, 1).to(self._mesh.device)

    def _classes(self, rows: Tensor, ahead: int) -> Tensor:
        """Classes of the tokens `ahead` positions after local ones, from uint8 [n, T + 1]; 0 past the end of a row: uint8 [n, t]."""
        found = torch.zeros_like(rows[:, : self._seq_length])
        known = max(self._seq_length + 1 - ahead, 0)
        found[:, :known] = rows[:, ahead : ahead + self._seq_length]
        return found[:, self._share].to(self._mesh.device)

    def _all_classes(self, batch: tuple[int, int, int, int]) -> Tensor | None:
        """Classes of all tokens of the rank's rows, uint8 [n, T]; None without a relation bias."""
        if not self._relates:
            return None
        return self._mine(self._source.structure_rows(*batch))[:, :-1].contiguous().to(self._mesh.device)

    def _mine(self, rows: np.ndarray) -> Tensor:
        """Rows of the global batch [num_rows, n] -> rows of this rank's microbatches, concatenated."""
        return torch.from_numpy(rows).view(*self._shape, -1)[:, self._mesh.data_rank].flatten(0, 1)


def _later(rows: Tensor, starts: Tensor | None, places: int) -> Tensor:
    """The token `places` positions after each token of its document, else `IGNORE_INDEX`: int64 [n, T] from rows and starts [n, T + 1]."""
    length = rows.shape[1] - 1
    found = torch.full_like(rows[:, :length], IGNORE_INDEX)
    known = slice(0, max(length + 1 - places, 0))
    found[:, known] = rows[:, places:]
    if starts is not None:
        found[:, known].masked_fill_(starts[:, places:] > torch.arange(known.stop), IGNORE_INDEX)
    return found


def _earlier(rows: Tensor, starts: Tensor | None, places: int, ahead: int = 0) -> Tensor:
    """Tokens `places` positions before the token that is `ahead` positions after each token; `MISSING` outside of its document.

    Args:
        rows: int64 [n, T + 1].
        starts: int32 [n, T + 1], see `TokenRows.starts`; None for one document per row.
        places: Distance backwards, from 1 on.
        ahead: Distance forwards, from 0 on.

    Returns:
        int64 [n, T].
    """
    length = rows.shape[1] - 1
    found = torch.full_like(rows[:, :length], MISSING)
    first, stop = max(places - ahead, 0), max(length + 1 - max(ahead, 1), 0)  # targets for which both tokens are in the row
    if first < stop:
        source = slice(first + ahead - places, stop + ahead - places)
        found[:, first:stop] = rows[:, source]
        if starts is not None:
            found[:, first:stop].masked_fill_(starts[:, first + ahead : stop + ahead] > torch.arange(source.start, source.stop), MISSING)
    return found
