"""Platforms of documents: the folder of the corpus that a document is in. The values that `features.platform` embeds.

Platform 0 is of the documents in the corpus folder itself; the folders directly below it are 1, 2, … in the order of their names. So texts
are sorted by target platform or source by putting them into folders.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megarun.data.format import MAX_CATEGORIES
from megarun.errors import refusal

SCHEME = "folder/1"


def document_platforms(paths: Sequence[str]) -> tuple[NDArray[np.uint8], int]:
    """The platform of every document, and how many platforms there are.

    Args:
        paths: Paths of the documents, relative to the corpus, with `/`.

    Returns:
        uint8 [documents], and the number of platforms, 0 included.

    Raises:
        MegaplanError: MP616 if there are more than 256.
    """
    firsts = [path.partition("/")[0] if "/" in path else "" for path in paths]
    folders = sorted({first for first in firsts if first})
    if len(folders) >= MAX_CATEGORIES:
        raise refusal("MP616", f"--platform: {len(folders):,} folders with texts; a platform is one byte", hints=("--include PATTERNS",))
    number = {"": 0, **{folder: index for index, folder in enumerate(folders, start=1)}}
    return np.array([number[first] for first in firsts], dtype=np.uint8), len(number)
