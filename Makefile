# make demo: the pipeline on the bundled model and data; make test: the test suite. Both offline
# once installed, both on CPU or the GPU they find. make test-addons: the tests of add-ons, of which
# make test takes a few; make test-all: everything that both take a spread of; make test-avx2: the
# tests of mathematics by the kernels of a processor without AVX-512, in a minute.
# make bench: fine-tuning against other ways to do so, on the CPU, in ten minutes at most;
# make bench-gpu: everything that has to be seen on a GPU.
# make docs: the site of the documentation in site/, by an environment of its own.
VENV ?= .venv
PYTHON ?= python3
# the oldest Python, and what has to run with it
OLDEST = 3.11
PACKAGES = dschat_lora training benchmarks examples scripts tests setup.py
PIP = $(VENV)/bin/python -m pip install --quiet --constraint constraints.txt
SOURCES = setup.py constraints.txt
# pip would say so too, once torch is there
CHECK_PYTHON = @$(PYTHON) -c 'import sys; sys.version_info >= tuple(map(int, "$(OLDEST)".split("."))) or \
	sys.exit("error: Python $(OLDEST) or later is needed, $(PYTHON) is " + sys.version.split()[0] + \
	"; PYTHON=python$(OLDEST) behind make chooses another")'
MATHEMATICS = $(addprefix tests/,algos checkpoint generation lora models \
	engine/test_peft_loop.py engine/test_trajectories.py addons/nlg/test_beam_search.py \
	addons/trainer/test_trainer_processes.py)
# a file goes to one process, so that what its tests share is made once
PYTEST = python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
# PyPI's torch is built for CUDA 13.0, which needs driver 580 and a card of compute capability 7.5;
# where nvidia-smi shows less, the build for CUDA 12.6 is taken: driver 525, capability 5.0 to 9.0,
# unless a card needs the usual one, and with it the newer driver.
# make demo TORCH_WHEEL='...' gives pip other words.
CU126 = torch==2.13.0+cu126 --index-url https://download.pytorch.org/whl/cu126
TORCH_WHEEL ?= $(shell nvidia-smi --query-gpu=driver_version,compute_cap --format=csv,noheader \
	2>/dev/null | awk -F'[., ]+' '/^[0-9]/ { card = $$NF ~ /^[0-9]+$$/ ? ($$(NF - 1) $$NF) + 0 : 75; \
	if ($$1 < 580 || card < 75) old = 1; if (card < 50 || card > 90) usual = 1 } \
	END { print old && !usual ? "$(CU126)" : "torch==2.13.0" }')
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)

.PHONY: demo test test-addons test-all test-avx2 lint oldest format docs bench bench-gpu clean
.DELETE_ON_ERROR:

demo: $(VENV)/.run
	dschat-lora demo

test: $(VENV)/.test
	$(PYTEST)

test-addons: $(VENV)/.test
	$(PYTEST) -m 'not gpu and not smoke' tests/addons

# every combination and every point of failure, where make test takes a spread of them; hours
test-all: $(VENV)/.test
	DSCHAT_LORA_TESTS=all $(MAKE) test

# other kernels add in another order, by which no test may fail
test-avx2: $(VENV)/.test
	ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 MKL_CBWR=COMPATIBLE ATEN_CPU_CAPABILITY=avx2 \
	$(PYTEST) $(MATHEMATICS)

lint: $(VENV)/.dev
	ruff check .
	ruff format --check .
	mypy
	$(MAKE) --no-print-directory oldest

# Newer parts of the standard library; newer syntax ruff finds. Any output fails, as vermin's status is
# 0 for a file that it gives up, such as one with Tensor.long but for --exclude.
oldest:
	@found=$$(vermin --target=$(OLDEST)- --violations --quiet --no-tips --eval-annotations \
		--exclude long $(PACKAGES)) && test -z "$$found" || { echo "$$found"; exit 1; }

format: $(VENV)/.dev
	ruff check --fix .
	ruff format .

docs: $(VENV)-docs/.docs
	NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs build --strict --quiet

bench: $(VENV)/.bench
	PYTHON=python BENCH_SFT=1 CUDA_VISIBLE_DEVICES= bash benchmarks/gpu.sh sft

bench-gpu: $(VENV)/.bench
	PYTHON=python bash benchmarks/gpu.sh

# torch first: the packages that build against it then find it, and no other build is fetched
$(VENV)/.run: $(SOURCES)
	$(CHECK_PYTHON)
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip setuptools wheel
	$(PIP) $(TORCH_WHEEL)
	$(PIP) --editable .
	touch $@

$(VENV)/.bench: $(VENV)/.run
	$(PIP) --editable '.[bench]'
	touch $@

$(VENV)/.test: $(VENV)/.run
	$(PIP) --editable '.[test]'
	touch $@

$(VENV)-docs/.docs: $(SOURCES)
	$(CHECK_PYTHON)
	$(PYTHON) -m venv $(VENV)-docs
	$(PYTHON) scripts/extra_requirements.py docs > $(VENV)-docs/requirements.txt
	$(VENV)-docs/bin/python -m pip install --quiet --constraint constraints.txt --requirement $(VENV)-docs/requirements.txt
	touch $@

$(VENV)/.dev: $(VENV)/.run
	$(PIP) --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-docs site build *.egg-info .pytest_cache .mypy_cache .ruff_cache
