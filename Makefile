# `make train` and `make test` do all set-up themselves. Override VENV to use another virtual environment, ARGS to
# pass options on: make train ARGS="--set learner.steps=5"

PYTHON ?= $(firstword $(foreach p,python3.11 python3.12,$(shell command -v $(p) 2>/dev/null)) python3)
VENV ?= .venv
ARGS ?=
BIN := $(VENV)/bin
LOCKED := $(VENV)/.locked-$(shell sha256sum requirements.lock | cut -c1-16)
# One at a time in an environment: it says that the environment runs *this* clone's code.
READY := $(VENV)/.ready-$(shell { echo $(CURDIR); cat pyproject.toml requirements.lock; } | sha256sum | cut -c1-16)
# One thread: OpenMP threads spin, and the tests start engines and learners beside themselves.
# Two workers: the tests that start clusters, one after the other, beside all others.
TEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --no-loadscope-reorder

.PHONY: train test check setup proto up clean
.DEFAULT_GOAL := help

help:
	@echo "make train   set up, then train the bundled model with GRPO and report"
	@echo "make test    set up, then run the linters, the type checker and all tests"
	@echo "make up      bring the cluster up with docker compose"
	@echo "make proto   generate the gRPC code again after a change in proto/"

$(LOCKED):
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v < (3, 13) else "SpecRoll needs Python 3.11 or 3.12, and $(PYTHON) is %d.%d; set PYTHON=..." % v)'
	@echo "installing the locked packages into $(VENV) (a few minutes, about 11 GB)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --requirement requirements.lock
	@touch $@

$(READY): | $(LOCKED)
	@$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@rm -f $(VENV)/.ready-* && touch $@

setup: $(READY)

train: setup
	@$(BIN)/specroll model fetch bundled >/dev/null
	@$(BIN)/specroll train examples/quickstart.toml --set run.dir=runs/quickstart-$$(date +%Y%m%d-%H%M%S) $(ARGS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: check
	$(TEST) $(ARGS)

proto: setup
	$(BIN)/python -m grpc_tools.protoc -Iproto --python_out=proto --pyi_out=proto --grpc_python_out=proto proto/specroll/v1/*.proto

up: .env
	docker compose up --build

.env:
	@umask 077; printf 'SPECROLL_GRPC_TOKEN=%s\nSPECROLL_REDIS_PASSWORD=%s\n' \
		$$(head -c 24 /dev/urandom | base64 | tr -d '+/=') $$(head -c 24 /dev/urandom | base64 | tr -d '+/=') > .env
	@echo "wrote .env with a new gRPC token and Redis password"

clean:
	rm -rf build *.egg-info .mypy_cache .ruff_cache .pytest_cache
