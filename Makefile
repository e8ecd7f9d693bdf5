PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TEST_ARGS ?= -n auto
# What scores, and the libraries that tests compare with, without the torchvision they ask for: one built for another
# torch than the one here would keep transformers from importing.
SCORERS := open_clip_torch
ORACLES := torchmetrics lightning-utilities torch-fidelity
# The HPSv2 authors' package pins a test runner and a protobuf of years ago, so it and what it really imports get an
# environment of their own, with a torchvision that fits its torch.
HPSV2_VENV ?= .venv-hpsv2

.PHONY: help demo install test test-hpsv2 check docs train-shapes train-head bench drills clean

help: ## List these targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'

$(VENV)/.run: pyproject.toml constraints.txt
	@echo "Installing into $(VENV); this takes a minute or more, mostly for torch."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps $(SCORERS)
	touch $@

$(VENV)/.dev: $(VENV)/.run
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps $(ORACLES)
	touch $@

install: $(VENV)/.run ## Install specbench into .venv

demo: $(VENV)/.run ## Install, then compare decoders on the embedded model: a table and a picture
	$(BIN)/specbench demo

test: $(VENV)/.dev ## Install, then run the tests
	$(BIN)/python -m pytest $(TEST_ARGS)

$(HPSV2_VENV)/.run: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(HPSV2_VENV)
	$(HPSV2_VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable . \
		pytest torchvision clint requests open_clip_torch
	$(HPSV2_VENV)/bin/python -m pip install --quiet --constraint constraints.txt --no-deps hpsv2 $(ORACLES)
	touch $@

test-hpsv2: $(HPSV2_VENV)/.run ## Compare HPSv2 with its authors' package, installed into .venv-hpsv2
	$(HPSV2_VENV)/bin/python -m pytest -rs tests/metrics/test_per_image.py

check: $(VENV)/.dev ## Lint, formatting, and generated parts of the README
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest tests/project/test_readme.py

docs: $(VENV)/.dev ## Refresh the generated parts of the README
	$(BIN)/python .ci/refresh_readme.py

train-shapes: $(VENV)/.run ## Train the embedded model again (hours on a CPU; continues where it stopped)
	$(BIN)/python -m specbench.training.shapes

train-head: $(VENV)/.run ## Train the embedded model's draft head again and measure it (minutes; continues where it stopped)
	$(BIN)/specbench train-head --model shapes --images 640 --epochs 12 --out eagle-training
	cp eagle-training/config.json eagle-training/model.safetensors specbench/models/shapes/weights/eagle/
	cp eagle-training/loss.jsonl results/eagle-training/
	$(BIN)/specbench check-head --model shapes --json > results/eagle-training/tv_by_depth.json

bench: $(VENV)/.run ## Measure specbench itself; raw numbers go to results/speed
	$(BIN)/python dev/speed/bench.py
	$(BIN)/python dev/speed/plot.py

drills: $(VENV)/.dev ## Kill runs 200 times and more, and feed 10,000 hostile inputs; figures go to results/drills
	$(BIN)/python dev/drills/kills.py driver --kills 70 --seconds 3600
	$(BIN)/python dev/drills/kills.py worker --kills 70 --seconds 3600
	$(BIN)/python dev/drills/kills.py pool-driver --kills 60 --seconds 3600
	$(BIN)/python dev/drills/kills.py ray-worker --kills 12 --seconds 3600
	$(BIN)/python dev/drills/kills.py ray-node --kills 2 --seconds 3600
	$(BIN)/python dev/drills/kills.py report
	$(BIN)/python dev/drills/fuzz.py

clean: ## Remove .venv and caches, never results
	rm -rf $(VENV) $(HPSV2_VENV) .pytest_cache .ruff_cache .hypothesis build dist
