#!/bin/bash
# The script's own options, parsed by a loop; interleaved stages, Muon, full recompute by blocks.
LAYERS=16
PP=2
while [[ $# -gt 0 ]]; do
    case $1 in
        --layers) LAYERS="$2"; shift 2 ;;
        --pp) PP=$2; shift 2 ;;
        *) echo "unknown option: $1"; exit 1 ;;
    esac
done
NAME=muon-${LAYERS}
DISTRIBUTED_ARGS="--nproc_per_node 8 --nnodes 1 --master_port ${MASTER_PORT:-6000}"
python -m torch.distributed.run $DISTRIBUTED_ARGS pretrain_gpt.py \
    --num-layers $LAYERS --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 \
    --normalization RMSNorm --disable-bias-linear --position-embedding-type rope --squared-relu --qk-layernorm \
    --pipeline-model-parallel-size ${PP} --num-layers-per-virtual-pipeline-stage $(( LAYERS / PP / 2 )) \
    --optimizer muon --bf16 --micro-batch-size 1 --global-batch-size 64 --vocab-size 50257 \
    --recompute-granularity full --recompute-method block --recompute-num-layers 2 \
    --save checkpoints/${NAME%%-*} --exit-duration-in-mins 230 >logs/$NAME.log 2>&1
