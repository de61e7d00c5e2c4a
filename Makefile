# `make demo` talks to the demo model, `make test` passes the tests; both do all their own set-up.
VENV ?= .venv
RUN = $(VENV)/bin
CACHE ?= .cache
DEVICE_CODE = find plugins -name '*.h' -o -name '*.cu' -o -name '*.cuh' -o -name '*.cpp'
SOAK_SECONDS ?= 600
FUZZ_SECONDS ?= 600

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint format library wheel sanitize soak fuzz clean

help:
	@echo "make demo     build the demo engine, serve it from tritonserver and talk to it"
	@echo "make setup    only install everything into $(VENV)"
	@echo "make test     lint, types and every test that runs without a GPU"
	@echo "make lint     ruff, mypy, clang-format"
	@echo "make library  compile the CUDA library (nvcc)"
	@echo "make wheel    build dist/*.whl, with the CUDA library when nvcc is there"
	@echo "make sanitize small shapes of every kernel under compute-sanitizer, on an H200"
	@echo "make soak     load a server for SOAK_SECONDS=$(SOAK_SECONDS)"
	@echo "make fuzz     fuzz for FUZZ_SECONDS=$(FUZZ_SECONDS)"
	@echo "make format   ruff format, clang-format"
	@echo "make clean    remove build outputs and caches of tools"

setup:
	@docker/install.sh $(VENV)

demo:
	@docker/install.sh $(VENV) pypi-server
	@$(RUN)/gptoss-trt demo --cache-dir $(CACHE)/demo

test: setup lint
	@$(RUN)/python tests/run.py

lint: setup
	@$(RUN)/ruff check .
	@$(RUN)/ruff format --check --quiet .
	@$(RUN)/mypy
	@$(DEVICE_CODE) | xargs -r $(RUN)/clang-format --dry-run --Werror
	@$(RUN)/shellcheck docker/*.sh .ci/run
	@$(RUN)/hadolint -c docker/.hadolint.yaml docker/Dockerfile docker/Dockerfile.cpu

format: setup
	@$(RUN)/ruff format --quiet .
	@$(DEVICE_CODE) | xargs -r $(RUN)/clang-format -i

library: setup
	@mkdir -p build/cuda
	@echo "library: compiling plugins/csrc, about a minute; build/cuda/build.log has nvcc's output"
	@{ $(RUN)/cmake -S plugins -B build/cuda -DCMAKE_BUILD_TYPE=Release && $(RUN)/cmake --build build/cuda --parallel; } \
		>build/cuda/build.log 2>&1 || { grep -aE -A3 'rror' build/cuda/build.log | tail -40; exit 1; }
	@echo "library: build/cuda/libgptoss_trt.so"

wheel: setup
	@$(RUN)/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

sanitize: library
	@$(RUN)/python tests/gpu/sanitize.py

soak: setup
	@$(RUN)/python tests/soak/run.py --seconds $(SOAK_SECONDS)

fuzz: setup
	@$(RUN)/python tests/fuzz/run.py --seconds $(FUZZ_SECONDS)

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache
