# SPDX-License-Identifier: Apache-2.0
"""Skips every GPU test, with the reason, where the DeepGEMM path cannot run."""
import os

import pytest

os.environ.setdefault("VLLM_USE_DEEP_GEMM_LINEAR", "1")


def why_not():
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if not torch.cuda.is_available():
        return "no CUDA GPU"
    if torch.cuda.get_device_capability() != (9, 0):
        return "the GPU is not a Hopper (compute capability 9.0)"
    try:
        from vllm.model_executor.layers.quantization.deep_gemm_linear import gate
    except ImportError:
        return "the vllm that is imported is not patched: python apply.py"
    return gate.device_refusal(0)


def pytest_collection_modifyitems(items):
    mine = [item for item in items if "tests/gpu" in str(item.path)]
    if mine:
        reason = why_not()
        for item in mine:
            item.add_marker(pytest.mark.gpu)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))
