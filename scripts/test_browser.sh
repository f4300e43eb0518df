#!/usr/bin/env bash
# The report page in a headless Chromium, in its own environment: Debian's Chromium, driven by Playwright from PyPI.
set -euo pipefail
cd "$(dirname "$0")/.."
env=.venv-browser
if [ -z "${CHROMIUM:-}" ] && ! command -v chromium >/dev/null && ! command -v chromium-headless-shell >/dev/null; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium >/dev/null || true
  fi
  if ! command -v chromium >/dev/null; then
    echo "test-browser needs Chromium: apt-get install chromium, or CHROMIUM=/path/to/it" >&2
    [ -n "${WITHOUT_CHROMIUM:-}" ] || exit 1  # WITHOUT_CHROMIUM=skip: where no package can be had
    echo "browser tests were not run" >&2
    exit 0
  fi
fi
[ -x "$env/bin/pytest" ] || { "${PYTHON:-python3}" -m venv "$env" && "$env/bin/python" -m pip install -qq --disable-pip-version-check --require-hashes -r locks/browser.txt; }
MEGAPLAN_REPORTS="$(mktemp -d)"
export MEGAPLAN_REPORTS
trap 'rm -rf "$MEGAPLAN_REPORTS"' EXIT
cp plans/tiny-hybrid-pp2.yaml "$MEGAPLAN_REPORTS/<img src=x onerror=alert(1)>.yaml"
report() {  # NAME SOURCE [OPTION ...]
  .venv/bin/python -m megaplan report "$2" -o "$MEGAPLAN_REPORTS/$1.html" "${@:3}" >/dev/null 2>&1
  .venv/bin/python -m megaplan estimate "$2" --json "${@:3}" >"$MEGAPLAN_REPORTS/$1.json" || [ $? = 1 ]
}
run=(--tokens 2T --price 2.5)
report plan plans/nam56r-8xh200.json
.venv/bin/python -m megaplan report plans/nam56r-8xh200.json "${run[@]}" -o "$MEGAPLAN_REPORTS/plan.html" >/dev/null
.venv/bin/python -m megaplan run plans/nam56r-8xh200.json "${run[@]}" --json >"$MEGAPLAN_REPORTS/run.json"
report post-training plans/llama-3.1-8b-rl.yaml
.venv/bin/python -m megaplan rl plans/llama-3.1-8b-rl.yaml --json >"$MEGAPLAN_REPORTS/rl.json"
report one-rank plans/tiny-hybrid.yaml
report megatron plans/llama-3.1-8b.yaml --set host.name=megatron
report hostile "$MEGAPLAN_REPORTS/<img src=x onerror=alert(1)>.yaml"
.venv/bin/python -m megaplan search plans/tiny-hybrid-pp2.yaml --devices 4 --top 8 --json >"$MEGAPLAN_REPORTS/search.json"
.venv/bin/python -m megaplan report "$MEGAPLAN_REPORTS/search.json" -o "$MEGAPLAN_REPORTS/search.html" >/dev/null
.venv/bin/python -m megaplan split plans/nam56r-8xh200.yaml --set batch.micro_batch_size=2 -o "$MEGAPLAN_REPORTS/other-plan.json" >/dev/null 2>&1 || [ $? = 1 ]
.venv/bin/python -m megaplan report plans/nam56r-8xh200.json "$MEGAPLAN_REPORTS/other-plan.json" -o "$MEGAPLAN_REPORTS/comparison.html" >/dev/null
.venv/bin/python -m megaplan diff plans/nam56r-8xh200.json "$MEGAPLAN_REPORTS/other-plan.json" --json >"$MEGAPLAN_REPORTS/diff.json" || [ $? = 1 ]
"$env/bin/pytest" tests/browser -c /dev/null --rootdir . --confcutdir tests/browser -q -p no:cacheprovider "$@"
