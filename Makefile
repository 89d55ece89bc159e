# dflash-moe: everything a person or CI runs. `make demo` and `make test` set up what they need.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

READY     := $(VENV)/.ready
READY_DEV := $(VENV)/.ready-dev

CLIENTS       := .venv-clients
READY_CLIENTS := $(CLIENTS)/.ready

.DEFAULT_GOAL := help
.PHONY: help demo chat test test-all test-clients fuzz soak check docs check-kernels format bench bench-cpu bench-ipc build clean

help:
	@echo "make demo      write text with the demo model, its experts in two daemon processes"
	@echo "make chat      ask the demo model that chats four questions, one of which needs a tool"
	@echo "make test      run the test suite (make test-all: long fuzzing and the wide matrix too)"
	@echo "make test-clients  run clients of other projects against the server; downloads 2 GB"
	@echo "make fuzz      a million damaged inputs for everything that is read from outside"
	@echo "make soak      write text for ten minutes while its daemons are killed and stopped"
	@echo "make check     formatting, lint, types, import contracts, tables of docs/"
	@echo "make docs      write the tables of docs/ that say what the code says"
	@echo "make check-kernels  compile every GPU kernel for every architecture, without a GPU"
	@echo "make format    format the code"
	@echo "make bench     measure the demo model, results in bench/results/"
	@echo "make bench-cpu compare the CPU kernels with llama.cpp, which it builds; takes an hour"
	@echo "make bench-ipc measure what lies between parent and daemon; takes half an hour"
	@echo "make build     build the wheel into dist/"
	@echo "make clean     remove everything that was made here"

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "dflash-moe needs Python 3.11 or newer; set PYTHON=")'
	@echo "setting up $(VENV) (once; downloads the dependencies)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(READY_DEV): $(READY)
	@echo "installing the test tools (once)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	@touch $@

# For two cores: a worker waits for processes that it has started for a quarter of the time.
WORKERS ?= 3

DEMO_PROMPT := demo/prompt.txt

demo: $(READY)
	@cat $(DEMO_PROMPT)
	@$(BIN)/dflash-moe generate --prompt-file $(DEMO_PROMPT) -n 200 --temp 0.8 --top-p 0.9 --seed 2 \
	    --daemon cpu --daemon cpu

chat: $(READY)
	@$(BIN)/python -m demo.chat.show

test: $(READY_DEV)
	$(BIN)/python -m pytest -m "not slow" -n $(WORKERS) --dist loadfile

test-all: $(READY_DEV)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

$(READY_CLIENTS): tests/clients/requirements.txt tests/clients/aider.txt tests/clients/package.json
	@echo "installing the clients (once; downloads some 2 GB)"
	@$(PYTHON) -m venv $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check -r tests/clients/requirements.txt
	@$(PYTHON) -m venv $(CLIENTS)/aider
	@$(CLIENTS)/aider/bin/python -m pip install --quiet --disable-pip-version-check -r tests/clients/aider.txt
	@mkdir -p $(CLIENTS)/node && cp tests/clients/package.json $(CLIENTS)/node
	@if command -v npm >/dev/null; then cd $(CLIENTS)/node && npm install --silent; \
	    else echo "no npm here: the clients for Node are left out"; fi
	@touch $@

test-clients: $(READY_DEV) $(READY_CLIENTS)
	$(BIN)/python -m pytest -n 0 tests/clients

fuzz: $(READY_DEV)
	PYTHONPATH=tests $(BIN)/python -m fuzz --cases 1000000

soak: $(READY)
	$(BIN)/python -m bench.soak --minutes 10

check: $(READY_DEV)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tooling.docs --check

docs: $(READY_DEV)
	$(BIN)/python -m tooling.docs

check-kernels: $(READY_DEV)
	$(BIN)/python -m bench.check_kernels

format: $(READY_DEV)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)
	$(BIN)/python -m bench.demo_decode

bench-cpu: $(READY)
	$(BIN)/python -m bench.build_peer native avx2
	$(BIN)/python -m bench.cpu_layer
	DFLASH_MOE_EXPERT_COMPUTE_CPU_TIER=avx2 $(BIN)/python -m bench.cpu_layer --peer avx2 \
	    --files q4_k_m q8_0
	$(BIN)/python -m bench.cpu_model

bench-ipc: $(READY)
	$(BIN)/python -m bench.ipc_round_trip --save
	$(BIN)/python -m bench.daemon_decode --save
	$(BIN)/python -m bench.prefill_traffic --save
	$(BIN)/python -m bench.execution_modes --save
	$(BIN)/python -m bench.payload_accuracy --save
	$(BIN)/python -m bench.idle --save
	$(BIN)/python -m bench.loss_gap --save
	$(BIN)/python -m bench.curve_flood --save

build: $(READY)
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

clean:
	rm -rf $(VENV) $(CLIENTS) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
