"""Facts of attention to keys that another layer's indexer chose: attention's kernels, masked."""

from typing import NamedTuple

from megakernels.facts import SUMS_BYTES, Pass, Passes, Work
from megakernels.ops.attention.facts import AttentionSizes
from megakernels.ops.indexed_attention.facts import num_columns


class MaskedSizes(NamedTuple):
    """Work of a mask of chosen keys, in addition to attention to the chosen keys alone.

    Attributes:
        core: The attention to the chosen keys.
    """

    core: AttentionSizes

    def kernels(self, _work: Work, _tokens: int) -> Passes | None:
        """Products with visible keys that are not chosen, which the kernels of attention compute too."""
        core = self.core
        if not core.accepted:
            return None
        rest = 2 * (core.visible() - core.visible(core.most_keys)) * core.heads
        passes = Pass(0, rest * (core.width + core.value_width), 0), Pass(0, rest * core._replace(relations=False).products(), 0)
        forward, backward = (
            done._replace(kinds=tuple(part._replace(launches=0) for part in core.kinds(done, backward=back)))
            for done, back in zip(passes, (False, True), strict=True)
        )
        return forward, backward

    def plain(self, _work: Work, _tokens: int) -> Passes:
        """Bits of a choice as flags, in place of the order of positions: words over all columns, from which a block takes its keys."""
        core, loop = self.core, self.core.loop()
        moved = SUMS_BYTES * core.batch * core.queries * num_columns(core.keys) + 9 * loop.pairs - loop.hides_bytes
        both = Pass(moved, 0, loop.blocks * (3 - loop.hides_launches), is_fp32=True)
        return both, both
