#!/usr/bin/env bash
set -euo pipefail
. ./cluster.env

launch() {
    local program=$1
    shift
    eval "torchrun --standalone --nproc-per-node=${GPUS:-4} ${program} $*"
}

base_args() {
    MODEL=(--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 --max-position-embeddings 1024)
}

base_args
PRECISION=bf16
[[ "$PRECISION" == bf16 ]] && MODEL+=(--bf16)
[ "$PRECISION" = fp16 ] && MODEL+=(--fp16)
launch pretrain_gpt.py "${MODEL[@]}" --micro-batch-size 4 --global-batch-size 32 --transformer-impl local "$@"
