# SPDX-License-Identifier: Apache-2.0
"""These tests run inside a patched vLLM, once for each pin (tests/test_patched_vllm.py)."""
import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))


def pytest_ignore_collect(collection_path, config):
    return None if os.environ.get("PATCHED_VLLM") else True


@pytest.fixture(autouse=True)
def seeded():
    """The interpreter's wrong roundings make the error vary with the data."""
    import torch
    torch.manual_seed(0)


@pytest.fixture
def path():
    """The linear module with stand-ins where the GPU would be; counters at zero."""
    import cpu_path
    linear = cpu_path.install()
    os.environ["VLLM_USE_DEEP_GEMM_LINEAR"] = "1"
    linear._layers.clear()
    for name in linear.counts:
        linear.counts[name] = 0
    return linear
