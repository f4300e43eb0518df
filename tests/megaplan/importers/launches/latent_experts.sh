#!/bin/bash
# Latent attention, experts, a prediction module of experts, a layout, and modules from a loop.
MODULES=""
for module in mla_up_proj layernorm moe_act; do
    MODULES="${MODULES} ${module}"
done
declare -a ARGS=(
    --num-layers 16 --hidden-size 1024 --ffn-hidden-size 4096 --num-attention-heads 32 --kv-channels 128
    --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128
    --qk-layernorm --swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope
    --untie-embeddings-and-output-weights --attention-dropout 0.0 --hidden-dropout 0.0
    --seq-length 4096 --max-position-embeddings 4096 --make-vocab-size-divisible-by 3232 --vocab-size 129280
    --num-experts 32 --moe-layer-freq '([0]*3+[1]*13)' --moe-ffn-hidden-size 1024 --moe-router-topk 4
    --moe-shared-expert-intermediate-size 1024 --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4
    --moe-token-dispatcher-type alltoall --moe-grouped-gemm --moe-permute-fusion --moe-router-dtype fp32
    --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3
    --mtp-num-layers 1 --mtp-loss-scaling-factor 0.1
)
torchrun --nnodes 1 --nproc_per_node 8 pretrain_gpt.py "${ARGS[@]}" \
  --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 \
  --pipeline-model-parallel-layout "Et*3|(tt|)*6tmL" \
  --expert-model-parallel-size 4 --expert-tensor-parallel-size 1 \
  --micro-batch-size 1 --global-batch-size 32 --bf16 --use-distributed-optimizer \
  --recompute-granularity selective --recompute-modules ${MODULES}
