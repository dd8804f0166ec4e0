# The project's commands. `make` alone lists them.
PYTHON ?= python3
ARGS ?=
VENV := .venv-$(notdir $(PYTHON))
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install -q
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# A kernel of this environment goes before one of the same name in the user's home.
export JUPYTER_PREFER_ENV_PATH = 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test soak notebooks lint types clean

help:
	@echo 'make demo       train a small model with AdamW and with FP8 AdamW, compare them'
	@echo 'make test       run the tests             (ARGS="-k name" picks some)'
	@echo 'make soak       run the long campaigns, left out of make test'
	@echo 'make notebooks  execute every notebook and write its .ipynb'
	@echo 'make lint       check format and style'
	@echo 'make types      check types'
	@echo 'make clean      remove the environments and caches (results stay)'
	@echo 'Each makes the environment it needs. PYTHON=python3.12 make test: another one.'

# One environment per interpreter, made anew when pyproject.toml changes.
$(VENV)/created: pyproject.toml
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	|| { echo "make: '$(PYTHON)' is missing or older than Python 3.11;" \
	"name another: PYTHON=python3.12 make" >&2; exit 1; }
	@echo "making $(VENV)"
	@"$(PYTHON)" -m venv --clear "$(VENV)" \
	|| { echo "make: '$(PYTHON)' cannot make a virtual environment;" \
	"install its venv module" >&2; exit 1; }
	@touch "$@"

$(VENV)/demo: $(VENV)/created
	@echo 'installing what the demo needs'
	@$(PIP) -e '.[experiments]'
	@touch "$@"

# Holds the demo's packages too, so whoever has tested need not install again.
$(VENV)/dev: $(VENV)/created
	@echo 'installing what the tests need'
	@$(PIP) -e '.[dev,experiments,notebooks,pretrained]'
	@touch "$(VENV)/demo" "$@"

demo: $(VENV)/demo
	@$(PY) -m experiments.demo $(ARGS)

test: $(VENV)/dev
	@$(PY) -m pytest -n 2 $(ARGS)

soak: $(VENV)/dev
	@HYPOTHESIS_PROFILE=soak $(PY) -m pytest -m soak --timeout=0 $(ARGS)

notebooks: $(VENV)/dev
	@for source in notebooks/*.py; do \
	  test -f "$$source" || { echo 'make: notebooks/ holds no .py file' >&2; exit 1; }; \
	  echo "executing $$source"; \
	  PYTHONPATH="$(CURDIR)" $(PY) -m jupytext --quiet --to ipynb --set-kernel python3 \
	  --execute "$$source" \
	  || exit 1; \
	done

lint: $(VENV)/dev
	@$(PY) -m ruff format --check .
	@$(PY) -m ruff check .

types: $(VENV)/dev
	@$(PY) -m basedpyright --pythonpath $(PY)

clean:
	rm -rf .venv-* .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
