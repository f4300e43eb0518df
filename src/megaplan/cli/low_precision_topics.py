"""`megaplan explain fp8`: how a low-precision recipe changes memory, and why."""

from megaplan.low_precision import GENERATIONS, Recipe

SIDE = 4096


def _bytes(name: str) -> str:
    """Bytes per element of a weight's copies and of a saved input, on the generations that have the recipe."""
    found = []
    for generation in (one for one in ("hopper", "blackwell") if one in GENERATIONS[name]):
        recipe = Recipe(name, generation)  # type: ignore[arg-type]  # a key of GENERATIONS
        copies, kept = (size / SIDE**2 for size in (recipe.both_bytes(SIDE, SIDE, weight=True), recipe.columnwise_bytes(SIDE, SIDE)))
        found.append(f"{generation} {copies:.4g} and {kept:.4g}")
    return f"{name}: {', '.join(found)}."


_COMMON = (
    "Linears multiply in 8 or 4 bits; activations between them keep 16 bits, so half of the estimate may be too low or too high.",
    "Grows: without precision.recipe.param_gather each 16-bit weight has copies for the step (workspace): one for the forward, and, before "
    "Blackwell or with scales of blocks, one for the backward. Delayed scaling has histories of maxima. In backward each product "
    "copies its output's gradient.",
    "Shrinks: an input that only a linear keeps (activations, and routing for experts' rows); with param_gather the weights themselves.",
    "Banks of experts: megarun keeps rows that arrived from other ranks in 8 bits, each expert's filled up to a multiple of 16; on one "
    "rank tokens stay in 16 bits, which the router keeps anyway. A copy of all matrices of a bank is allocated while one product runs.",
    "Unchanged: master weights, the optimizer's state and main gradients; norms and activation functions; without recipe.attention and "
    "recipe.head the attention core and the output head.",
    "Bytes per element of a weight's copies and of a saved input, with scales:",
)
LOW_PRECISION: dict[str, tuple[str, ...]] = {
    "fp8": (*_COMMON, *(_bytes(name) for name in GENERATIONS if name.startswith("fp8"))),
    "mxfp8": (*_COMMON, _bytes("mxfp8"), "Rows and columns of weights divide by 32; experts' rows are padded to 32."),
    "nvfp4": (
        *_COMMON,
        _bytes("nvfp4"),
        "Two elements per byte, a scale for 16 of them and one for the tensor; experts' rows are padded to 32.",
    ),
}
"""Topic to paragraphs."""
