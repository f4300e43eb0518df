#!/bin/bash
# No command: a model's arguments, for another script to source.
if [ -z ${HF_MODEL} ]; then
    HF_MODEL=org/model
    TOKENIZER_MODEL=org/tokenizer
else
    TOKENIZER_MODEL=${HF_MODEL}
fi

MODEL_ARGS=" \
    --micro-batch-size 1 \
    --bf16 \
    --disable-bias-linear \
    --untie-embeddings-and-output-weights \
    --use-rotary-position-embeddings \
    --rotary-percent 0.5 \
    --no-rope-fusion \
    --normalization RMSNorm \
    --swiglu \
    --num-layers 32 \
    --hidden-size 4096 \
    --ffn-hidden-size 14336 \
    --num-attention-heads 32 \
    --group-query-attention \
    --num-query-groups 8 \
    --seq-length 4096 \
    --max-position-embeddings 8192 \
    --tokenizer-type HuggingFaceTokenizer \
    --make-vocab-size-divisible-by 1 \
    --vocab-size 128256 \
"
