#!/bin/bash
#SBATCH --job-name=gpt
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8

export NCCL_IB_SL=1
DIR=$(pwd)
DATETIME=`date +'%y-%m-%d'`
MODEL="--num-layers 20 --hidden-size 1536 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048"
OPTIONS="${MODEL} --micro-batch-size 4 --global-batch-size 512 --bf16 --tensor-model-parallel-size 2 \
    --recompute-activations --use-flash-attn --use-distributed-optimizer \
    --save ${DIR}/checkpoints --logging-level 40 --use-persistent-ckpt-worker"
CMD="cd ${DIR}; python -u ${DIR}/pretrain_gpt.py ${OPTIONS}"

srun -l --container-image "image:latest" --output=${DIR}/logs/%x_${DATETIME}.log bash -x -c "${CMD}"
