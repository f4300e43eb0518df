"""Launches in the forms that scripts have: each is recorded, whatever starts it."""

import pytest
from recorded_launches import RUN, TRAIN, Record, batch

FORMS = {
    "exec": f"exec {RUN} 4",
    "exec of a path": f"exec /opt/conda/bin/{RUN} 4 > /logs/train.log 2>&1",
    "absolute python": f"/usr/bin/python -u -m torch.distributed.run --nproc_per_node 8 {TRAIN} 4",
    "python of a variable": f'PYTHON=/opt/env/bin/python3; "$PYTHON" -m torch.distributed.launch {TRAIN} 4',
    "launcher of a variable": f'LAUNCHER="torchrun --nproc_per_node 8"; $LAUNCHER {TRAIN} 4',
    "path that a script extends": f"export PATH=/opt/conda/bin:$PATH; hash -r; {RUN} 4",
    "shell of a shell": f"bash -x -c '{RUN} 4'",
    "sh": f"sh -c '{RUN} 4'",
    "login shell": f'bash -lc "{RUN} 4"',
    "eval": f"CMD='{RUN} 4'; eval $CMD",
    "srun of a shell": f'srun -N 2 --ntasks-per-node=1 --container-image img:latest bash -c "cd /x; {RUN} 4"',
    "srun of the program": f"srun -l --output=/logs/%j.log python -u {TRAIN} 4",
    "mpirun": f"mpirun -np 8 --allow-run-as-root -x NCCL_DEBUG=INFO -hostfile hosts python {TRAIN} 4",
    "deepspeed": f"deepspeed --num_nodes 2 --num_gpus 8 {TRAIN} 4",
    "deepspeed of a shell": f'deepspeed --num_gpus 8 --no_python /usr/bin/bash -c "A=1 python -u {TRAIN} 4"',
    "folder of a queued job": f'cd "${{PBS_O_WORKDIR}}" || exit 1; B=${{SLURM_SUBMIT_DIR:+4}}; {RUN} $B',
    "accelerate": f"accelerate launch --num_processes 8 {TRAIN} 4",
    "nohup and timeout": f"nohup timeout 3600 env A=1 numactl -N 0 {RUN} 4 > logs/out.txt 2>&1 &",
    "ssh": f"for HOST in a b; do ssh $HOST 'cd /w && {RUN} 4' & done; wait",
    "docker": f"docker run --gpus all -v /data:/data image:tag bash -c '{RUN} 4'",
    "nsys": f"nsys profile -o out --trace cuda,nvtx {RUN} 4",
    "ray": f"ray job submit --address http://head:8265 -- {RUN.replace('torchrun --nproc_per_node 8', 'python')} 4",
    "sbatch of a here-document": f"sbatch <<EOF\n#!/bin/bash\n#SBATCH --nodes=2\nsrun {RUN} 4\nEOF",
    "sbatch of a written file": f"cat > job.sub <<'EOF'\n#!/bin/bash\n#SBATCH -N 2\nsrun {RUN} $1\nEOF\nsbatch --export=ALL,A=1 job.sub 4",
    "sbatch --wrap": f'sbatch -N 2 --wrap="srun {RUN} 4"',
    "log of a missing folder": f"{RUN} 4 > logs/a/b.log 2>&1",
    "log elsewhere": f"set -e; mkdir -p /lustre/ckpt; cd /lustre/ckpt; {RUN} 4 2>&1 | tee -a /lustre/ckpt/train.log",
    "output of the whole script": f"exec > >(tee /logs/all.log) 2>&1\n{RUN} 4",
    "group with a log": f"mkdir -p out; {{ echo start; {RUN} 4; }} > out/log",
    "array": f"A=(--bf16 --micro-batch-size 4); {RUN.removesuffix(' --micro-batch-size')} ${{A[@]}}",
    "keyed arrays by name": "declare -A OF=([micro-batch-size]=4); A=(); for K in ${!OF[@]}; do A+=(--$K ${OF[$K]}); done\n"
    f'declare -n R=A; {RUN.removesuffix(" --micro-batch-size")} "${{R[@]}}"',
    "function named by a sign": f":() {{ B=5; }}\nB=4\n{RUN} $B",
    "function": f"go() {{ local B=$1; shift; {RUN} $B $*; }}\ngo 4 --swiglu",
    "here-document into a variable": f"B=4; read -r -d '' A <<EOF || true\n--swiglu --micro-batch-size $B\nEOF\n{RUN} 1 $A",
    "printf into a variable": f"printf -v B '%d' 4; {RUN} $B",
    "conda and modules": f"set -e; source /opt/conda/etc/profile.d/conda.sh; conda activate x; module load cuda; ulimit -n 65536; {RUN} 4",
    "options of set": f"set -euxo pipefail; trap 'echo bad' ERR; {RUN} 4",
    "nodes of a job": f'mapfile -t HOSTS < <(scontrol show hostnames "$SLURM_JOB_NODELIST"); {RUN} ${{#HOSTS[@]}}',
    "GPUs of the machine": f"N=$(nvidia-smi --query-gpu=name --format=csv,noheader | wc -l); M=$(nvidia-smi -L|wc -l); {RUN} $((N+M-12))",
    "sum of tools": f"B=$(echo '2 2' | awk '{{print $1*$2}}'); C=$(expr $B - 4 || true); {RUN} $((B + C))",
    "file that is read back": f"echo 4 > /tmp/of_this_script; cd /tmp; {RUN} $(cat of_this_script)",
    "machine's questions": f"[[ -x $(command -v git) ]] && git pull; pip install -e .; curl -s http://x/y | bash; {RUN} 4",
    "standard input": f"read -r -p 'go? ' ANSWER; cat > /dev/null; python -; {RUN} ${{ANSWER:-4}}",
    "rank variables": f'[ "${{RANK:-0}}" -eq 0 ] && B=4; torchrun --nnodes ${{WORLD_SIZE:-2}} --node_rank ${{RANK:-0}} {TRAIN} $B',
}


@pytest.mark.parametrize("name", FORMS)
def test_a_launch_is_recorded(name: str, recorded: Record) -> None:
    more = {"SLURM_NNODES": 4, "SLURM_JOB_NODELIST": "n[1-4]"} if name == "nodes of a job" else {}
    found = recorded(FORMS[name], **more)
    assert batch(found) == 4, found
