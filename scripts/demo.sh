#!/usr/bin/env bash
# The whole job on real input: estimate two public-size models, cut the flagship, diff two plans, then train a small hybrid from its plan
# on this machine: once undisturbed, once killed midway and resumed under another plan. The losses are one curve: runs/demo/curve.svg.
#   make demo            STEPS=200 make demo
set -euo pipefail
cd "$(dirname "$0")/.."
out=runs/demo
steps=${STEPS:-32}
save_every=$((steps / 8 > 2 ? steps / 8 : 2)) # the kill comes between two saves: what was made since the last one is made again
kill_step=$((steps / 2 + save_every / 2))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
total=$(date +%s)

part() { printf '\n\033[1m== %s\033[0m\n' "$1" | if [ -t 1 ] && [ -z "${NO_COLOR:-}" ]; then cat; else sed 's/\x1b\[[0-9;]*m//g'; fi; began=$(date +%s); }
done_in() { echo "-- $1: $(($(date +%s) - began)) s"; }
run() { echo "\$ $*"; "$@"; }

part "install"
make --no-print-directory .venv/ready
export PATH="$PWD/.venv/bin:$PATH"
done_in install
rm -rf "$out" && mkdir -p "$out"

part "estimate: what will each GPU hold?"
run megaplan estimate plans/llama-3.1-8b.yaml
run megaplan estimate plans/mixtral-8x7b.yaml
run megaplan estimate plans/nam56r-8xh200.yaml
done_in estimate

part "split: where do we cut?"
run megaplan split plans/nam56r-8xh200.yaml -o "$out/nam56r.json"
done_in split

part "diff: what changes against equal stages?"
run megaplan diff plans/nam56r-8xh200-equal.json "$out/nam56r.json" || [ $? -eq 1 ] # 1: they differ
done_in diff

part "data: the C++ headers inside the installed torch, as tokens"
headers=$(python -c 'import importlib.util, pathlib; print(pathlib.Path(importlib.util.find_spec("torch").origin).parent / "include")')
run megarun data tokenize "$headers" -o "$out/headers.tokens" --vocab-size 2048 --limit-bytes 8000000
run megarun data inspect "$out/headers.tokens"
done_in data

part "train: one process, which nothing interrupts"
run megaplan split plans/tiny-hybrid.yaml -o "$out/one.json"
run megarun train "$out/one.json" --data "$out/headers.tokens" --out "$out/one" --steps "$steps"
done_in train

part "kill: the same model on 2 pipeline stages × 2 data shards; all its processes are killed midway"
run megaplan split plans/tiny-hybrid.yaml --set mesh.pp=2 --set mesh.dp_shard=2 --set schedule.num_microbatches=2 -o "$out/pp2-dp2.json"
run python scripts/demo_kill.py "$out/broken" "$kill_step" \
  torchrun --standalone --nproc-per-node 4 -m megarun train "$out/pp2-dp2.json" --data "$out/headers.tokens" --out "$out/broken" --steps "$steps" --save-every "$save_every"
run megarun checkpoint list "$out/broken"
done_in kill

part "resume: from its last checkpoint, as 2 tensor shards × 2 pipeline stages"
run megaplan split plans/tiny-hybrid.yaml --set mesh.tp=2 --set mesh.pp=2 -o "$out/tp2-pp2.json"
run torchrun --standalone --nproc-per-node 4 -m megarun train "$out/tp2-pp2.json" --data "$out/headers.tokens" --out "$out/broken" --steps "$steps" --save-every "$save_every"
done_in resume

part "result"
python scripts/demo_result.py "$out"
echo "-- make demo: $(($(date +%s) - total)) s"
