"""Work that the blocks of several families have: linears, the residual addition with its norm, MLPs."""

from dataclasses import replace

from megakernels.facts import Work
from megakernels.ops.activation import facts as activation_facts
from megakernels.ops.library import linear, scaled
from megakernels.ops.rms_norm.facts import NORM, RESIDUAL_NORM, norm, residual_norm
from megaplan.blocks.work import OpWork, Workload, Works
from megaplan.scalars import GATED, DenseActivation


def linear_work(
    load: Workload,
    name: str,
    part: str,
    in_width: int,
    out_width: int,
    *,
    own_tokens: bool = False,
    closes: bool = False,
) -> OpWork:
    """A linear with the widths that this rank has."""
    return OpWork(
        name,
        part,
        linear(in_width, out_width, load.itemsize),
        weights=in_width * out_width,
        is_linear=True,
        own_tokens=own_tokens,
        closes=closes,
        in_width=in_width,
    )


def detached_linear_work(load: Workload, name: str, part: str, in_width: int, out_width: int, *, own_tokens: bool = False) -> OpWork:
    """A linear whose input gets no gradient: two products instead of three."""
    op = linear_work(load, name, part, in_width, out_width, own_tokens=own_tokens)
    return op._replace(work=replace(op.work, input_grad=0, moved_input=0))


LATE = ("attention",)
"""The operation that counts an up-projection that runs inside attention, on gathered latents."""


def gathered_work(work: Work, cp: int, *, own_gradients: bool = False) -> Work:
    """Work on the tokens of all ranks of a context group, whose forward runs again in backward.

    With `own_gradients` only the gradients of the rank's own tokens are counted.
    """
    again, back = work * cp, work if own_gradients else work * cp
    return replace(
        back,
        forward=again.forward,
        recomputed=again.forward,
        input_grad=back.input_grad + again.forward,
        moved_forward=again.moved_forward,
        moved_input=back.moved_input + again.moved_forward,
    )


def residual_work(load: Workload, part: str, width: int) -> OpWork:
    """The residual addition and the next norm, on the rank's own tokens."""
    return OpWork("norm", part, residual_norm(width, load.itemsize), RESIDUAL_NORM, own_tokens=True)


def norm_work(load: Workload, name: str, part: str, width: int, *, times: int = 1, own_tokens: bool = False) -> OpWork:
    """Work of `times` norms of a given width."""
    return OpWork(name, part, norm(width, load.itemsize) * times, NORM, own_tokens=own_tokens)


def mlp(
    load: Workload, part: str, hidden_size: int, ffn_hidden_size: int, kind: DenseActivation, prefix: str = "", *, scales_gate: bool = False
) -> Works:
    """One MLP: up (and gate for swiglu and geglu), activation, down; `tp` shards its width; `scales_gate`: the gate has a factor.

    Source: arXiv:2002.05202, equations 5 and 6.
    """
    width, gated = ffn_hidden_size // load.tp, kind in GATED
    names = ("gate_proj", "up_proj") if gated else ("up_proj",)
    work = activation_facts.activation(width, load.itemsize, gated=gated)
    return (
        *(linear_work(load, f"{prefix}{name}", part, hidden_size, width) for name in names),
        *((OpWork(f"{prefix}scale gate", part, scaled(width, load.itemsize)),) if scales_gate else ()),
        OpWork(f"{prefix}activation", part, work, activation_facts.GATED if gated else activation_facts.UNGATED),
        linear_work(load, f"{prefix}down_proj", part, width, hidden_size, closes=True),
    )


def gate_work(load: Workload, part: str, width: int, *, counts: tuple[str, ...] = ()) -> OpWork:
    """The gate of a block's output: silu or sigmoid of one operand times the other."""
    return OpWork("gate", part, activation_facts.activation(width, load.itemsize, gated=True), activation_facts.GATE, counts=counts)
