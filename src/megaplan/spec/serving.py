"""The section `serving`: an inference pool next to training."""

from typing import Literal

from megaplan.dtypes import DType
from megaplan.scalars import Degree, NaturalInt, OptionsSection, ParamType, PositiveInt


class Serving(OptionsSection):
    """An inference pool priced separately from training, never added to it.

    Attributes:
        batch_size: Sequences served concurrently, by each tensor group.
        context_length: Tokens of each sequence, prompt and answer.
        kv_dtype: Dtype of the key-value cache.
        cache: One contiguous region per sequence, or pages.
        block_size: Tokens of a page.
        tp: Ranks of a tensor group; null for `mesh.tp`.
        pp: Stages, of equal numbers of layers; null for `mesh.pp`.
        ep: Ranks over which the experts are distributed; null for `mesh.ep`.
        shared_prefix: Tokens at the beginning of every sequence whose pages all sequences share.
    """

    options = frozenset({"tp", "pp", "ep", "shared_prefix"})

    batch_size: PositiveInt
    context_length: PositiveInt
    kv_dtype: ParamType = DType.BF16
    cache: Literal["contiguous", "paged"] = "contiguous"
    block_size: PositiveInt = 256
    tp: Degree | None = None
    pp: Degree | None = None
    ep: Degree | None = None
    shared_prefix: NaturalInt = 0
