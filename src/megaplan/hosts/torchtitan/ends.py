"""torchtitan's head and loss: logits, their copy in fp32, and cross entropy: plain, over a sharded vocabulary, or compiled.

Plain cross entropy keeps log-probabilities in fp32, and its backward also has the gradients of both of its halves. Over a sharded
vocabulary (loss parallel) it runs as element-wise operations: forward also has the shifted logits, backward zeros, the exponential, their
sum. Compiled, none of these exists: it reads the logits and makes their gradient.

Source: torchtitan/components/loss.py; torch/distributed/tensor/parallel/loss.py (`_log_softmax`, `_nll_loss_and_log_softmax_backward`).
"""

from functools import cache

from megaplan.blocks.ops import INPUT, OUTPUT, Dims, Op, linear
from megaplan.blocks.storages import storages
from megaplan.columns import Basis, Column
from megaplan.dtypes import DType
from megaplan.hosts.megarun.parts import BlockReplay
from megaplan.hosts.megarun.program import Replay, replay

LOGITS, LAST_BLOCK = "logits", "last_block"


def loss_part(dims: Dims, vocab_size: int, *, pipelined: bool, compiled: bool, kept_gather_bytes: int = 0) -> BlockReplay:
    """Head and loss.

    Args:
        dims: Local sizes.
        vocab_size: Rows of the head.
        pipelined: The schedule references the logits until the microbatch's backward has ended.
        compiled: torch.compile runs the loss.
        kept_gather_bytes: Gathered parameters of the last block, if they stay for its backward.
    """
    sharded = dims.tp > 1
    rows = dims.batch * dims.tokens
    shape = rows, vocab_size // dims.tp
    tensors = storages(dims.dtype, Column.ACTIVATIONS, {LOGITS: shape, INPUT: dims.residual})
    tensors |= storages(dims.dtype, Column.COMMUNICATION, {"gathered": dims.gathered})
    wide = dict.fromkeys(("wide", "log_probs", "shifted", "nll_gradient", "exponential"), shape)
    tensors |= storages(dims.stat_dtype, Column.ACTIVATIONS, {**wide, "lse": (rows,), "largest": (rows,), OUTPUT: ()})
    tensors |= {LAST_BLOCK: (kept_gather_bytes, Column.COMMUNICATION, (kept_gather_bytes,), DType.FP8, Basis.EXACT)}
    return BlockReplay(_replay(sharded, pipelined, compiled), tensors)


@cache
def _replay(sharded: bool, pipelined: bool, compiled: bool) -> Replay:
    ops = [Op("last block", (), (LAST_BLOCK,))]
    if sharded:
        ops.append(Op("gather", (INPUT,), ("gathered",)))
    head = linear("head", "gathered" if sharded else INPUT, LOGITS, "weight")
    ops.append(head._replace(keeps=(*head.keeps, LAST_BLOCK)))
    if compiled:
        kept = (LOGITS, "lse", "largest")
        ops.append(Op("cross_entropy", (LOGITS,), (OUTPUT, "lse", "largest"), keeps=kept, grads=(LOGITS,)))
    else:
        ops.append(Op("float", (LOGITS,), ("wide",), keeps=(LOGITS,) if pipelined else ()))
        made, again = (
            ((OUTPUT, "log_probs", "shifted"), ("nll_gradient", "exponential")) if sharded else ((OUTPUT, "log_probs"), ("nll_gradient",))
        )
        ops.append(Op("cross_entropy", ("wide",), made, keeps=("log_probs",), grads=("wide",), fetches=again, holds=(LOGITS,)))
    return replay(tuple(ops), starts=True, pinned=LOGITS if pipelined else None)
