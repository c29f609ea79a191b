# `make` lists the targets. Everything runs in .venv, which the first target that needs it makes.
.DEFAULT_GOAL := help
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --quiet --disable-pip-version-check
# A process for each core, a file's tests in one of them: its compiled programs are shared. Files
# come in the order of tests/conftest.py, the longest first: none is left for the end, when the
# other processes have nothing to do.
WORKERS := -n logical --maxprocesses 16 --dist loadfile --no-loadscope-reorder
CONSTRAINTS := constraints.txt
INSTALLED := $(VENV)/.installed
INSTALLED_GPU := $(VENV)/.installed-gpu

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: install
install: $(INSTALLED) ## Make .venv and install jaxpar with its tests' tools, for the CPU

.PHONY: install-gpu
install-gpu: $(INSTALLED_GPU) ## The same, with JAX for NVIDIA GPUs (CUDA 13)

.PHONY: quickstart
quickstart: install ## Train a tiny model on this machine, after installing
	@$(PY) -m jaxpar.train quickstart

.PHONY: test
test: lint types pytest ## All that CI runs: lint, types, CPU tests (CHANGED=1: only of what changed)

.PHONY: pytest
pytest: install
	@echo "==> Tests, on 16 simulated CPU devices"
ifdef CHANGED
	@files=$$($(PY) -m tests.changed) && if [ -z "$$files" ]; then echo "none depends on a change"; \
	else env -u MAKEFLAGS $(PY) -m pytest $(WORKERS) $$files; fi
else
	@env -u MAKEFLAGS $(PY) -m pytest $(WORKERS)
endif

.PHONY: test-all
test-all: lint types ## The same, slow tests included
	@echo "==> Tests and slow tests, on 16 simulated CPU devices"
	@$(PY) -m pytest $(WORKERS) -m "not gpu"

.PHONY: test-waits
test-waits: install ## The tests that wait for something, 20 times, with every core kept busy
	@echo "==> Tests that wait, 20 times, beside a spinning process for each core"
	@env -u MAKEFLAGS $(PY) -m tests.repeat_waits --rounds 20

.PHONY: soak
soak: install ## Kills, and resumes in every mesh and number of processes (SOAK_JOBS=8: at a time)
	@echo "==> Soak: processes killed and resumed, on simulated CPU devices"
	@$(PY) -m tests.e2e.soak

.PHONY: test-gpu
test-gpu: install-gpu ## Tests that need an NVIDIA GPU
	@echo "==> GPU tests: those of one GPU, eight workers on each"
	@$(PY) -m pytest -m "gpu and not several_gpus" --maxschedchunk 1 \
	  -n $$((8 * $$(nvidia-smi --list-gpus | wc -l)))
	@echo "==> GPU tests: those that take all GPUs"
	@$(PY) -m pytest -m "gpu and several_gpus"

.PHONY: lint
lint: install ## Check style and formatting
	@echo "==> Style"
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(VENV)/bin/hadolint Dockerfile

.PHONY: format
format: install ## Format the code and fix what can be fixed
	@$(PY) -m ruff check --fix-only .
	@$(PY) -m ruff format .

.PHONY: types
types: install ## Check types
	@echo "==> Types"
	@$(PY) -m mypy

.PHONY: docs
docs: install ## Build the documentation as a site, into build/site
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet
	@echo "==> build/site/index.html"

.PHONY: docs-serve
docs-serve: install ## Show it at http://localhost:8000, with search
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs serve

.PHONY: package
package: install ## Build a wheel and an sdist in dist/, and check them
	@$(PIP) install --no-compile twine
	@$(PY) -m hatchling build --clean
	@$(PY) -m twine check --strict dist/*

.PHONY: constraints
constraints: | venv ## Install the newest versions, and write them to constraints.txt
	@$(PIP) install --no-compile --upgrade --upgrade-strategy eager -e '.[test]'
	@{ echo "# Versions of the packages that make installs. Renew: make constraints"; \
	  $(PIP) freeze --exclude-editable | grep -vE '^(jax-cuda|nvidia-[^m])'; } > $(CONSTRAINTS)

.PHONY: clean
clean: ## Remove .venv and every cache; runs/ and data/ stay
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A .venv without a working interpreter, whatever its stamps say, is made and filled again.
ifneq ($(shell $(PY) -c "print('works')" 2>/dev/null),works)
.PHONY: $(INSTALLED) $(INSTALLED_GPU)
endif

.PHONY: venv
venv:
	@$(PY) -c "" 2>/dev/null || { \
	  python=$$(sh scripts/find_python.sh) && \
	  echo "==> Making $(VENV) with $$("$$python" -V), $$python" && \
	  "$$python" -m venv --clear $(VENV); }

# Python compiles a module when it is first imported; pip would compile all 14,000, one by one.
$(INSTALLED): pyproject.toml $(CONSTRAINTS) | venv
	@echo "==> Installing jaxpar and its dependencies (about 2 GB; a minute or two the first time)"
	@$(PIP) install --no-compile -c $(CONSTRAINTS) -e '.[test]'
	@$(PY) -c "import jax, sys; print('    Python', sys.version.split()[0], 'with JAX', jax.__version__)"
	@touch $@

$(INSTALLED_GPU): pyproject.toml $(CONSTRAINTS) | venv
	@echo "==> Installing jaxpar and its dependencies with CUDA 13 (several GB the first time)"
	@$(PIP) install --no-compile -c $(CONSTRAINTS) -e '.[test,cuda13]'
	@$(PY) -c "import jax, sys; print('    Python', sys.version.split()[0], 'with JAX', jax.__version__, 'on', jax.devices())"
	@touch $(INSTALLED) $@
