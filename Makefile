# make demo   text from the shipped model, in a virtual environment of its own
# make test   every test; make lint, make bench likewise install what they need
# make conformance   the table of real exports, written to docs/results/conformance.md
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint requirements/lock.txt
MODEL := models/shakespeare-onnx

.PHONY: demo test conformance bench lint format lock clean

demo: $(VENV)/.demo
	@$(BIN)/ortkv generate $(MODEL) -p "ROMEO:" -n 160 --do-sample --temperature 0.8 --seed 7 --echo --stats

test: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 --durations=15

conformance: $(VENV)/.test
	$(BIN)/python tests/exports/conformance_table.py > docs/results/conformance.md

bench: $(VENV)/.demo
	$(BIN)/ortkv bench $(MODEL)

lint: $(VENV)/.lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

format: $(VENV)/.lint
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The lock pins every package of every extra; torch's version is a choice (requirements/choices.in).
lock:
	uv pip compile pyproject.toml requirements/choices.in --all-extras --universal --upgrade \
		--python-version 3.11 --no-emit-index-url --no-annotate --no-header --output-file requirements/lock.txt

clean:
	rm -rf $(VENV) dist

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "ortkv needs Python 3.11 or newer: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.demo: $(VENV)/.made pyproject.toml requirements/lock.txt
	$(PIP) --editable '.[cpu]'
	touch $@

$(VENV)/.test: $(VENV)/.made pyproject.toml requirements/lock.txt
	$(PIP) --editable '.[cpu,test]'
	touch $@

$(VENV)/.lint: $(VENV)/.test
	$(PIP) --editable '.[cpu,test,lint]'
	touch $@
