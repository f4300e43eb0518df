#!/bin/bash
# A dense GPT of learned positions, in fp16, on four nodes.
export CUDA_DEVICE_MAX_CONNECTIONS=1

GPUS_PER_NODE=8
NUM_NODES=4
CHECKPOINTS=$1  # where to save
DATA=$2

LAUNCHER_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
    --master_addr localhost
)
MODEL_ARGS=(
    --num-layers 24
    --hidden-size 2048
    --num-attention-heads 16
    --seq-length 2048
    --max-position-embeddings 2048
    --attention-backend auto # or flash, fused, unfused
)
TRAINING_ARGS=(
    --micro-batch-size 2 --global-batch-size 256
    --train-iters 5000 --lr 6.0e-5 --min-lr 6.0e-6 --lr-decay-style cosine --lr-warmup-fraction .001
    --weight-decay 0.1 --clip-grad 1.0 --fp16 --init-method-std 0.006
    --loss-scale-window 500 --hysteresis 2
)
PARALLEL_ARGS=(
	--tensor-model-parallel-size 4
	--pipeline-model-parallel-size 2
)
DATA_ARGS=(--data-path $DATA --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt --split 949,50,1)

torchrun ${LAUNCHER_ARGS[@]} pretrain_gpt.py \
    ${MODEL_ARGS[@]} \
    ${TRAINING_ARGS[@]} \
    ${PARALLEL_ARGS[@]} \
    ${DATA_ARGS[@]} \
    --save $CHECKPOINTS --load $CHECKPOINTS --tensorboard-dir ${TENSORBOARD_DIR}
