# The commands of a developer. Everything runs in .venv, which is made from $(PYTHON) and pyproject.toml only.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
EXTRAS := postgres,redis,celery,prometheus,opentelemetry,http,recurring,tasks,terminal
# More workers than processors, because tests wait.
WORKERS ?= 5
PYTEST := $(BIN)/python -m pytest --workers $(WORKERS) --db both

# Every process of a test would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help venv demo test all matrix check messages screenshots bench docs clean

help: ## show this
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(VENV)/.made ## make .venv

demo: $(VENV)/.demo ## run the demo shop
	$(BIN)/python manage.py migrate --verbosity 0
	$(BIN)/python manage.py migrate --verbosity 0 --database savings
	$(BIN)/python manage.py demo

test: $(VENV)/.test ## the core of the suite, on PostgreSQL, RabbitMQ, Redis and SQLite
	$(PYTEST) --core

all: $(VENV)/.test ## the whole suite: also killed processes and servers, outages, browsers, soaks
	$(PYTEST)

matrix: $(VENV)/.test ## the core with other versions, in directories with Debian; CELLS="trixie-6.1" for a part
	$(BIN)/python -m tools.matrix $(CELLS)

check: $(VENV)/.dev ## lint, spelling and wording, types, import contracts, migrations, docs
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/codespell
	$(BIN)/python -m tools.wording
	$(BIN)/mypy
	$(BIN)/python -m tools.tutorial_types
	$(BIN)/lint-imports
	DJANGO_SETTINGS_MODULE=tests.settings $(BIN)/python manage.py makemigrations --check --dry-run
	DJANGO_SETTINGS_MODULE=demo_shop.settings $(BIN)/python manage.py makemigrations --check --dry-run
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir $(VENV)/site

messages: $(VENV)/.test ## update and compile the catalogs of translations
	$(BIN)/python -m tools.messages

screenshots: $(VENV)/.test ## take the screenshots of the docs again, and record the demo
	$(BIN)/python -m tools.screenshots
	$(BIN)/python -m tools.recording

bench: $(VENV)/.test ## measure beside raw limits and peers; BENCH="relay --quick" for a part
	$(BIN)/python -m benchmarks $(BENCH)

docs: $(VENV)/.dev ## serve the documentation, rebuilt after each change
	$(BIN)/mkdocs serve

clean: ## remove all build results, except databases
	rm -rf $(VENV) build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache benchmarks/.results benchmarks/.peers
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# pip 25.1 is the first that installs dependency groups.
$(VENV)/.made: pyproject.toml
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP) 'pip>=25.1'
	touch $@

$(VENV)/.demo: $(VENV)/.made
	$(PIP) --editable '.[postgres,redis,terminal]' --group demo
	touch $@

$(VENV)/.test: $(VENV)/.made
	$(PIP) --editable '.[$(EXTRAS)]' --group test
	touch $@

$(VENV)/.dev: $(VENV)/.made
	$(PIP) --editable '.[$(EXTRAS)]' --group dev
	touch $@ $(VENV)/.test
