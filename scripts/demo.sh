#!/usr/bin/env bash
# The whole job on real input: estimate two public-size models, cut the flagship, diff two plans, then train a small hybrid from its plan
# on this machine: two pipeline stages, two data shards, one process, the same losses.
#   make demo            STEPS=200 make demo
set -euo pipefail
cd "$(dirname "$0")/.."
out=runs/demo
steps=${STEPS:-60}
compare_steps=${COMPARE_STEPS:-20}
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

part "train: the same plan family on 2 pipeline stages, 2 data shards, 1 process"
for plan in tiny-hybrid tiny-hybrid-pp2 tiny-hybrid-dp2; do
  run megaplan split "plans/$plan.yaml" -o "$out/$plan.json"
done
run torchrun --standalone --nproc-per-node 2 -m megarun train "$out/tiny-hybrid-pp2.json" --data "$out/headers.tokens" --out "$out/pp2" --steps "$steps"
run torchrun --standalone --nproc-per-node 2 -m megarun train "$out/tiny-hybrid-dp2.json" --data "$out/headers.tokens" --out "$out/dp2" --steps "$compare_steps"
run megarun train "$out/tiny-hybrid.json" --data "$out/headers.tokens" --out "$out/one" --steps "$compare_steps"
done_in train

part "result"
python scripts/demo_table.py "$out"
echo "-- make demo: $(($(date +%s) - total)) s"
