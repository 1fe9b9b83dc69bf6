# `make demo` and `make test` need Python 3.11 or newer and nothing else.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

.PHONY: demo test test-long test-versions test-portable test-slow works test-oldest lint docs notebooks release bench figures bench-gpu tables clean

# a first look in about five minutes, installation included; SEEDS=3 compares with and without the filter over three seeds
demo: $(VENV)/installed-demo
	$(BIN)/hf-graphfilter demo $(SEEDS:%=--seeds %)

test: $(VENV)/installed-test
	$(BIN)/python -m pytest -n 2 -m "not long and not slow and not gpu"

# the longest tests, which together take more time than all others (programs, guides, compilers, processes)
test-long: $(VENV)/installed-test
	$(BIN)/python -m pytest -n 2 -m "long and not slow and not gpu"

# the same with other instruction sets and numbers of threads: results may differ by rounding only (half an hour)
SETTINGS = ATEN_CPU_CAPABILITY=avx2,ONEDNN_MAX_CPU_ISA=AVX2,MKL_ENABLE_INSTRUCTIONS=AVX2 \
	ATEN_CPU_CAPABILITY=default,ONEDNN_MAX_CPU_ISA=SSE41,MKL_CBWR=COMPATIBLE TEST_THREADS=2 TEST_THREADS=4
test-portable: $(VENV)/installed-test
	set -e; for setting in $(SETTINGS); do echo "$$setting"; \
		env $$(echo $$setting | tr , " ") $(BIN)/python -m pytest -q -n 2 -m "not slow and not gpu"; done

test-slow: $(VENV)/installed-slow
	$(BIN)/python -m pytest -m slow

lint: $(VENV)/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# the site, in build/site; warnings are errors; then the tests of the site
docs: $(VENV)/installed-docs $(VENV)/installed-test
	NO_MKDOCS_2_WARNING=1 PATH="$(abspath $(BIN)):$$PATH" $(BIN)/mkdocs build --strict
	SITE=build/site $(BIN)/python -m pytest tests/test_site.py

# notebooks/, written from examples/notebooks and run (minutes)
notebooks: $(VENV)/installed-test
	$(BIN)/python notebooks/build.py

# a wheel and an sdist in dist/, checked (W002: the licence of the data is there twice)
release: $(VENV)/installed-release
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents --ignore W002 --toplevel hf_graphfilter --package hf_graphfilter dist/*.whl
	@! grep -n '\.example' pyproject.toml || echo 'The links in dist/ lead nowhere: fill in the address of the project before uploading it.'

# docs/coverage.md and docs/compatibility.md, from what the tests find (an hour on two cores)
works: $(VENV)/installed-slow
	$(BIN)/python tests/coverage/write.py
	$(BIN)/python tests/compatibility.py -n 2

# the suite on every release of torch and Python that is supported, an environment each; resumes (a quarter of an hour a row)
test-versions:
	$(PYTHON) tests/versions.py $(ROW)

# the oldest supported pair
test-oldest:
	$(MAKE) test-versions ROW=torch-2.11

bench: $(VENV)/installed-test
	$(BIN)/python benchmarks/gfsa.py
	$(BIN)/python benchmarks/agf.py
	$(BIN)/python benchmarks/decoding.py
	$(BIN)/python benchmarks/busy.py
	$(BIN)/python benchmarks/busy.py --compiled

# the figures of docs/concepts.md, and of docs/analysis.md; the latter need the data and weights that gallery.py names
figures: $(VENV)/installed-test
	$(BIN)/python benchmarks/concepts.py
	$(BIN)/python benchmarks/gallery.py

# all that a GPU can answer, in ten minutes; run it again to resume
bench-gpu: $(VENV)/installed-test
	$(BIN)/python benchmarks/gpu.py

# writes the measured tables into README.md and docs/ from the files of the last bench and demo
tables: $(VENV)/installed-test
	$(BIN)/python benchmarks/tables.py

$(VENV)/installed-%: pyproject.toml hf_graphfilter/__init__.py
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable ".[$*]" $(PINS)
	touch $@

clean:
	rm -rf $(VENV) .venvs build dist runs
