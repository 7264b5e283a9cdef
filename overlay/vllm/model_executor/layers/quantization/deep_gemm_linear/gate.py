# SPDX-License-Identifier: Apache-2.0
"""Which layers run through DeepGEMM, and why the others do not.

Two questions, each answered once: can this device run DeepGEMM at all, and can
this weight. An answer is None for yes or the reason for no, in one sentence.
"""
import functools
import importlib
from typing import Optional, Sequence

import torch
from vllm.platforms import current_platform

from . import driver, kernel_cache, shapes

BLOCK_SIZE = (128, 128)


@functools.cache
def include_folder() -> str:
    """DeepGEMM's header folder. Raises ImportError if the package is not usable."""
    package = importlib.import_module("deep_gemm")
    if not hasattr(package, "gemm_fp8_fp8_bf16_nt"):
        raise ImportError("the installed deep_gemm has no gemm_fp8_fp8_bf16_nt, "
                          "commit bfe983c is needed")
    importlib.import_module("deep_gemm.jit_kernels.gemm")
    return package.__path__[0] + "/include"


@functools.cache
def device_refusal(device: int) -> Optional[str]:
    """Why no layer on this CUDA device can run through DeepGEMM, or None.

    Nothing of DeepGEMM is imported before the platform and the exact compute
    capability 9.0 are known.
    """
    if not current_platform.is_cuda():
        return "the platform is not CUDA"
    capability = current_platform.get_device_capability(device)
    if capability is None or (capability[0], capability[1]) != (9, 0):
        found = "unknown" if capability is None else f"{capability[0]}.{capability[1]}"
        return f"compute capability is {found}, DeepGEMM's kernels are for exactly 9.0"
    try:
        include = include_folder()
        kernel_cache.sources_key(include)
    except Exception as error:
        # A broken cuda.bindings or missing headers must not end the server.
        return f"deep_gemm cannot be used: {error}"
    why = driver.unusable()
    if why:
        return why
    compiler, why = kernel_cache.find_compiler()
    cached = any((root / kernel_cache.sources_key(include)).is_dir()
                 for root in kernel_cache.roots())
    return None if compiler or cached else f"no kernel is cached and there is {why}"


def dg_supported_dtype(activation: torch.dtype, weight: torch.dtype,
                       weight_scale: torch.dtype) -> bool:
    """Whether DeepGEMM bfe983c has a kernel for these; the output is the activation's."""
    return (activation == torch.bfloat16 and weight == torch.float8_e4m3fn
            and weight_scale == torch.float32)


def weight_refusal(activation: torch.dtype, weight: torch.Tensor,
                   weight_scale: torch.Tensor,
                   block_size: Sequence[int]) -> Optional[str]:
    """Why this weight cannot run through DeepGEMM, or None.

    `weight`: [N, K]; `weight_scale`: [ceil(N / 128), K / 128]. Only shapes,
    dtypes and strides are looked at.
    """
    if not dg_supported_dtype(activation, weight.dtype, weight_scale.dtype):
        return (f"dtypes are {activation}, {weight.dtype} and {weight_scale.dtype}, not "
                "bfloat16 activations, float8_e4m3fn weights and float32 scales")
    if tuple(block_size) != BLOCK_SIZE:
        return f"block size is {list(block_size)}, not [128, 128]"
    if weight.dim() != 2:
        return f"the weight has {weight.dim()} dimensions"
    n, k = weight.shape
    why = shapes.refusal(n, k) if n else "the weight is empty"
    if why:
        return why
    wanted = (-(-n // 128), k // 128)
    if tuple(weight_scale.shape) != wanted:
        return f"scales have shape {tuple(weight_scale.shape)}, not {wanted}"
    if not weight.is_contiguous() or not weight_scale.is_contiguous():
        return "the weight or its scales are not contiguous"
    return None
