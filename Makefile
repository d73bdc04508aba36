# Everything from a fresh clone: each target makes what it needs, and reuses it the next time.
#
#   make demo      see a hidden state become a word
#   make test      lint, types and tests
#   make install   the package with all that development needs, in .venv
#   make bench     speed and memory, beside what else a user could pick
#   make sanitize  the compiled kernels against their slow twins, watched by sanitizers

PYTHON ?= python3
BIN    := .venv/bin
READY  := .venv/.ready

.DEFAULT_GOAL := help
.PHONY: help install demo test lint types tests bench sanitize clean

help:
	@sed -n '3,7s/^# *//p' Makefile

install: $(READY)

.venv/bin/python:
	$(PYTHON) -m venv .venv

NATIVE := $(wildcard native/*.?pp native/CMakeLists.txt)

$(READY): .venv/bin/python pyproject.toml constraints.txt $(NATIVE)
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
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal

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

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
