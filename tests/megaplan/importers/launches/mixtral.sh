#!/bin/bash
GPUS_PER_NODE=8
NNODES=${SLURM_NNODES:-"4"}
WORLD_SIZE=$(($GPUS_PER_NODE*$NNODES))
TOKENIZER_MODEL=${2:-/models/mixtral-8x7b/tokenizer.model}

MOE_ARGS=(
    --num-experts 8
    --moe-router-topk 2
    --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 1e-2
    --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall
)
LOGGING_ARGS=(
    --log-interval 1 \
    --save-interval 10000 \
    --tensorboard-dir "${CHECKPOINT_PATH}/tensorboard" \
    --no-load-optim
)
if [ -n "${WANDB_API_KEY}" ]; then
    LOGGING_ARGS+=(
        --wandb-project ${WANDB_PROJECT:-"moe"}
    )
fi
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes $NNODES --node_rank ${RANK:-"0"} pretrain_gpt.py \
    --use-mcore-models --disable-bias-linear --seq-length 4096 --max-position-embeddings 32768 --num-layers 32 \
    --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --init-method-std 0.01 \
    --attention-dropout 0.0 --hidden-dropout 0.0 --normalization RMSNorm --position-embedding-type rope --swiglu \
    --untie-embeddings-and-output-weights --group-query-attention --num-query-groups 8 \
    --no-masked-softmax-fusion --no-position-embedding --rotary-base 1000000 \
    "${MOE_ARGS[@]}" --tokenizer-type Llama2Tokenizer --tokenizer-model ${TOKENIZER_MODEL} --data-path $3 \
    --micro-batch-size 1 --global-batch-size 256 --lr 1e-4 --lr-decay-style cosine --min-lr 1.0e-5 --bf16 \
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 --expert-model-parallel-size 8 \
    --use-distributed-optimizer --sequence-parallel ${LOGGING_ARGS[@]}
