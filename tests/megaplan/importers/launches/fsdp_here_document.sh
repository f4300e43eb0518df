#!/bin/bash
# Arguments collected in an array that is written anew, then a batch script in a here-document.
USE_FSDP=${USE_FSDP:-1}
STRATEGY=${STRATEGY:-"optim_grads_params"}
MEGATRON=${MEGATRON:-"/opt/megatron"}
ARGS=(
    --num-layers 8 --hidden-size 2048 --num-attention-heads 16 --ffn-hidden-size 8192 --seq-length 4096
    --max-position-embeddings 4096 --position-embedding-type rope --swiglu --normalization LayerNorm --disable-bias-linear
    --micro-batch-size 1 --global-batch-size 64 --bf16 --use-distributed-optimizer --vocab-size 32000
    --attention-dropout 0.0 --hidden-dropout 0.0 --no-check-for-nan-in-loss-and-grad
)
if [ "${USE_FSDP}" = 1 ]; then
    unset CUDA_DEVICE_MAX_CONNECTIONS
    ARGS=(
        "${ARGS[@]}"
        --use-megatron-fsdp
        --data-parallel-sharding-strategy ${STRATEGY}
        --no-gradient-accumulation-fusion
        --ckpt-format fsdp_dtensor
        --megatron-fsdp-grad-comm-dtype fp32 --megatron-fsdp-main-grads-dtype fp32 --megatron-fsdp-main-params-dtype fp32
    )
fi
TRAIN="
cd ${MEGATRON};
git rev-parse HEAD;
export PYTHONPATH=${MEGATRON}:${PYTHONPATH};
python ${MEGATRON}/pretrain_gpt.py ${ARGS[@]}"

sbatch <<EOF
#!/bin/bash
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
srun --mpi=pmix bash -c "${TRAIN}" 2>&1 | tee logs/\${SLURM_JOB_ID}.log
EOF
