"""Facts of rotary embedding, and of the keys and values that MLA expands."""

from megakernels.facts import FixedRatios, KernelPass, KindShare, PlainPass, PlainPasses, Work

TURNED = (KindShare("rope", launches=2),)
ROPE = FixedRatios(
    KernelPass(launches=2, kinds=TURNED),
    KernelPass(launches=2, kinds=TURNED),
    PlainPasses(PlainPass(870, launches=22), PlainPass(880, launches=24)),
)
MLA_KV = FixedRatios(
    KernelPass(kinds=(KindShare("mla_kv"),)),
    KernelPass(132, 2, kinds=(KindShare("mla_kv", launches=2),)),
    PlainPasses(PlainPass(130, launches=13), PlainPass(180, launches=14)),
)


def rope(width: int, itemsize: int) -> Work:
    """Rotation of `width` elements: read and written once forward, once backward.

    Source: counting operands, arXiv:2104.09864, equation 34.
    """
    return Work(moved_forward=2 * width * itemsize, moved_input=2 * width * itemsize)


def mla_kv(heads: int, nope: int, rotated: int, value: int, itemsize: int) -> Work:
    """The up-projected k_nope | v and the one rotated key, rewritten as per-head k and v; backward takes the same way back."""
    moved = (heads * (nope + value) + rotated + heads * (nope + rotated + value)) * itemsize
    return Work(moved_forward=moved, moved_input=moved)
