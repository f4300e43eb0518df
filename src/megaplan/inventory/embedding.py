"""Parameters at both ends of the stack: token embedding, head, final norm."""

from megaplan.families.attention_residuals import depth_tensors
from megaplan.families.residual import StreamNorm, norm_tensors
from megaplan.families.streams import last_tensors
from megaplan.inventory.makers import replicated
from megaplan.inventory.tensors import Block, Group, Init, Outside, Owner, ParamTensor, make_block
from megaplan.spec.models import HeadLayer, Model


def vocabulary_block(
    family: str, vocab_size: int, hidden_size: int, *, vocab_parallel: bool, bias: bool = False, positions: int | None = None
) -> Block:
    """The token embedding or the head, `[vocab, h]`: replicated (R-16), or sharded over the vocabulary with `mesh.vocab_parallel`.

    Learned positions, `[positions, h]`, belong to the token embedding and are replicated.
    """
    owner, tp_dim = (Owner.TENSOR_PARALLEL, 0) if vocab_parallel else (Owner.REPLICATED, None)
    tensors = [ParamTensor("weight", (vocab_size, hidden_size), owner, Group.OTHER, Init.NORMAL, tp_dim)]
    if bias:
        tensors.append(ParamTensor("bias", (vocab_size,), owner, Group.OTHER, Init.ZEROS, tp_dim))
    if positions is not None:
        tensors.append(ParamTensor("positions", (positions, hidden_size), Owner.REPLICATED, Group.OTHER, Init.NORMAL))
    return make_block(family, tuple(tensors))


def head_layer_tensors(layer: HeadLayer, hidden_size: int, kind: StreamNorm, logits: int) -> tuple[ParamTensor, ...]:
    """Parameters of the layer between the last norm and the head; `logits` is the vocabulary."""
    product = replicated("layer.weight", (hidden_size, hidden_size), Group.MATRIX)
    biases = (("layer.bias", hidden_size, layer.bias), ("logits.bias", logits, layer.logits_bias))
    given = [replicated(name, (width,), Group.OTHER, Init.ZEROS) for name, width, is_given in biases if is_given]
    return product, *given, *norm_tensors(kind, hidden_size, prefix="layer_norm.")


def final_norm_block(model: Model, layer: tuple[ParamTensor, ...] = ()) -> Block:
    """The norm before the head, the sum of streams or of earlier values that the norm reads, and the layer after the norm."""
    hidden = model.hidden_size
    read = () if model.streams is None else last_tensors(model.streams, hidden)
    read = read if model.attention_residuals is None else depth_tensors(hidden)
    return make_block(Outside.FINAL_NORM, (*read, *norm_tensors(model.norm, hidden, prefix=""), *layer))
