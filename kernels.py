#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Bake, look at and carry the kernel cache; runs the overlay's code without vLLM."""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent
                       / "overlay/vllm/model_executor/layers/quantization"))
from deep_gemm_linear.__main__ import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
