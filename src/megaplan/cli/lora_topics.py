"""`megaplan explain lora`: effects of adapters on a frozen model on the estimate."""

LORA: dict[str, tuple[str, ...]] = {
    "lora": (
        "The section lora freezes the model and adds A [rank, in] and B [out, rank] to its linears: x W^T + alpha / rank x A^T B^T.",
        "Parameters: frozen shards in lora.dtype (precision.params by default) instead of precision.master; adapters in precision.master. "
        "Both are gathered.",
        "With lora.base (nf4 or int8) weights of linears are rows of bytes: codes, a magnitude of every lora.base_block columns, and with "
        "lora.double_quant a mean and a step. They are sharded and gathered in this form; each product dequantises one matrix, in "
        "forward and in backward.",
        "Gradients, their reduction and the optimizer's state: of the adapters alone, by AdamW.",
        "Activations: a frozen linear keeps nothing; an adapted one keeps its input and x A^T. Norms, activation functions and "
        "attention save the same tensors.",
        "Time: no weight gradients of frozen parameters, so 4 FLOPs per parameter and token instead of 6.",
        "Not supported with multi-token prediction, an indexer or precision.recipe (MP726), nor under other hosts than megarun.",
    )
}
"""Topic to paragraphs."""
