#!/bin/bash
# A choice of sizes, and one long string of options.
SCALE="8B" # or "800M"
case "${SCALE}" in
    "800M")
        TP=1
        PATTERN="M-M-M*-M-M-M-M*-"
        HIDDEN=1024
        ;;
    "8B" | "9B")
        TP=4
        PATTERN="M-M-M-M*-M-M-M-M*-M-M-M-"
        HIDDEN=4096
        ;;
    *)
        echo "unknown size"; exit 1
        ;;
esac
options=" \
       --tensor-model-parallel-size ${TP} \
       --sequence-parallel \
       --pipeline-model-parallel-size 1 \
       --use-distributed-optimizer \
       --untie-embeddings-and-output-weights \
       --position-embedding-type none \
       --hybrid-layer-pattern ${PATTERN} \
       --hidden-size ${HIDDEN} --num-attention-heads 32 --group-query-attention --num-query-groups 8 \
       --seq-length 4096 --max-position-embeddings 4096 \
       --train-samples 73242188 --lr-warmup-samples 50000 \
       --vocab-size 256000 --tokenizer-type GPTSentencePieceTokenizer --tokenizer-model ${TOKENIZER_PATH} \
       --micro-batch-size 4 --global-batch-size 8 --lr 2.5e-4 --min-lr 2.5e-5 --lr-decay-style cosine \
       --attention-dropout 0.0 --hidden-dropout 0.0 --disable-bias-linear --normalization RMSNorm --bf16 \
       --spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec \
       --no-create-attention-mask-in-dataloader"

torchrun --nproc_per_node 8 ../../pretrain_hybrid.py ${options}
