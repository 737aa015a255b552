# Verbs only; every recipe is one line that a user could type.
PYTHON ?= python3
PY := .venv/bin/python

.DEFAULT_GOAL := help
.PHONY: help images test check

help: ## what can be done here
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 20

.venv/.ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(PY) -m pip install -q --disable-pip-version-check -e '.[dev]'
	@touch $@

check: .venv/.ready ## lint, types, unit tests (under 15 s)
	@$(PY) -m ruff format --check -q . && $(PY) -m ruff check -q . && $(PY) -m mypy && $(PY) -m pytest -q tests/unit

images: .venv/.ready ## build the cpu and rocm images, prove them, say where their bytes are
	@$(PY) -m buildtool build $(VARIANTS)

engine: .venv/.ready ## install and start a Docker engine if none answers (Debian, Ubuntu; as root)
	@$(PY) -m buildtool engine
