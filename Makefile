# make demo    train, export, serve and measure a drafter on this machine's CPU; METHOD=dflash or dspark, RECIPE=recipes/...
# make test    the whole suite, real vLLM included
# make lint    style and types
# Each sets up .venv by itself and may be run again.

PYTHON ?= python3
RECIPE ?= recipes/smollm2_cpu.yaml
METHOD ?= eagle3
BIN := .venv/bin
RUN := runs/$(notdir $(basename $(RECIPE)))-$(METHOD)

# vLLM serves DSpark with its second model runner, whose kernels a CPU can only interpret: right, and some ten times slower.
SERVING_dspark := PYTHONPATH=$(CURDIR)/tests/vllm_cpu/triton_interpreter TRITON_INTERPRET=1 VLLM_USE_V2_MODEL_RUNNER=1
PASSES_dspark := --num-drafts 5 --concurrency 4 --prompts 8 --repeats 1

# What accelerate would otherwise say that it assumes; --quiet leaves our one line of error without its traceback.
LAUNCH := --quiet --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no

.PHONY: demo test lint

demo: .venv/ready
	@echo "== 1 of 5: prompts"
	$(BIN)/python data/synthesize.py $(RECIPE)
	@echo "== 2 of 5: the target's answers"
	$(BIN)/python data/regenerate.py $(RECIPE)
	@echo "== 3 of 5: training"
	$(BIN)/accelerate launch $(LAUNCH) train/$(METHOD).py $(RECIPE)
	@echo "== 4 of 5: export"
	$(BIN)/python export/checkpoint.py $(RUN)
	@echo "== 5 of 5: serving with and without the drafter"
	$(SERVING_$(METHOD)) $(BIN)/python eval/speedup.py $(RUN)/export $(PASSES_$(METHOD))

test: lint
	$(BIN)/python -m pytest

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# torch first and by itself: its CPU build is not on PyPI. Where pip does not find one, PyTorch's own index has it.
.venv/ready: requirements-cpu.lock pyproject.toml Makefile tests/vllm_cpu/plugin/pyproject.toml tests/vllm_cpu/plugin/vllm_cpu_fixes.py
	@echo "== setting up .venv: some minutes, 4 GB"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet "torch==2.13.0+cpu" || \
		$(BIN)/python -m pip install --quiet "torch==2.13.0+cpu" --index-url https://download.pytorch.org/whl/cpu
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -r requirements-cpu.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation ./tests/vllm_cpu/plugin -e .
	touch .venv/ready
