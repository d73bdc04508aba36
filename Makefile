# Everything from a fresh clone: each target makes what it needs, and reuses it the next time.
#
#   make demo      see a hidden state become a word
#   make test      lint, types and tests
#   make install   the package with all that development needs, in .venv
#   make bench     speed and memory, beside what else a user could pick

PYTHON ?= python3
BIN    := .venv/bin
READY  := .venv/.ready

.DEFAULT_GOAL := help
.PHONY: help install demo test lint types tests bench clean

help:
	@sed -n '3,6s/^# *//p' Makefile

install: $(READY)

.venv/bin/python:
	$(PYTHON) -m venv .venv

$(READY): .venv/bin/python pyproject.toml constraints.txt
	@echo "Installing lmhead and its development tools into .venv (a few minutes the first time) ..."
	@$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(READY)
	@$(BIN)/lmhead demo

test: lint types tests

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

tests: $(READY)
	$(BIN)/pytest -n 2 --dist worksteal

bench: $(READY)
	$(BIN)/python -m benchmarks

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
