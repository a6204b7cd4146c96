# Every target runs in .venv, which the first one to need it creates. Later runs reuse it as it is until the pins or the
# packaging change.
PYTHON ?= python3
WORKERS ?= 2
ARGS ?=

BIN := .venv/bin
INSTALLED := .venv/installed
CXX_FILES = $(shell find csrc -name '*.h' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.cu' 2>/dev/null)

.PHONY: demo test sanitize docs lint format clean

demo: $(INSTALLED)
	$(BIN)/python examples/quickstart.py $(ARGS)

# Two workers have more OpenMP threads than there are cores: threads that spin while they wait would make both several
# times slower.
test: $(INSTALLED)
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

# The CPU kernels under the address and undefined-behaviour sanitizers, AMX emulated. The full grid takes many minutes:
# make test ARGS="-m exhaustive".
sanitize: $(INSTALLED)
	$(BIN)/python -m pytest -q -m exhaustive -k small tests/cpu/test_cpu_sanitizers.py

# Into build/site. A warning (a dead link, a page that the menu lacks) is an error.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(if $(CXX_FILES),$(BIN)/clang-format --dry-run --Werror $(CXX_FILES))

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(if $(CXX_FILES),$(BIN)/clang-format -i $(CXX_FILES))

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -path ./.venv -prune -o -name __pycache__ -type d -exec rm -rf {} +

# setuptools comes first so that the build of the project itself downloads nothing.
$(INSTALLED): constraints.txt pyproject.toml setup.py
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || { \
	  echo "mok-compile needs Python 3.10 to 3.13, and PYTHON=$(PYTHON) is not one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; \
	  exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --constraint constraints.txt setuptools
	$(BIN)/pip install --constraint constraints.txt --no-build-isolation --editable '.[test,examples,lint,docs]'
	touch $@
