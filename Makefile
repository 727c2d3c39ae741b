# make run | test | test-full | test-sanitize | package-test | lint | venv | clean. Everything lands in .venv and build;
# a second call is quick.
PYTHON ?= python3
# Installed before everything else, so that no range is resolved to a build with gigabytes of GPU libraries.
TORCH ?= torch==2.13.0
# An index that serves CPU builds of torch; see PyTorch's install instructions. Empty: pip's own.
TORCH_INDEX ?=
PROMPT ?= Write a function that merges two sorted lists
ARGS ?= --max-tokens 96 --show drafts

VENV := .venv
BIN := $(VENV)/bin
KEY := $(shell printf '%s' "$(TORCH) $(TORCH_INDEX)" | cksum | cut -d' ' -f1)
INSTALLED := $(VENV)/.installed-$(KEY)
TEST_INSTALLED := $(VENV)/.test-installed-$(KEY)

SANITIZED := build/sanitize/site-packages
PACKAGE := build/package

.PHONY: run test test-full test-sanitize package-test lint venv clean

run: venv
	$(BIN)/pilotfish generate $(ARGS) "$(PROMPT)"

test: $(TEST_INSTALLED)
	$(BIN)/python -m pytest

test-full: $(TEST_INSTALLED)
	$(BIN)/python -m pytest --full

# The kernels under AddressSanitizer and UBSan, built by GCC: others name the runtime otherwise. The interpreter is not
# .venv's, whose editable install would come first. A report ends the process, so pytest must not hold stderr back.
# The long grid of rows is left out: it took most of ten minutes, and rows of any number, type and variant come in others.
ARGMAX_TESTS := gives_the_lowest_of_equal_ids finds_a_tie_at_every_pair_of_places refuses_what_is_no_answer
test-sanitize: $(TEST_INSTALLED)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(SANITIZED) . -C build-dir=build/sanitize/objects \
	  -C cmake.define.PILOTFISH_SANITIZE=ON -C cmake.build-type=RelWithDebInfo
	PYTHONPATH="$(SANITIZED):$$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])')" \
	  LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	  ASAN_OPTIONS=detect_leaks=0 $(PYTHON) -S -m pytest --capture=sys \
	  --deselect tests/test_native.py::test_linear_rows_are_independent_and_variants_equal tests/test_native.py \
	  tests/test_calibrate.py tests/test_sampling_ops.py tests/test_sampling_noise.py tests/test_ops.py::test_log_sum_exp \
	  $(patsubst %,tests/test_ops.py::test_argmax_%,$(ARGMAX_TESTS))

# The sdist, a wheel made from it, and what that wheel does in an environment with nothing else.
package-test: $(TEST_INSTALLED)
	rm -rf $(PACKAGE)
	$(BIN)/python -m build --outdir $(PACKAGE)/dist
	$(PYTHON) -m venv $(PACKAGE)/venv
	$(PACKAGE)/venv/bin/python -m pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$(TORCH)"
	$(PACKAGE)/venv/bin/python -m pip install --quiet $(PACKAGE)/dist/*.whl
	$(PACKAGE)/venv/bin/python tests/smoke.py $(PACKAGE)/dist

lint: $(TEST_INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_layers.py

venv: $(INSTALLED)

$(INSTALLED): pyproject.toml CMakeLists.txt $(wildcard csrc/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[bench]"
	rm -f $(VENV)/.installed-* $(VENV)/.test-installed-*
	touch $@

$(TEST_INSTALLED): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --editable ".[bench,dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .hypothesis .mypy_cache .ruff_cache
