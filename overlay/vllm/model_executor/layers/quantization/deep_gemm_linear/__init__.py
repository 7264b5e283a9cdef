# SPDX-License-Identifier: Apache-2.0
"""Block-FP8 linear layers through DeepGEMM, for vLLM 0.8.5 to 0.9.1 on Hopper.

    linear        one call: decide, quantize, multiply
    gate          which layers, and the reason where not
    quantize      activations to FP8 in DeepGEMM's layout
    plan          which kernel for which row count, and so all kernels there are
    kernel_cache  kernels on disk, compiled once
    driver        load and launch through the CUDA driver
    warmup        every planned kernel, before the first request

vLLM reaches in through two names, each imported where it is used. Importing
this package imports none of its modules, so a build machine can use `plan` and
`kernel_cache` without vLLM.
"""

__version__ = "0.1.0"


def __getattr__(name: str):
    if name == "block_fp8_linear":
        from .linear import block_fp8_linear as found
    elif name == "warm_up":
        from .warmup import warm_up as found
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found
