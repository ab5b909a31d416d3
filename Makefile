# Start with `make demo` and `make test`: each needs Python and a network, and makes the environment that it runs in.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
BENCH := .venv-bench
# Builds and checks archives. It has neither torch nor the developers' tools.
PACKAGING := .venv-package
# The Python that sees the GPU. One that is not .venv's has torch, cachetools and pytest, and nothing is installed.
GPU_PYTHON ?= $(RUN)
# The torch of `make test-torch`, which makes an environment for it.
TORCH ?= 2.15.0
TORCH_VENV = .venv-torch-$(TORCH)
TORCH_RUN = $(TORCH_VENV)/bin/python
# What decides the moments and victims of `make chaos`.
SEED ?= $(shell date +%s)
# What pytest runs in test-gpu and test-torch, such as tests/groups/test_groups.py, or "-k sharded"; all of it unless given.
TESTS ?=
# Build and run-time packages alike come from these versions; a looser range would fetch another torch.
export PIP_CONSTRAINT := $(CURDIR)/.ci/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Bytecode of torch takes half of an installation: each module's is written when it is first imported.
export PIP_COMPILE := 0
unexport PYTHONDONTWRITEBYTECODE
# torch asks a name server for both ends of each connection, also of this machine's own, and waits five seconds for a
# question that is lost. Names that stand in /etc/hosts are enough here.
LOCAL := RES_OPTIONS=attempts:0
# It warns of each name that it does not find.
QUIET := $(LOCAL) TORCH_CPP_LOG_LEVEL=ERROR
# A file is one worker's, and tests/conftest.py says which come first. Three workers keep two cores busy, since tests wait
# for a quarter of the time; for those that train, two do.
BY_FILE := --dist loadfile --no-loadscope-reorder

.PHONY: demo test types tests test-long test-gpu test-torch test-launchers chaos bench bench-quick docs package release-check format clean

demo: $(VENV)/demo           ## a small GPT, trained by eight processes of this machine and checked against one
	$(QUIET) $(RUN) examples/train_gpt.py

test: $(VENV)/dev            ## style, types, doctests, and the tests that are not long
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(MAKE) --no-print-directory -j 2 types tests

types: $(VENV)/dev
	$(RUN) -m mypy

tests: $(VENV)/bytecode
	$(LOCAL) $(RUN) -m pytest -q -n 3 $(BY_FILE) -m 'not long'

test-long: $(VENV)/docs $(VENV)/examples  ## the tests that train or take long, and every example
	$(LOCAL) $(RUN) -m pytest -q -n 2 $(BY_FILE) -m long

docs: $(VENV)/docs           ## the site, in build/site: the pages, the reference from docstrings, and the notebook with its outputs
	$(QUIET) $(RUN) -m sphinx -q -W --keep-going -b html -c docs . build/site

package: $(PACKAGING)/made   ## the wheel and the source archive, in dist, checked as the package index does
	rm -rf dist
	$(PACKAGING)/bin/python -m build --outdir dist
	$(PACKAGING)/bin/python -m twine check --strict dist/*

release-check: $(PACKAGING)/made  ## the last checks before the upload of a release: versions, the changelog's date, the package
	$(PACKAGING)/bin/python -m tests.support.release
	$(MAKE) --no-print-directory package

test-gpu: $(if $(filter $(RUN),$(GPU_PYTHON)),$(VENV)/dev)  ## NCCL, and ranks that share a GPU; skipped without one
	$(LOCAL) $(GPU_PYTHON) -m tests.gpu $(TESTS)

test-torch: $(TORCH_VENV)/made  ## on another torch: make test-torch TORCH=2.15.0; 5.6 GB
	$(TORCH_RUN) -m tests.support.torch_version $(TORCH)
	$(LOCAL) PGMESH_TORCH=$(TORCH) $(TORCH_RUN) -m pytest -q -p tests.support.torch_version -n 3 $(BY_FILE) -m 'not long' $(TESTS)

test-launchers: $(VENV)/dev  ## torchrun, srun, mpirun and mpiexec themselves, from Debian's packages; needs root
	$(RUN) -m tests.launchers

chaos: $(VENV)/dev           ## ranks lost by a mesh, the models of both protocols, 500 random compositions, and promises broken one by one, for each of which a test must fail
	PGMESH_SEED=$(SEED) $(RUN) -m pytest -q -n 2 tests/connect/test_model.py tests/elastic/test_model.py
	$(LOCAL) PGMESH_SEED=$(SEED) $(RUN) -m pytest -q tests/elastic/chaos.py
	$(LOCAL) PGMESH_SEED=$(SEED) $(RUN) -m pytest -q -k releasing tests/faults/test_torch_hazards.py
	$(LOCAL) PGMESH_SEED=$(SEED) PGMESH_STARVED=4 $(RUN) -m pytest -q -n 4 tests/faults/test_faults.py tests/connect/test_faults.py
	$(QUIET) $(RUN) -m tests.parallel.random_compositions --count 500
	$(LOCAL) $(RUN) -m tests.mutations

bench: $(BENCH)/made         ## times of pgmesh, other libraries and plain torch, as ratios; six minutes
	$(QUIET) $(BENCH)/bin/python -m benchmarks $(ARGS)

bench-quick: $(BENCH)/made   ## a part of it, with fewer processes and repetitions
	$(QUIET) $(BENCH)/bin/python -m benchmarks --quick $(ARGS)

format: $(VENV)/dev
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

clean:
	rm -rf $(VENV) $(BENCH) $(PACKAGING) .venv-torch-* build dist *.egg-info .mypy_cache .ruff_cache .hypothesis

$(VENV)/made:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))' \
		|| { echo "pgmesh runs on Python 3.10 to 3.14; here is $$($(PYTHON) -V). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/demo: $(VENV)/made pyproject.toml .ci/constraints.txt
	$(RUN) -m pip install --quiet --editable '.[demo]'
	@touch $@

$(VENV)/dev: $(VENV)/made pyproject.toml .ci/constraints.txt .ci/neighbours.txt
	$(RUN) -m pip install --quiet --editable '.[dev]'
	$(RUN) -m pip install --quiet --no-deps --requirement .ci/neighbours.txt \
		|| echo "accelerate or torchtitan cannot be installed here: their tests are skipped"
	@touch $@

# Imports what the tests import, so that not each worker compiles it: 25 seconds without bytecode, 8 with it.
$(VENV)/bytecode: $(VENV)/dev
	-$(RUN) -m pytest -qq --collect-only >/dev/null
	@touch $@

# pip would list what accelerate and torchtitan miss, which $(VENV)/dev leaves out on purpose.
$(VENV)/docs: $(VENV)/dev
	$(RUN) -m pip install --quiet --no-warn-conflicts --editable '.[docs]'
	@touch $@

$(VENV)/examples: $(VENV)/dev
	$(RUN) -m pip install --quiet --no-warn-conflicts --editable '.[examples]' \
		|| echo "ray or transformers cannot be installed here: their examples are skipped"
	@touch $@

$(PACKAGING)/made: .ci/constraints.txt
	$(PYTHON) -m venv $(PACKAGING)
	$(PACKAGING)/bin/python -m pip install --quiet build twine
	@touch $@

# torch is installed with its own dependencies; pgmesh and the tools without any, or pip would replace this torch.
# The constraints pin another torch, so they are a list of tools here.
$(TORCH_VENV)/made: .ci/constraints.txt .ci/neighbours.txt
	$(PYTHON) -m venv $(TORCH_VENV)
	env -u PIP_CONSTRAINT $(TORCH_RUN) -m pip install --quiet torch==$(TORCH)
	grep -Ev '^(torch|megatron-core|ray|transformers)==' .ci/constraints.txt >$(TORCH_VENV)/tools.txt
	env -u PIP_CONSTRAINT $(TORCH_RUN) -m pip install --quiet --no-deps --requirement $(TORCH_VENV)/tools.txt --editable .
	env -u PIP_CONSTRAINT $(TORCH_RUN) -m pip install --quiet --no-deps --requirement .ci/neighbours.txt \
		$$(grep ^megatron-core== .ci/constraints.txt) \
		|| echo "Megatron-Core, accelerate or torchtitan cannot be installed here: their tests are skipped"
	@touch $@

# The peers, for the benchmark alone. What cannot be installed here is left out of its tables, with a word.
$(BENCH)/made: pyproject.toml .ci/constraints.txt
	$(PYTHON) -m venv $(BENCH)
	$(BENCH)/bin/python -m pip install --quiet --editable . numpy
	$(BENCH)/bin/python -m pip install --quiet --only-binary megatron-core megatron-core einops \
		|| echo "Megatron-Core cannot be installed here: the benchmark does without"
	@touch $@
