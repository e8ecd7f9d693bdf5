PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# CPU results and test times are steadier with one thread per process.
TEST_ARGS ?= -n auto

.PHONY: help demo install test check docs bench train-shapes clean

help: ## List these targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'

$(VENV)/.run: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/.dev: $(VENV)/.run
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

install: $(VENV)/.run ## Install specbench into .venv

demo: $(VENV)/.run ## Install, then compare decoders on the embedded model: a table and a picture
	$(BIN)/specbench demo

test: $(VENV)/.dev ## Install, then run the tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(TEST_ARGS)

check: $(VENV)/.dev ## Lint, formatting, and generated parts of the README
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest tests/test_readme_is_current.py

docs: $(VENV)/.dev ## Refresh the generated parts of the README
	$(BIN)/python tools/refresh_readme.py

clean: ## Remove .venv and caches, never results
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build dist
