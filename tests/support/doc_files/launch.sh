#!/bin/bash
torchrun pretrain_gpt.py --num-layers 8 --hidden-size 1024 --num-attention-heads 16 --ffn-hidden-size 4096 --swiglu --bf16 \
  --normalization RMSNorm --disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights \
  --vocab-size 32000 --seq-length 2048 --micro-batch-size 1 --global-batch-size 256 --use-distributed-optimizer \
  --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 --lr 3e-4 --train-iters 1000
