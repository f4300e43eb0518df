#!/bin/bash
# Defaults in braces, conditions over strings, switches quoted together with their values.
CHECKPOINT_PATH=${1:-"checkpoints/run"}
TOKENIZER=${2:-"MOCK"}
mkdir -p "$(dirname "$CHECKPOINT_PATH")"

NODES=${SLURM_NNODES:-1}
TP=${TP:-2}
DTYPE="fp8"
SEQ=8192

ARGS=(
    --use-mcore-models
    --num-layers 16 --hidden-size 2048 --ffn-hidden-size 8192
    --num-attention-heads 32 --group-query-attention --num-query-groups 8 --kv-channels 64
    --seq-length $SEQ --max-position-embeddings $((SEQ * 2))
    --position-embedding-type rope --rotary-base 500000 --rotary-percent 1.0
    --attention-dropout 0.0 --hidden-dropout 0.0
    --swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights
)
ARGS+=(
    --micro-batch-size 1 --global-batch-size 128 --bf16 --grad-reduce-in-bf16
    --cross-entropy-loss-fusion --calculate-per-token-loss --manual-gc --empty-unused-memory-level 1
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --tensor-model-parallel-size $TP --sequence-parallel --attention-backend fused
)
DTYPE_ARGS=()
if [[ "$DTYPE" == "fp8" ]]; then
    DTYPE_ARGS+=(
        "--fp8-format hybrid"
        "--fp8-amax-history-len 1024"
        "--fp8-param-gather"
    )
elif [[ "$DTYPE" == "fp16" ]]; then
    DTYPE_ARGS+=("--fp16")
fi
if [[ "$TOKENIZER" == "MOCK" ]] || [[ -z "$TOKENIZER" ]]; then
    ARGS+=("--mock-data" "--tokenizer-type NullTokenizer" "--vocab-size 128256" "--split '99,1,0'")
else
    ARGS+=("--tokenizer-type HuggingFaceTokenizer" "--tokenizer-model $TOKENIZER")
fi
if [ ! -f "pretrain_gpt.py" ]; then
    echo "run this in the root of the repository"
    exit 1
fi
torchrun --nproc_per_node 8 --nnodes "$NODES" \
    "pretrain_gpt.py" \
    ${ARGS[@]} ${DTYPE_ARGS[@]} \
    --save "$CHECKPOINT_PATH" --profile --profile-step-start 4

set +x
