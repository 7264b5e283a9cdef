# make demo    apply, check and reverse on the real vLLM 0.9.1, on any CPU
# make test    lint and every test that CI runs
# make nightly the same with 10,000 random trees
# make bench   linear layers alone, then serving off and on, and a report (Hopper)
# make accuracy  lm-eval off and on, paired (Hopper, lm_eval)
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python

MODEL ?= Qwen/Qwen3-32B-FP8
TASKS ?= gsm8k

.PHONY: demo test lint nightly bench accuracy image clean

$(VENV)/ready: requirements-dev.txt
	@echo "setting up $(VENV): about 2 minutes"
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install -q --disable-pip-version-check -r requirements-dev.txt
	$(VENV)/bin/pip install -q --disable-pip-version-check --no-deps triton==3.3.0
	@touch $@

demo: $(VENV)/ready
	$(RUN) demo.py

lint: $(VENV)/ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(RUN) ci/check_patches.py
	$(VENV)/bin/hadolint Dockerfile
	$(VENV)/bin/shellcheck .ci/run ci/*.sh tools/*.sh

test: lint
	$(RUN) tests/real_vllm.py 0.9.1 0.9.0.1 0.9.0 0.8.5.post1 0.8.5 0.8.4 0.8.3 0.9.2 > /dev/null
	$(RUN) -m pytest -q --durations=5

nightly: lint
	$(RUN) -m pytest -q --nightly

# Both name what is missing where the path cannot run.
bench:
	$(PYTHON) doctor.py
	mkdir -p measured
	$(PYTHON) benchmarks/linear.py --out measured/linear.json
	$(PYTHON) benchmarks/serve.py $(MODEL) --sweep --out measured/serve.json
	$(PYTHON) benchmarks/report.py measured/*.json --out measured/report

accuracy:
	$(PYTHON) doctor.py
	mkdir -p measured
	$(PYTHON) benchmarks/accuracy.py $(MODEL) --tasks $(TASKS) --out measured/accuracy.json
	$(PYTHON) benchmarks/report.py measured/*.json --out measured/report

# The Dockerfile, built without a Docker engine: DEEPGEMM=DIR
image: $(VENV)/ready
	bash ci/image.sh --deepgemm "$(DEEPGEMM)"

clean:
	rm -rf $(VENV) .cache
