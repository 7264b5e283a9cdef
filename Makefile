# make demo    apply, check and reverse on the real vLLM 0.9.1, on any CPU
# make test    lint and every test that CI runs
# make nightly the same with 10,000 random trees
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python

.PHONY: demo test lint nightly bench clean

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

test: lint
	$(RUN) tests/real_vllm.py 0.9.1 0.9.0.1 0.9.0 0.8.5.post1 0.8.5 0.8.4 0.8.3 0.9.2 > /dev/null
	$(RUN) -m pytest -q --durations=5

nightly: lint
	$(RUN) -m pytest -q --nightly

bench:
	$(PYTHON) benchmarks/linear.py --out linear.json

clean:
	rm -rf $(VENV) .cache
