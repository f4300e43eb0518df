"""Bytes that a model chunk keeps for one microbatch, and the peaks of its forward and backward above that."""

from collections.abc import Iterator

from megaplan.hosts.megatron.pattern import EMBEDDING, ENDS, LOSS, MTP, operators
from megaplan.hosts.megatron.run import MegatronRun


def recomputed_groups(run: MegatronRun, own: str) -> tuple[tuple[str, ...], str]:
    """Groups of a chunk's operators that full recompute runs again, and the operators that it does not recompute.

    Under the block method each of the first layers of a chunk is a group; under the uniform method all operators are in groups of several
    layers.
    """
    layer = run.spec.host.block_layers
    size = (run.spec.host.recompute_num_layers or 0) * layer
    whole, step = (own[:size], layer) if run.spec.host.recompute_method == "block" else (own if size else "", size or 1)
    return tuple(whole[start : start + step] for start in range(0, len(whole), step)), own[len(whole) :]


def chunk(run: MegatronRun, letters: str, *, recomputes: bool = True) -> int:
    """Bytes that one model chunk saves for one microbatch, without logits and loss.

    `recomputes` is true to include full recompute, if the run has it.
    """
    host, total = run.spec.host, 0
    if host.offloaded_layers:
        ends = "".join([letter for letter in letters if letter in ENDS])
        letters = operators(letters)[host.offloaded_layers * run.spec.host.block_layers :] + ends
    if host.recompute_num_layers and recomputes:  # the input alone of each group of operators
        groups, rest = recomputed_groups(run, operators(letters))
        total += run.checkpoint_bytes * len(groups)
        letters = rest + "".join([letter for letter in letters if letter in ENDS])
    return total + sum([kept for _, kept in _parts(run, letters)])


def forward_excess(run: MegatronRun, letters: str) -> int:
    """Peak bytes of a chunk's forward minus the bytes that it saves; negative if bytes at the end of the forward dominate."""
    parts = list(_parts(run, letters))
    left = most = -sum([kept for _, kept in parts])
    for letter, kept in parts:
        left += kept
        if letter is not None:
            most = max(most, left + (0 if run.is_graphed(letter) else run.operator(letter).forward))
    return most


def backward_excess(run: MegatronRun, letters: str) -> int:
    """Peak bytes of a chunk's backward minus the bytes that it has saved."""
    parts = list(_parts(run, letters))
    left, most = 0, -sum([kept for _, kept in parts])
    for letter, kept in reversed(parts):
        if letter is not None:
            operator = run.operator(letter)
            most = max(most, left + operator.stream_gradient + (0 if run.is_graphed(letter) else operator.backward))
        left -= kept
    return most


def graph_bytes(run: MegatronRun, chunks: tuple[str, ...]) -> int:
    """Scratch of the pool that all graphs of layers share: one runs at a time."""
    letters = {letter for letters in chunks for letter in letters + run.ahead if run.is_graphed(letter)}
    found = [run.operator(letter) for letter in letters]
    return max([max(each.forward, each.stream_gradient + each.backward) for each in found], default=0)


def _parts(run: MegatronRun, letters: str) -> Iterator[tuple[str | None, int]]:
    """Operators and ends of the model in the order of forward, each with the bytes that it keeps; the ends have no letter."""
    stream = run.boundary_bytes
    for letter in letters:
        if letter == EMBEDDING:
            yield None, run.at.stream_tokens * run.at.dims.hidden * bool(run.spec.host.hidden_dropout)
        elif letter == LOSS:
            yield None, 2 * stream  # the final norm's input and output
        elif letter == MTP:
            yield None, 8 * stream
            for one in run.ahead:
                yield one, run.operator(one).kept
        else:
            yield letter, run.operator(letter).kept
