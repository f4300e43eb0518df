"""Images of a batch: made-up patches, the places of their tokens in a row, and the labels that are left.

The patches of an image are normal numbers of a generator that is seeded by the run's seed, the number of the row and the number of the
image in it. So every layout, and a resumed run, has the same images. Image i of n begins at position i · ⌊T / n⌋ of a row of T
tokens. Text tokens at the image's positions are not read and not predicted.
"""

import hashlib
from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megaplan.hosts.megarun.towers import TowerSizes, tower_sizes
from megaplan.spec.models import Spec


def covered_positions(spec: Spec) -> NDArray[np.int64]:
    """The positions of a row's image tokens, in the order of the images; none without a stated encoder."""
    sizes, length, images = tower_sizes(spec), spec.batch.seq_length, spec.batch.images
    if sizes is None:
        return np.empty(0, dtype=np.int64)
    begins = np.arange(images) * (length // images)
    return (begins[:, None] + np.arange(sizes.tokens)).reshape(-1)


def num_labels(spec: Spec) -> int:
    """Labels of the global batch of rows that are one text each: positions whose next token belongs to an image have no label."""
    covered = int((covered_positions(spec) > 0).sum())
    return spec.global_batch_size * (spec.batch.seq_length - covered)


def image_places(spec: Spec, num_rows: int, own: Tensor) -> Tensor:
    """Place of each image token in the rank's stream of its microbatch, int64 [num_rows · image tokens of a row].

    Args:
        spec: The spec.
        num_rows: Rows.
        own: The rank's positions of a row [t]; a token at another rank's position gets the index micro_batch_size · t, one past the last.
    """
    rows, length = spec.batch.micro_batch_size, len(own)
    found = torch.full((rows, spec.batch.seq_length), rows * length)
    found[:, own] = torch.arange(rows * length).view(rows, length)
    return found[:, torch.from_numpy(covered_positions(spec))].flatten().repeat(num_rows // rows)


def made_up_patches(sizes: TowerSizes, seed: int, rows: Iterable[int], images: int) -> Tensor:
    """Patches of the images of rows with these numbers, counted over all steps: fp32 [rows · images, patches, values]."""
    shape = sizes.encoder.patches, sizes.encoder.patch_values
    return torch.stack([_image(f"{seed}/images/{row}/{index}", shape) for row in rows for index in range(images)])


def _image(name: str, shape: tuple[int, int]) -> Tensor:
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
