# SPDX-License-Identifier: Apache-2.0
"""The answer that the plan asks of DeepGEMM, in a simple form of our own."""


def get_smem_config(num_stages, k, block_m, block_n, block_k=128):
    """Bytes, swizzle and padding: room for the output tile and the pipeline."""
    size = 2 * block_m * block_n + num_stages * (block_k * (block_m + block_n) + 4 * block_m)
    return size + 8 * (k // block_k) + 16 * num_stages, 0, 0
