# `make demo` and `make test` do all their own set-up; the second time that costs seconds. What they lack of system
# packages they install by apt-get, as root, after saying so; PACKAGES=none leaves that out.
#
#   make demo             train, save, resume on fewer processes, compare with stock DCP
#   make elastic          train on 4 processes, kill -9 in the middle of a save, resume on 2 and on 3
#   make test             C tests, Python tests, linters
#   make test-slow        all Python tests, those too that make test leaves out because of their time
#   make test-torch TORCH=2.15.0 [PYTHON=python3.12] [TESTS=tests/test_kinds.py]
#                         the Python tests with another torch, in an environment of its own (up to 7 GB below build/torch)
#   make test-trainers    torchtitan, Lightning, accelerate and transformers with dcpring, in such an environment
#   make clean-torch      removes these environments
#   make wheels           what a release consists of, in dist/: the sdist, and a wheel for each architecture
#   make smoke-aarch64    tests/smoke.py with the wheel for aarch64, on a processor that qemu emulates (10 minutes, 2 GB)
#   make docs             the documents as a site, in build/site
#   make bench            benchmarks/save_load.py with everything in it
#   make bench-planning   benchmarks/planning.py and benchmarks/small_tensors.py
#   make example-hsdp     who writes what, with each strategy, on 4 processes
#   make asan             the suite under AddressSanitizer and UBSan
#   make tsan             the C tests under ThreadSanitizer
#   make soak             random rounds in which things go wrong, for MINUTES=30; SEED=... plays one round again
#   make crash            every state that a crash of a save may leave, of which the tests look at some (SEED=...)

SHELL := /bin/bash
PYTHON ?= python3
VENV_TORCH := torch==2.13.0
VENV := .venv
PY := $(VENV)/bin/python
# The newest torchao that a torch takes.
TORCHAO := torchao==$(if $(filter 2.9.%,$(TORCH)),0.14.1,0.18.0)
TEST_PACKAGES := setuptools wheel tqdm numpy pytest pytest-xdist prometheus_client opentelemetry-sdk rich shtab safetensors matplotlib $(TORCHAO) torchdata
TRAINERS := torchtitan==0.3.0 triton lightning==2.6.6 accelerate==1.15.0 transformers==5.24.0
DEV_PACKAGES := $(TEST_PACKAGES) ruff==0.17.6 mypy==2.4.1 clang-format==19.1.7
DOCS_PACKAGES := mkdocs==1.6.1 mkdocs-material==9.8.1 mkdocstrings-python==2.0.11 ruff
SYSTEM_PACKAGES := gcc g++ make python3-dev python3-venv liburing-dev libdeflate-dev
TEST_SYSTEM_PACKAGES := xfsprogs btrfs-progs util-linux e2fsprogs zsh tcsh qemu-user
CSRC_SOURCES := $(wildcard csrc/*/*.[ch] csrc/*/*/*.[ch])
SOURCES := $(CSRC_SOURCES) setup.py pyproject.toml
C_SOURCES := $(CSRC_SOURCES) $(wildcard tests/c/*.[ch] tests/fuzz/*.[ch])
PYTEST := $(PY) -m pytest -q
# Tests wait more than they compute: two processes, of which each takes whole files.
PYTEST_JOBS ?= 2
comma := ,
PACKAGES ?= all

.PHONY: setup demo elastic test test-slow test-c test-python test-torch test-trainers clean-torch lint bench bench-planning example-hsdp asan tsan crash soak docs wheels smoke-aarch64 clean

setup: build/.installed

# Installs those of $(1) that are missing, where there is dpkg; elsewhere the build says what it misses.
# On a fresh machine something else often holds apt's locks: apt-get waits for dpkg's by itself, and for none of update's.
APT_PAUSE := 10
define install_packages
	mkdir -p build; command -v dpkg-query >/dev/null || exit 0; \
	missing=$$(for p in $(1); do dpkg-query -W -f='$${Status}' $$p 2>/dev/null | grep -q "ok installed" || echo $$p; done); \
	[ -n "$$missing" ] || exit 0; \
	[ "$(PACKAGES)" != none ] || { echo "== system packages are missing:" $$missing; exit 0; }; \
	sudo=$$([ $$(id -u) -eq 0 ] || echo sudo); \
	echo "== system packages are missing, and will be installed now by $${sudo:+sudo }apt-get:" $$missing; \
	[ ! -t 0 ] || { echo "   (Ctrl-C within 5 s if you do not want that; PACKAGES=none goes on without them)"; sleep 5; }; \
	apt() { $$sudo env LC_ALL=C DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=600 "$$@" >build/apt.log 2>&1; }; \
	failed() { tail -5 build/apt.log; echo "Install these packages yourself, then run make again."; exit 1; }; \
	tries=0; until apt update; do \
	  grep -q "Could not get lock" build/apt.log && [ $$((tries += 1)) -le 60 ] || failed; \
	  [ $$tries != 1 ] || echo "   (another apt-get is running: waiting for it, up to 10 minutes)"; sleep $(APT_PAUSE); \
	done; \
	apt install -y $$missing || failed
endef

build/.system:
	@$(call install_packages,$(SYSTEM_PACKAGES))
	@touch $@

build/.venv: build/.system Makefile
	@echo "== Python environment in $(VENV), into which pip installs now: $(VENV_TORCH) $(DEV_PACKAGES)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "dcpring needs Python 3.11 or newer; make PYTHON=... names one")'
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@$(PY) -m pip install -q --disable-pip-version-check $(VENV_TORCH) $(DEV_PACKAGES)
	@touch $@

build/.installed: build/.venv $(SOURCES)
	@echo "== building dcpring"
	@$(PY) -m pip install -q --disable-pip-version-check --no-build-isolation --no-deps -e .
	@touch $@

build/.test-system: build/.system
	@$(call install_packages,$(TEST_SYSTEM_PACKAGES))
	@touch $@

demo: setup
	@$(PY) examples/demo.py

elastic: setup
	@$(PY) -W ignore examples/elastic_resume.py

test: build/.test-system lint test-c test-python

test-slow:
	@$(MAKE) -s test-python PYTEST="$(PYTEST) --slow"

test-c: setup
	@$(MAKE) -s -C tests/c run

# A copy of the package in build/$(1), with an extension that has the compiler flags $(2).
define build_copy
	mkdir -p build/$(1)/dcpring && find build/$(1)/dcpring -type f ! -name '*.so' -delete && \
	DCPRING_TEST=1 DCPRING_CFLAGS="$(2)" $(PY) setup.py -q build_ext --build-lib build/$(1) --build-temp build/$(1)/tmp && \
	tar -C python --exclude='*.so' -c dcpring | tar -C build/$(1) -x
endef

# Assertions are on in tests, and off in what is installed.
test-python: setup build/.test-system
	@$(call build_copy,asserting,-UNDEBUG)
	@PYTHONPATH=$(CURDIR)/build/asserting DCPRING_ASSERTING=1 $(PYTEST) -n $(PYTEST_JOBS) --dist loadfile --durations=20 tests

# The wheel is built and installed as a user's would be, but for what tests call in the module; nothing in .venv or in the tree is touched. pip keeps no copy of
# what it fetches, as the newer torch bring several gigabytes of CUDA libraries.
TESTS ?= tests
TORCH_PYTHON := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
TORCH_ENV = build/torch/$(TORCH)-python$(TORCH_PYTHON)
TORCH_PY = $(TORCH_ENV)/bin/python
PIP_QUIET := -m pip install -q --no-cache-dir --disable-pip-version-check

test-torch: build/.test-system
	@test -n "$(TORCH)" || { echo "Name a version: make test-torch TORCH=2.15.0 [PYTHON=python3.12]"; exit 1; }
	@test -x $(TORCH_PY) || { echo "== torch $(TORCH) for Python $(TORCH_PYTHON) in $(TORCH_ENV)"; $(PYTHON) -m venv $(TORCH_ENV); }
	@$(TORCH_PY) $(PIP_QUIET) torch==$(TORCH) $(TEST_PACKAGES) $(MORE_PACKAGES)
	@DCPRING_TEST=1 $(TORCH_PY) setup.py -q build --build-base $(TORCH_ENV)/build \
	  bdist_wheel --bdist-dir $(TORCH_ENV)/bdist --dist-dir $(TORCH_ENV)/dist 2>$(TORCH_ENV)/build.log || \
	  { tail -20 $(TORCH_ENV)/build.log; exit 1; }
	@$(TORCH_PY) $(PIP_QUIET) --no-deps --force-reinstall $(TORCH_ENV)/dist/dcpring-*.whl
	@$(TORCH_PY) -c 'import platform, torch; print("== torch", torch.__version__, "Python", platform.python_version())'
	@env -u PYTHONPATH $(TORCH_PY) -m pytest -q $(TESTS)

test-trainers:
	@$(MAKE) -s test-torch TORCH=$(subst torch==,,$(VENV_TORCH)) TORCH_ENV=build/torch/trainers TESTS=tests/trainers \
	  MORE_PACKAGES="$(TRAINERS)"

clean-torch:
	rm -rf build/torch

lint: setup
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy
	@$(VENV)/bin/clang-format --dry-run -Werror $(C_SOURCES)

bench: setup
	@$(PY) benchmarks/save_load.py

bench-planning: setup
	@$(PY) benchmarks/planning.py
	@$(PY) benchmarks/small_tensors.py

example-hsdp: setup
	@$(PY) -W ignore examples/hsdp.py

# libtorch is not built with sanitizers: preload theirs, and look only at our own memory.
asan: setup build/.test-system
	@$(MAKE) -s -C tests/c asan
	@$(call build_copy,asan,-UNDEBUG -fsanitize=address$(comma)undefined -fno-sanitize-recover=undefined -g -O1)
	@LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so)" \
	  ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=1 PYTHONMALLOC=malloc PYTHONPATH=$(CURDIR)/build/asan DCPRING_SANITIZED=1 \
	  DCPRING_ASSERTING=1 $(PYTEST) tests

# Those C tests that have threads, under ThreadSanitizer.
tsan: build/.system
	@$(MAKE) -s -C tests/c tsan

soak: setup build/.test-system
	@$(PY) tests/soak/play.py $(if $(SEED),--seed $(SEED) --verbose,--minutes $(or $(MINUTES),30))

crash: setup
	@$(PY) tests/crash/explore.py --full $(if $(SEED),--seed $(SEED))

build/.docs-tools: Makefile
	@mkdir -p build; $(PYTHON) -m venv --clear build/docs-tools
	@build/docs-tools/bin/python $(PIP_QUIET) $(DOCS_PACKAGES)
	@touch $@

# The pages lie in the site as they do here, so that links between them and to pictures hold in both. A warning is an error.
docs: build/.docs-tools
	@rm -rf build/pages && mkdir -p build/pages
	@tar -c LICENSE *.md $$(find docs csrc python tests -name '*.md') $$(find benchmarks docs -name '*.png' -o -name '*.svg' -o -name '*.css') examples/*.py | tar -x -C build/pages
	@NO_MKDOCS_2_WARNING=1 build/docs-tools/bin/mkdocs build -q --strict -f docs/mkdocs.yml
	@echo "== build/site/index.html"

build/.wheel-tools: .ci/wheels.txt
	@mkdir -p build; $(PYTHON) -m venv --clear build/wheels/tools
	@build/wheels/tools/bin/python $(PIP_QUIET) --require-hashes -r $<
	@touch $@

# Each is looked at by the tests that look at a user's; that of another architecture is run by smoke-aarch64.
wheels: setup build/.test-system build/.wheel-tools
	@build/wheels/tools/bin/python .ci/wheels.py
	@for wheel in dist/*.whl; do echo "== $$wheel"; DCPRING_WHEEL=$$wheel $(PYTEST) tests/test_packaging.py || exit 1; done

smoke-aarch64: build/.test-system
	@.ci/smoke_aarch64.sh

clean:
	rm -rf build dist python/*.egg-info python/dcpring/*.so
