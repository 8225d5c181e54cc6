# make demo   sets up, then shows the main job on a real model; no GPU is needed
# make test   sets up, then runs everything that CI runs
# make test-torch TORCH=2.15.0   runs the tests, or TESTS="tests/null tests/surface", with another torch, in .venv-torch-2.15.0
PYTHON ?= python3
TORCH_INDEX ?=
TESTS ?=
VENV   := .venv
BIN    := $(VENV)/bin
export PYTHONHASHSEED := 0
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test test-torch checks lint types layers sizes units format clean

demo: $(VENV)/.demo
	@echo '$$ tightfit estimate examples/train_gpt2.py --device "RTX 4060" --save-tape $(VENV)/gpt2.npz'
	@$(BIN)/tightfit estimate examples/train_gpt2.py --device "RTX 4060" --save-tape $(VENV)/gpt2.npz || test $$? -eq 1
	@echo
	@echo '$$ tightfit estimate $(VENV)/gpt2.npz --device "RTX 4060" --device "RTX 4080" --device "RTX 4090"'
	@$(BIN)/tightfit estimate $(VENV)/gpt2.npz --device "RTX 4060" --device "RTX 4080" --device "RTX 4090" || test $$? -eq 1
	@echo
	@echo '$$ tightfit plan examples/train_gpt2.py --device "RTX 4060"'
	@$(BIN)/tightfit plan examples/train_gpt2.py --device "RTX 4060"

test: $(VENV)/.test
	@$(MAKE) --jobs 2 checks
	@$(MAKE) units

checks: lint types layers sizes

lint:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types:
	$(BIN)/pyrefly check

layers:
	$(BIN)/lint-imports

sizes:
	$(BIN)/python tools/check_sizes.py src tests benchmarks tools

# Compiled first: the tests start a hundred processes, and where PYTHONDONTWRITEBYTECODE is set each of them would compile everything.
# What is tried by turns is drawn by the commit; without git all of it is tried.
units: COMMIT = $(shell git rev-parse HEAD 2>/dev/null)
# One thread each: there is a process of tests for every core, and threads of torch's that wait for work keep a core busy.
units:
	$(BIN)/python -m compileall -q src benchmarks
	OMP_NUM_THREADS=1 TIGHTFIT_COMMIT=$(COMMIT) $(BIN)/pytest -n logical --maxprocesses 8 --dist loadfile --no-loadscope-reorder

test-torch: .venv-torch-$(TORCH)/.test
	.venv-torch-$(TORCH)/bin/pytest -n logical --maxprocesses 8 --dist loadfile --no-loadscope-reorder $(TESTS)

# All that is pinned but torch and sympy, which torch 2.6 pins itself. The CUDA libraries are gigabytes: delete the folder afterwards, or `make clean`.
.venv-torch-%/.test: constraints.txt pyproject.toml
	$(PYTHON) -m venv $(@D)
	grep -Ev '^(torch|sympy)==' constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/pip install --quiet -c $(@D)/constraints.txt $(addprefix --extra-index-url ,$(TORCH_INDEX)) torch==$* numpy
	echo "torch==$*" >> $(@D)/constraints.txt
	$(@D)/bin/pip install --quiet -c $(@D)/constraints.txt -e ".[hf,dev,examples]"
	@touch $@

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# pip compiles one file after the other. What is for other versions of Python does not compile, and is not said.
INSTALL := $(BIN)/pip install --quiet --no-compile -c constraints.txt
COMPILE := $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true

# torch is installed by itself first, in the version of the constraints. PyPI's torch for Linux brings gigabytes of CUDA libraries; the build
# without them does for all of this: make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu
$(VENV)/.torch: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) $(addprefix --extra-index-url ,$(TORCH_INDEX)) torch numpy
	@touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	$(INSTALL) -e ".[hf]"
	@$(COMPILE)
	@touch $@

$(VENV)/.test: $(VENV)/.torch pyproject.toml
	$(INSTALL) -e ".[hf,watch,dev,examples]"
	@$(COMPILE)
	@touch $@ $(VENV)/.demo

clean:
	rm -rf $(VENV) .venv-torch-* .pytest_cache .ruff_cache .import_linter_cache
