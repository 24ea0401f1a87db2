# make train   set up .venv and train the sample on the CPU
# make test    set up .venv and run the tests
# make help    everything else

PYTHON ?= python3
VENV := .venv
LEGACY := .venv-legacy
NEWEST := .venv-newest
LOWEST := .venv-lowest
BIN := $(VENV)/bin
# Python compiles the files that it imports; pip would compile all of PyTorch's, half of an installation's time.
UNPINNED := --quiet --no-compile --disable-pip-version-check
PIP_FLAGS := $(UNPINNED) -c constraints.txt
# Some containers forbid Python to keep that: then every process compiles PyTorch again, and the tests start hundreds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help train test test-gpu test-slow test-forms test-legacy-runtime test-newest test-lowest coverage bench bench-scaling bench-ablation bench-families lint clean

help:
	@echo "make train                train the getting-started sample on the CPU"
	@echo "make test                 run the tests"
	@echo "make test-legacy-runtime  run a slice of them on onnxruntime-training-cpu 1.19.2"
	@echo "make test-newest          run the tests on the newest PyTorch, ONNX and ONNX Runtime that pip finds (PyTorch may be 3 GB)"
	@echo "make test-lowest          run the tests on the lowest releases that pyproject.toml promises (PyTorch is 3 GB)"
	@echo "make test-gpu             run the tests that need a CUDA device (installs onnxruntime-gpu)"
	@echo "make test-forms           run suites of whole models without the passes that serve speed, with all of them at any size, and with kernels in C"
	@echo "make test-slow            run the long suites"
	@echo "make coverage             run the public suites whole (an hour on two cores) and write docs/coverage.md"
	@echo "make bench                time train_step beside PyTorch, JAX and, after test-legacy-runtime, onnxruntime-training"
	@echo "make bench-scaling        time and memory against the number of layers and of sequences"
	@echo "make bench-ablation       time train_step without each graph pass that serves speed"
	@echo "make bench-families       time small models of many families beside PyTorch eager"
	@echo "make lint                 check style"
	@echo "make clean                remove the environments"

$(VENV)/.train: pyproject.toml constraints.txt
	@echo "setting up $(VENV) (PyTorch, ONNX, ONNX Runtime); this happens once ..."
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "orttrainer needs Python 3.11 or newer, this is " + sys.version)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install $(PIP_FLAGS) -e '.[cpu,text]'
	@touch $@

$(VENV)/.test: $(VENV)/.train
	@echo "adding what the tests need to $(VENV) ..."
	@$(BIN)/python -m pip install $(PIP_FLAGS) -e '.[cpu,text,mpi,test]'
	@$(BIN)/python -m pip install $(PIP_FLAGS) --no-deps timm  # which would bring torchvision, and that another torch
	@touch $@

train: $(VENV)/.train
	@echo "training the getting-started sample on the CPU; 'python samples/getting_started/train_ort.py --help' has the options"
	@$(BIN)/python samples/getting_started/train_ort.py $(ARGS)

test: $(VENV)/.test
	@echo "running the tests; those that need a GPU are skipped where there is none"
	@$(BIN)/python -m pytest -q -n 2 --dist loadgroup $(ARGS)

test-slow: $(VENV)/.bench  # JAX's forms of the workloads are compared, too
	@$(BIN)/python -m pytest -q -m slow $(ARGS)

FORMS := tests/test_parity.py tests/test_training_graph.py tests/test_trainer_training.py tests/test_accumulation.py tests/test_benchmarks.py

test-forms: $(VENV)/.test
	@$(BIN)/python -m pytest -q -n 2 --forms plain $(or $(ARGS),$(FORMS))
	@$(BIN)/python -m pytest -q -n 2 --forms every-size $(or $(ARGS),$(FORMS))
	@$(BIN)/python -m pytest -q -n 2 --forms native $(or $(ARGS),$(FORMS))

test-gpu: $(VENV)/.test
	@$(BIN)/python -m pip uninstall --quiet -y onnxruntime
	@$(BIN)/python -m pip install $(PIP_FLAGS) -e '.[gpu,mpi,test]'
	@$(BIN)/python -m pytest -q -m gpu $(ARGS)

$(LEGACY)/.test: pyproject.toml constraints.txt
	@echo "setting up $(LEGACY) with onnxruntime-training-cpu 1.19.2 (Python 3.12 or older) ..."
	@test -x $(LEGACY)/bin/python || $(PYTHON) -m venv $(LEGACY)
	@$(LEGACY)/bin/python -m pip install $(PIP_FLAGS) -e '.[mpi]' pytest scipy torch-optimizer transformers onnxruntime-training-cpu==1.19.2
	@touch $@

test-legacy-runtime: $(LEGACY)/.test
	@echo "running the legacy_runtime slice on onnxruntime-training-cpu 1.19.2"
	@$(LEGACY)/bin/python -m pytest -q -m "legacy_runtime and not slow" $(or $(ARGS),$(shell grep -l legacy_runtime tests/test_*.py))

# Set up anew by each call: what is newest today.
test-newest:
	@echo "setting up $(NEWEST) with the newest releases ..."
	@test -x $(NEWEST)/bin/python || $(PYTHON) -m venv $(NEWEST)
	@$(NEWEST)/bin/python -m pip install $(UNPINNED) --upgrade --upgrade-strategy eager -e '.[cpu,text,mpi,test]'
	@$(NEWEST)/bin/python -m pip install $(UNPINNED) --upgrade --no-deps timm
	@$(NEWEST)/bin/python -m pytest -q -n 2 --dist loadgroup $(ARGS)

# PyPI's PyTorch of that time has no build without CUDA: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu takes PyTorch's own.
$(LOWEST)/.test: pyproject.toml tests/lowest.py
	@echo "setting up $(LOWEST) with the lowest releases (Python 3.11 or 3.12) ..."
	@test -x $(LOWEST)/bin/python || $(PYTHON) -m venv $(LOWEST)
	@$(LOWEST)/bin/python tests/lowest.py > $(LOWEST)/constraints.txt
	@$(LOWEST)/bin/python -m pip install $(UNPINNED) -c $(LOWEST)/constraints.txt -e '.[cpu,text,mpi,test]'
	@$(LOWEST)/bin/python -m pip install $(UNPINNED) --no-deps timm
	@touch $@

test-lowest: $(LOWEST)/.test
	@$(LOWEST)/bin/python -m pytest -q -n 2 --dist loadgroup $(ARGS)

coverage: $(VENV)/.test
	@cd tests && ../$(BIN)/python -m suites $(ARGS)

$(VENV)/.bench: $(VENV)/.test
	@echo "adding JAX and matplotlib to $(VENV) ..."
	@$(BIN)/python -m pip install $(PIP_FLAGS) -e '.[cpu,bench]'
	@touch $@

bench: $(VENV)/.bench
	@$(BIN)/python benchmarks/train_step.py $(if $(wildcard $(LEGACY)/.test),--legacy-python $(LEGACY)/bin/python) $(ARGS)

bench-scaling: $(VENV)/.bench
	@$(BIN)/python benchmarks/scaling.py $(ARGS)

bench-ablation: $(VENV)/.bench
	@$(BIN)/python benchmarks/train_step.py --ablation --engines orttrainer $(ARGS)

bench-families: $(VENV)/.bench
	@$(BIN)/python benchmarks/families.py $(ARGS)

lint: $(VENV)/.test
	@$(BIN)/ruff check orttrainer samples tests benchmarks
	@$(BIN)/ruff format --check orttrainer samples tests benchmarks

clean:
	rm -rf $(VENV) $(LEGACY) $(NEWEST) $(LOWEST)
