# Verbs only; every recipe is a line or two that a user could type.
PYTHON ?= python3
PY := .venv/bin/python
PROBE ?= probe
# the mark of a whole install, named after what it was made from: pyproject.toml, and PYTHON where somebody chose one
CHOSEN := $(if $(filter-out file,$(origin PYTHON)),$(PYTHON))
READY := .venv/.ready-$(shell { cat pyproject.toml; printf %s "$(CHOSEN)"; } | sha256sum | cut -c 1-16)
comma := ,
TORCH := torch==2.13.0+cpu
TORCH_INDEX := https://download.pytorch.org/whl/cpu
TORCH_PY := .venv-torch/bin/python
TORCH_READY := $(READY:.venv/.ready-%=.venv-torch/.ready-%)
unexport PYTHONDONTWRITEBYTECODE # the second start of anything here reads bytecode

.DEFAULT_GOAL := help
.PHONY: no-python help clean all-of-it thorough thorough-units thorough-torch thorough-engine thorough-launch torch-tests packing-tests model-tests placing-tests engine-tests build-tests image-tests service-tests loopback-tests page-tests images engine probe docs check types unit unit-probes unit-others unit-thorough test bench-audit bench-build bench-digest bench-doctor bench-fit bench-front bench-images bench-launch bench-placement bench-prune bench-probes bench-scan bench-service bench-train bench-trouble bench-watch keep-results readme-figures mutants bench-layout bench-gpucode bench-amd bench-observe bench-sbom

help: ## what can be done here
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

# $(call alone,FOLDER,COMMANDS): unless another make has done it meanwhile, and never two at a time; the mark comes last
alone = @mkdir -p $(1); exec 9<$(1); flock 9; test -e $@ -a -x $(1)/bin/python || { $(2) && touch $@; }
# $(call venv,FOLDER): anew if a different Python made it; the mark of a whole install goes before installing; pip of
# 2023, which comes with Python 3.11, takes longer for all packages than a new one does with its own install
venv = rm -f $(1)/.ready-* && \
  $(PYTHON) -m venv $$(test "$$($(1)/bin/python -V 2>&1)" = "$$($(PYTHON) -V 2>&1)" || echo --clear) $(1) && \
  { $(call pip,$(1)/bin/python,'pip>=26') 2>/dev/null || true; }
# without bytecode: most modules of torch, transformers and others are never imported; those that are get it then
pip = $(1) -m pip install -q --disable-pip-version-check --no-compile $(2)

$(READY): $(if $(shell test -x $(PY) || echo no),no-python)
	$(call alone,.venv,$(call venv,.venv) && $(call pip,$(PY),-e '.[dev$(comma)docs]'))

no-python: # .venv isn't there, or the Python that made it is gone

images: $(READY) ## build, prove and audit the images (VARIANTS="cpu rocm" GPU_TARGETS=gfx1100)
	@.venv/bin/weir build $(VARIANTS) $(if $(GPU_TARGETS),--targets $(GPU_TARGETS))

engine: $(READY) ## install and start a Docker engine if none answers (Debian, Ubuntu; as root)
	@.venv/bin/weir engine

probe: $(READY) ## what memory placement costs on this machine (PROBE=probe-rocm, probe-cuda, probe-wsl)
	docker compose run --rm $(PROBE)
	@.venv/bin/weir probe show "$$(ls -t reports/probes/*.json | head -n 1)"

# the CPU build from where this machine's pip looks, else from the index of PyTorch itself
$(TORCH_READY): $(if $(shell test -x $(TORCH_PY) || echo no),no-python)
	$(call alone,.venv-torch,$(call venv,.venv-torch) && \
	  { $(call pip,$(TORCH_PY),'$(TORCH)') || $(call pip,$(TORCH_PY),'$(TORCH)' --index-url $(TORCH_INDEX)); } && \
	  mkdir -p .venv && flock .venv $(call pip,$(TORCH_PY),-e '.[torch-tests]'))

# $(call group,PYTHON,ARGUMENTS): the tests of this goal, what failed in the last lines; in `make test` what computes
# has what is left of the processors by images, by tests that wait for these, and by those that mostly wait
group = @$(if $(filter all-of-it,$(MAKECMDGOALS)),$(if $(filter placing-tests model-tests packing-tests page-tests unit-thorough,$@),nice)) \
  $(1) tests/groups.py $@ $(2)

torch-tests: packing-tests model-tests placing-tests ## the tests that need torch, on the CPU and in Triton's interpreter

packing-tests: $(TORCH_READY)
	$(call group,$(TORCH_PY),tests/torch/packing tests/amd)

# the service, scans and fits with torch: about as long as placement
MODELS := $(addprefix tests/torch/test_,fit_predictions.py fit_trials.py fit_without_rules.py loading_memory.py \
  scan_onnx.py scan_torch.py scenario_ways.py step_time.py training.py tutorial_fine_tune.py service_captured.py service_compiled.py service_model.py)

model-tests: $(TORCH_READY)
	$(call group,$(TORCH_PY),$(MODELS))

placing-tests: $(TORCH_READY)
	$(call group,$(TORCH_PY),tests/torch --ignore=tests/torch/packing $(addprefix --ignore=,$(MODELS)))

docs: $(READY) ## the documentation as a site, to read without a network: .weir/site/index.html
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs -q build
	@.venv/bin/weir completion man > .weir/site/weir.1
	@echo "site: .weir/site/index.html"

check: $(READY) ## lint, types and unit tests, in seconds
	@$(PY) -m ruff format --check -q . && $(PY) -m ruff check -q .
	@$(MAKE) --no-print-directory --output-sync $(if $(filter all-of-it,$(MAKECMDGOALS)),,-j 3) types unit

types: $(READY)
	@$(PY) -m mypy

unit: unit-probes unit-others

# two processes that share nothing: xdist hands each test over by itself, which takes longer than most tests;
# plugins that no unit test uses take a third of pytest's own time for each test
UNIT := -p no:logging tests/unit
UNITS := unit-probes unit-others unit-thorough thorough-units
$(UNITS): export PYTEST_DISABLE_PLUGIN_AUTOLOAD := 1

# their files lie in memory where that can be: a thousand of them are synced
$(UNITS): export PYTEST_DEBUG_TEMPROOT := $(wildcard /dev/shm)

# so that both take as long
WITH_PROBES := $(addprefix tests/unit/,contracts fits launch)

unit-probes: $(READY)
	$(call group,$(PY),$(UNIT)/probes $(WITH_PROBES) -m "not thorough")

unit-others: $(READY)
	$(call group,$(PY),$(UNIT) $(addprefix --ignore=,tests/unit/probes $(WITH_PROBES)) -m "not thorough")

# simulations, fuzzing, limits at full size and what takes 0.06 s with its cases, which `check` leaves out
unit-thorough: $(READY)
	$(call group,$(PY),$(UNIT) -m thorough)

# `make test` draws from the largest grids (each card with each model and task, each kind of module placed in
# each way) and from random examples, and prunes small images: all cases and the whole ROCm image take longer
# than everything else, and seldom find more
thorough: thorough-units thorough-torch thorough-engine thorough-launch ## all cases that `make test` draws from, the real images pruned and rebuilt

thorough-units thorough-torch thorough-engine: export ALL_CASES := 1

thorough-units: $(READY)
	$(call group,$(PY),$(UNIT))

thorough-torch: $(TORCH_READY)
	$(call group,$(TORCH_PY),tests/torch)

# a real Slurm, with few preemptions
thorough-launch: $(TORCH_READY)
	@$(TORCH_PY) tests/bench/bench_launch.py --quick

thorough-engine: images
	$(call group,$(PY),$(WHOLE) tests/docker/test_build_tags.py)

# the longest first
GROUPS := build-tests image-tests service-tests loopback-tests placing-tests model-tests packing-tests page-tests unit-thorough

test: ## everything that needs no GPU, seven things at a time; makes the images meanwhile
	@rm -rf .weir/tests
	@$(MAKE) --no-print-directory --output-sync --keep-going -j 7 all-of-it; \
	  $(PYTHON) tests/groups.py unit-probes unit-others $(GROUPS) --outcome

# images are what most wait for, so they are begun first: they wait for a mirror, a disk and the engine themselves;
# torch is installed meanwhile
all-of-it: images $(TORCH_READY) $(GROUPS)
ifneq ($(filter all-of-it,$(MAKECMDGOALS)),)
$(GROUPS): check
build-tests image-tests service-tests: images
endif

clean: ## remove what was made here: caches, reports, environments (images stay: weir clean --images)
	@if $(PY) -c "import buildtool.cli.clean" 2>/dev/null; then .venv/bin/weir clean --caches --reports; \
	  else echo ".weir and reports/ stay: no .venv has the command that removes them"; fi
	@rm -rf .venv .venv-torch .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info
	@find buildtool probes images docs tests -name __pycache__ -prune -exec rm -rf {} +

# three processes with one engine: some start what `make images` made and build what others don't,
SERVED := $(addprefix tests/docker/test_,compose.py docs_run.py doctor.py service_extras.py tls.py)

# some make images by `weir build`, from stand-ins for torch, and the rest prune, push, audit and observe
BUILT := $(addprefix tests/docker/test_,build_sources.py build_tags.py build_trouble.py installed.py)

WHOLE := tests/docker/test_whole_images.py

engine-tests: build-tests image-tests service-tests ## the tests that need the engine

build-tests: $(READY)
	$(call group,$(PY),$(BUILT))

image-tests: $(READY)
	$(call group,$(PY),tests/docker $(addprefix --ignore=,$(BUILT) $(SERVED) $(WHOLE)))

service-tests: $(READY)
	$(call group,$(PY),$(SERVED))

# mostly waiting: servers and clients over real sockets
loopback-tests: $(READY)
	$(call group,$(PY),tests/loopback)

page-tests: docs
	$(call group,$(PY),tests/browser)

bench-amd: $(TORCH_READY) ## our kernels' machine code for AMD's GPUs on an emulated machine: bits, planted faults, counts
	@$(TORCH_PY) tests/bench/bench_amd.py

bench-audit: images ## the audit on the real images, on 45 GB, on hostile ones; needs 15 GB of disk
	@$(PY) tests/bench/bench_audit.py

bench-prune: $(READY) ## the pruner on Debian's ROCm libraries, judged by their own runtime and LLVM (as root)
	@$(PY) tests/bench/bench_prune.py

bench-gpucode: $(READY) ## GPU code in every section: 30 foreign wheels and PyTorch's CUDA stack; downloads 14 GB, needs 10 GB of disk
	@$(PY) tests/bench/bench_gpucode.py

bench-build: images ## our build of `cpu` against two others, rebuilds, and the start of a container
	@$(PY) tests/bench/bench_build.py

bench-digest: $(READY) ## the same inputs under other umasks, modes, owners and in other places: one digest? (as root)
	@$(PY) tests/bench/bench_digest.py

bench-doctor: $(READY) ## the doctor's verdicts on constructed hosts, its linter on broken, good and damaged files
	@$(PY) tests/bench/bench_doctor.py

bench-fit: $(TORCH_READY) ## weir probe fit against brute force, and what it predicts, on the CPU
	@$(TORCH_PY) tests/bench/bench_fit.py

bench-front: $(READY) ## the TLS front beside half headers, half handshakes and slow bodies; needs nginx, no image
	@$(PY) tests/bench/bench_front.py

bench-images: $(READY) ## `make images` from nothing, timed; empties the build cache of the engine
	@$(PY) tests/bench/bench_images.py

bench-launch: $(TORCH_READY) ## weir launch on a Slurm of three nodes here: preemptions, failures, templates (installs slurm-wlm, as root)
	@$(TORCH_PY) tests/bench/bench_launch.py

bench-layout: images ## images without an engine: one digest everywhere, read by others, pushed, killed, as .sqsh (as root)
	@$(PY) tests/bench/bench_layout.py

bench-observe: $(READY) ## observed runs, slim images, the least privilege, on the CPU image (as root; needs strace)
	@$(PY) tests/bench/bench_observe.py

bench-sbom: images ## bills of materials and signatures of the `cpu` image: schemas, files, wheels' libraries, tamperings; downloads 0.6 GB
	@$(PY) tests/bench/bench_sbom.py

bench-trouble: $(READY) ## builds interrupted 50 times, in every step; what is left, and whether the next run works (as root)
	@$(PY) tests/bench/bench_trouble.py

bench-placement: $(TORCH_READY) ## packing, plans, loading and random placed modules, as far as a CPU can show them
	@$(TORCH_PY) tests/bench/bench_placement.py

bench-scan: $(TORCH_READY) ## throughput scans: against a bare loop, their errors, planted knees
	@$(TORCH_PY) tests/bench/bench_scan.py

bench-probes: $(READY) ## what a probe run keeps when workers misbehave and SIGKILL falls
	@$(PY) tests/bench/bench_probes_trust.py

bench-service: images ## the service in the CPU image: batching, overhead, overload, hostile callers, 100 stops
	@.venv/bin/weir build cpu-extras && $(PY) tests/bench/bench_service.py

bench-train: $(TORCH_READY) ## weir probe epochs against a bare loop, planted causes, failures, resumed runs, on the CPU
	@$(TORCH_PY) tests/bench/bench_train.py

bench-watch: $(READY) ## what watching costs, how even its intervals are, a vanishing card, energy
	@$(PY) tests/bench/bench_watch.py

mutants: $(READY) ## what share of planted faults the unit tests notice, by a sample (MUTANTS="--sample 100 --only 'probes/fit/*'")
	@$(PY) -c "import mutmut" 2>/dev/null || $(call pip,$(PY),-e '.[mutants]')
	@$(PY) tests/bench/bench_mutants.py $(MUTANTS)

keep-results: $(READY) ## copy a bench's last results from reports/ to docs/results (BENCH=build), and show them in the docs
	@$(PY) tests/bench/figures.py --keep "$(BENCH)"

readme-figures: $(READY) ## README's and the docs' figures from docs/results
	@$(PY) tests/bench/figures.py
