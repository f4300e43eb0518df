# Two commands matter: `make demo` and `make test`. Each makes its own .venv with everything it needs.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
GPU_PYTHON ?= $(if $(wildcard $(READY)),$(BIN)/python,python3)
export OMP_NUM_THREADS ?= 1
timed = @start=$$(date +%s); ( $(2) ) || exit 1; echo "$(1): $$(( $$(date +%s) - start )) s"

.PHONY: measured runs rl demo demo-picture test test-all test-browser test-s3 check test-planner test-kernels test-runtime test-jobs test-random test-wheel test-torch-2.11 test-upstream test-gpu gpu gpu-bundle plans docs docs-site faults kills recoveries fuzz mutants parity-random accuracy accuracy-random accuracy-megatron accuracy-maxtext accuracy-reports accuracy-unseen accuracy-torchtitan recipes-fit clean

demo: ## estimate, split, diff and train, end to end
	@scripts/demo.sh

demo-picture: demo ## the README's picture, from this machine's demo
	cp runs/demo/curve.svg docs/demo.svg

test: check test-planner test-kernels test-runtime ## the README's test command

test-all: test test-jobs test-wheel test-random ## exhaustive sweeps, the wheel with torch, and the oldest torch
	$(BIN)/pytest tests -m slow
	scripts/test_wheel.sh run
	scripts/test_torch_2_11.sh

test-torch-2.11: ## the runtime and the kernels under torch 2.11 and triton 3.6
	scripts/test_torch_2_11.sh

test-gpu: ## the kernel checks, compiled, on a GPU, in JOBS processes; a line a test in runs/test-gpu.jsonl; make test-gpu DEVICE=cpu: with the interpreter
	$(if $(filter cpu,$(DEVICE)),TRITON_INTERPRET=1) CUBLAS_WORKSPACE_CONFIG=:4096:8 $(GPU_PYTHON) -m pytest tests/kernels/interpreted --device $(or $(DEVICE),cuda) -n $(or $(JOBS),12) --dist worksteal -m "not slow" --lines runs/test-gpu.jsonl

gpu: ## everything that needs a GPU, ten minutes of it, in runs/gpu; make gpu SECONDS=600 OUT=DIR RESUME=DIR ONLY=checks,times,train,memory; ONLY=tune: launch options of kernels
	$(GPU_PYTHON) benchmarks/gpu/run.py --seconds $(or $(SECONDS),600) $(if $(OUT),--out $(OUT)) $(if $(RESUME),--resume $(RESUME)) $(if $(ONLY),--only $(ONLY))

gpu-bundle: $(READY) ## project and wheels in dist/gpu, for a machine with a GPU, torch and no network
	$(BIN)/python scripts/gpu_bundle.py

test-upstream: ## the operations beside implementations of others, and imported models beside transformers
	scripts/test_upstream.sh

test-s3: $(READY) ## checkpoints in an S3 server on this machine, in an environment of its own
	$(call timed,S3 tests,scripts/test_s3.sh)

test-browser: $(READY) ## the report page in a headless Chromium, in an environment of its own
	$(call timed,browser tests,scripts/test_browser.sh)

$(READY): pyproject.toml $(wildcard locks/*.txt) scripts/install.sh
	$(call timed,install,scripts/install.sh $(VENV))
	@touch $@

check: $(READY) ## static checks
	$(call timed,static checks,$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/lint-imports && $(BIN)/python scripts/requirements_table.py --check && { $(BIN)/mypy & $(BIN)/pytest tests/static && wait $$!; })

test-planner: $(READY)
	$(call timed,planner tests,$(BIN)/pytest tests/megaplan tests/oracle -m "not slow and not jobs and not random_seeds" -n 2)

test-kernels: $(READY)
	$(call timed,kernel tests,$(BIN)/pytest tests/kernels -m "not slow and not jobs" -n 2 --maxschedchunk=1)

test-runtime: $(READY)
	$(call timed,runtime tests,$(BIN)/pytest tests/megarun -m "not slow and not random_seeds and not jobs" -n 2 --dist loadfile)

test-jobs: $(READY) ## whole jobs that are started, killed, resumed or compiled, layouts trained in several processes, kernels compiled for sm_90, recorded launch scripts, commands of the docs, and toys made from the recipes
	$(call timed,compiled kernels,$(BIN)/pytest tests/kernels -m "jobs and not slow" -n 2 --maxschedchunk=1)
	$(call timed,whole jobs,$(BIN)/pytest tests/megarun tests/megaplan -m "jobs and not slow" -n 2 --dist loadfile)

test-random: $(READY) ## 14 random plans traced and 4 random layouts trained, of fixed seeds
	$(call timed,random plans,$(BIN)/pytest tests/megarun/trace/test_random_plans.py tests/megaplan/random_plans/test_schema_coverage.py -m "random_seeds and not slow" -n 2)
	$(call timed,random layouts,$(BIN)/pytest tests/megarun/parity/test_random_layouts.py -m "random_seeds and not slow" -n 2)

test-wheel: $(READY) ## megaplan's part again, from an installed wheel, without torch
	$(call timed,wheel tests,scripts/test_wheel.sh)

plans: $(READY) ## write the committed plans anew
	@for spec in plans/*.yaml; do $(BIN)/megaplan split $$spec -o $${spec%.yaml}.json; done

docs: $(READY) ## the generated pages
	$(BIN)/python scripts/requirements_table.py
	$(BIN)/python scripts/kernels_page.py
	$(BIN)/python scripts/megatron_page.py
	$(BIN)/python scripts/errors_page.py
	$(BIN)/python scripts/architecture_picture.py

docs-site: $(READY) ## all pages as a site in site/, links checked; needs the extra `docs`, which it installs
	$(call timed,docs site,$(BIN)/python -m pip install -qq --disable-pip-version-check --require-hashes -r locks/docs.txt && NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet)

faults: $(READY) ## break a small run in every way: docs/reference/faults.md; make faults ONLY=SIGSTOP only some, and no page; FUSE=1 on a FUSE server
	PYTHONPATH=src:kernels $(if $(FUSE),"$$(scripts/storage_env.sh)",$(BIN)/python) scripts/faults_table.py $(if $(ONLY),--only "$(ONLY)") $(if $(FUSE),--fuse)

kills: $(READY) ## kill -9 at random times in every layout and storage; make kills SEED=0 COUNT=200 FIRST=0 WRITE=1
	scripts/kills.sh --seed $(or $(SEED),0) --count $(or $(COUNT),200) --first $(or $(FIRST),0) $(if $(WRITE),--write)

recoveries: $(READY) ## lose processes and nodes of jobs with --memory-copies; make recoveries SEED=0 ROUNDS=1 WRITE=1
	$(BIN)/python scripts/recoveries.py --seed $(or $(SEED),0) --rounds $(or $(ROUNDS),1) $(if $(WRITE),--write)

fuzz: $(READY) ## mutated files, options and command lines; make fuzz SEED=1 COUNT=10000 LINES=10000 FILES=DIR
	$(BIN)/python scripts/fuzz.py --count $(or $(COUNT),2000) --seed $(or $(SEED),0) --lines $(or $(LINES),2000) $(if $(FILES),--files $(FILES))

parity-random: $(READY) ## train random layouts of random small models beside one process; make parity-random SEED=7 COUNT=100
	$(BIN)/python scripts/parity_random.py --seed $(or $(SEED),0) --count $(or $(COUNT),40)

mutants: $(READY) ## break megaplan in SAMPLE places, one at a time: which tests notice; make mutants SAMPLE=100 SEED=0 WRITE=1
	$(BIN)/python scripts/mutants.py --sample $(or $(SAMPLE),100) --seed $(or $(SEED),0) $(if $(LIMIT),--seconds $(LIMIT)) $(if $(WRITE),--write)

clean:
	rm -rf $(VENV) .venv-wheel .venv-torch-2.11 .venv-upstream .venv-browser .venv-s3 dist runs site

accuracy: $(READY) ## trace the whole matrix: docs/reference/accuracy.md; make accuracy STALE=1 only what has another estimate now
	$(BIN)/python benchmarks/accuracy/run.py $(if $(STALE),--stale)

accuracy-random: $(READY) ## trace random plans and shrink what fails; make accuracy-random SEED=7 COUNT=100 JOBS=2 WRITE=1, or SPEC=FILE
	$(BIN)/python benchmarks/random_plans/run.py --seed $(or $(SEED),0) --count $(or $(COUNT),60) --jobs $(or $(JOBS),2) $(if $(SPEC),--spec $(SPEC)) $(if $(WRITE),--write)

recipes-fit: $(READY) ## which published recipes fit by the estimate, of FILE=recipes.json: docs/reference/recipes-fit.md
	$(BIN)/python benchmarks/recipes_fit.py $(FILE) --page

accuracy-torchtitan: $(READY) ## estimate torchtitan's published runs: docs/reference/accuracy-torchtitan.md
	$(BIN)/python benchmarks/accuracy_torchtitan/run.py

accuracy-maxtext: $(READY) ## estimate MaxText's published runs on TPUs: docs/reference/maxtext.md
	$(BIN)/python benchmarks/accuracy_maxtext/run.py

accuracy-megatron: $(READY) ## replay Megatron-Core's published measurements: docs/reference/accuracy-megatron.md
	$(BIN)/python benchmarks/accuracy_megatron/run.py

runs: $(READY) ## published training runs as megaplan run predicts them: docs/reference/runs.md
	$(BIN)/python benchmarks/runs/run.py
	$(BIN)/python benchmarks/runs/scaling.py

rl: $(READY) ## published post-training as megaplan rl predicts it: docs/reference/rl.md
	$(BIN)/python benchmarks/rl/run.py

accuracy-unseen: $(READY) ## estimate runs of other people that nothing was tuned to: docs/reference/unseen-runs.md, and the interval `others`
	$(BIN)/python benchmarks/unseen/run.py

accuracy-reports: $(READY) ## estimate what others measured under Megatron-Core: docs/reference/public-reports.md
	$(BIN)/python benchmarks/accuracy_megatron/reports.py

measured: $(READY) ## what GPUs measured beside estimate, model and counted floors: docs/reference/measured.md
	$(BIN)/python benchmarks/gpu/measured/page.py
