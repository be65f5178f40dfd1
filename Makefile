# Needs only Python >= 3.11, pip and make. Environments are made and refreshed on demand.
# `make test VENV=.venv-jax-0.11.2` and so on: any tier on a version of JAX that .ci/jax has.

VENV ?= .venv
# The pins of .venv-jax-VERSION, and the Python that it is tested on
PINS = $(wildcard .ci/jax/$(VENV:.venv-jax-%=%).txt)
# Which Python to make the environment from; empty: the first that .ci/find-python finds.
PYTHON ?= $(if $(PINS),$(shell sed -n 's/^\# Python //p' $(PINS)))
# The oldest Python minor version that the environment may have.
MINOR ?= 11
# The version of JAX of test-jax: 0.9.2, 0.10.2, 0.11.2 or newest
JAX ?= newest
# More arguments: make demo ARGS='--steps 50'; make test ARGS='-k codec -x'
ARGS ?=
# Which eighth of test-full to run, 0 to 7; empty: all of it
SAMPLE ?=
# The CUDA major version of gpu-test
CUDA ?= 12

BIN := $(VENV)/bin
# Workers beyond 8 gain little and each holds a JAX.
PYTEST = $(VENV)/bin/python -m pytest -n auto --maxprocesses 8 --dist worksteal
.DEFAULT_GOAL := help
.SECONDARY:
.PHONY: help demo docs serve test test-jax test-repo test-full test-frameworks mutants gpu-test tpu-test \
  tpu-test-quick lint format types notebook figures wheel package clean

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(BIN)/python:
	@python=$$(sh .ci/find-python $(MINOR) "$(PYTHON)") && \
	echo "Making $(VENV) with $$python" && \
	{ $$python -m venv $(VENV) || { \
	  echo "No ensurepip here; trying without it" && \
	  $$python -m venv --clear --without-pip $(VENV) && \
	  $$python -m pip --python $@ install -q pip; } || { rm -rf $(VENV); exit 1; }; }

# $(VENV)/.has-test means: the extra `test` of this pyproject.toml is installed.
$(VENV)/.has-%: pyproject.toml | $(BIN)/python
	@echo "Installing optax-lowmem[$*] into $(VENV) (the first time takes a minute or two)"
	@$(BIN)/python .ci/install -q -e '.[$*]' $(PINS:%=-c %)
	@touch $@

# Tools that need neither the package nor its dependencies: the requirements of an extra alone.
.venv-tools/.has-%: pyproject.toml
	@$(MAKE) -s .venv-tools/bin/python VENV=.venv-tools
	@.venv-tools/bin/python .ci/install -q $$(.venv-tools/bin/python .ci/requirements $*)
	@touch $@

demo: $(VENV)/.has-examples  ## Train the same GPT with optax.adamw and with lowmem.flash_adamw
	$(BIN)/python examples/train_gpt.py $(ARGS)

# Tests of a tier; most of their time is XLA's, which keeps what it compiled in a folder. Python
# keeps its own compilations too, whatever the environment says: pytest rewrites each test file.
XLA_CACHE := $(CURDIR)/.xla_cache
CPU = PYTHONDONTWRITEBYTECODE= JAX_PLATFORMS=cpu JAX_COMPILATION_CACHE_DIR=$(XLA_CACHE)/$(notdir $(VENV)) \
  JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=-1

test: $(VENV)/.has-test  ## The library's behaviour; 10 minutes on 2 cores, 6 once compiled
	$(CPU) $(PYTEST) -m 'not gpu and not tpu and not repo and not full' $(ARGS)

# The public API, the contract, golden vectors, wrappers, checkpoints, shardings, and the lowering of
# kernels; `make mutants VENV=.venv-jax-0.9.2` runs the bugs that this version notices.
test-jax:  ## The tests of .ci/jax/tests, which a version of JAX can break, in .venv-jax-$(JAX)
	@$(MAKE) test VENV=.venv-jax-$(JAX) ARGS="$$(tr '\n' ' ' <.ci/jax/tests) $(ARGS)"

test-repo: $(VENV)/.has-test  ## Benchmarks, claims, docs, notebooks and examples
	$(CPU) $(PYTEST) -m repo $(ARGS)

test-full: $(VENV)/.has-test  ## Optimizers crossed with settings, slow kernels; SAMPLE=0 to 7: an eighth
	$(CPU) $(PYTEST) -m 'full and not gpu and not tpu' $(if $(SAMPLE),--sample $(SAMPLE)) $(ARGS)

# libtpu compiles for TPUs on a CPU; in an environment of its own, since it is pinned with its JAX.
.venv-tpu/.has-%: pyproject.toml
	@$(MAKE) -s .venv-tpu/bin/python VENV=.venv-tpu MINOR=12
	@.venv-tpu/bin/python .ci/install -q -e '.[$*]'
	@touch $@

TPU = JAX_PLATFORMS=cpu .venv-tpu/bin/python -m

tpu-test-quick: .venv-tpu/.has-tpu-test  ## Some steps compiled for TPUs that are not here, by libtpu
	$(TPU) pytest -n 2 --dist worksteal -m 'tpu and not full' $(ARGS)

tpu-test: .venv-tpu/.has-tpu-test  ## The steps of docs/results/tpu.md compiled for TPUs, and recorded
	$(TPU) pytest -n 2 --dist worksteal -m tpu $(ARGS)
	$(TPU) benchmarks.run tpu --record

# Training loops of other frameworks, each with its versions in an environment of its own.
FRAMEWORKS := easydel equinox kauldron keras levanter maxtext qwix tunix

.venv-fw-%/.ready: tests/integrations/%.txt pyproject.toml
	@$(MAKE) -s .venv-fw-$*/bin/python VENV=.venv-fw-$* MINOR=12
	@.venv-fw-$*/bin/python .ci/install -q -r $< -e .
	@touch $@

test-frameworks: $(FRAMEWORKS:%=.venv-fw-%/.ready)  ## Other frameworks' training loops (FRAMEWORKS=tunix: one)
	$(foreach name,$(FRAMEWORKS),PYTHONPATH=. .venv-fw-$(name)/bin/python tests/integrations/on_$(name).py $(ARGS) &&) true

mutants: $(VENV)/.has-test  ## Bugs of tests/mutants, which tests of `make test` must catch; 7 minutes
	$(CPU) $(BIN)/python -m tests.mutants.run $(ARGS)

gpu-test: $(VENV)/.has-test  ## The GPU tests, on a machine that has one (CUDA=12 or 13)
	$(BIN)/python .ci/install -q -e '.[gpu]' 'jax[cuda$(CUDA)]'
	$(BIN)/python -m pytest -m gpu $(ARGS)

lint: .venv-tools/.has-lint  ## Check style and formatting
	.venv-tools/bin/ruff check .
	.venv-tools/bin/ruff format --check .

format: .venv-tools/.has-lint  ## Mend what ruff can mend
	.venv-tools/bin/ruff check --fix .
	.venv-tools/bin/ruff format .

docs: .venv-tools/.has-docs  ## Build the site into site/, strictly
	NO_MKDOCS_2_WARNING=1 .venv-tools/bin/python -m mkdocs build --strict --clean

serve: .venv-tools/.has-docs  ## Show the site while editing, on port 8000
	.venv-tools/bin/python -m mkdocs serve

types: .venv-tools/.has-types $(VENV)/.has-test  ## Check types
	.venv-tools/bin/mypy --python-executable $(BIN)/python

notebook: $(VENV)/.has-notebooks  ## Run the notebooks alone, at full size, and store what they show
	$(BIN)/python -m tools.notebooks $(ARGS)

figures: $(VENV)/.has-examples  ## Draw the pictures of docs/ from the records
	$(BIN)/python -m benchmarks.figures $(ARGS)

wheel: $(BIN)/python  ## Build dist/*.whl
	rm -rf dist
	$(BIN)/python -m pip wheel -q --no-deps --wheel-dir dist .

package: .venv-tools/.has-package  ## Build and check what an index would get: dist/*.whl, *.tar.gz
	rm -rf dist
	.venv-tools/bin/python -m build -q
	.venv-tools/bin/python -m twine check --strict dist/*

clean:  ## Remove environments, builds and caches
	rm -rf .venv .venv-jax-* .venv-tools .venv-tpu .venv-uv .venv-wheel
	rm -rf .venv-fw-* .xla_cache build dist site
	rm -rf .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
