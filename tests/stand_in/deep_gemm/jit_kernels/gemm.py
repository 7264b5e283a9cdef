# SPDX-License-Identifier: Apache-2.0
"""The two answers that the plan asks of DeepGEMM, in a simple form of our own."""


def get_smem_config(num_stages, k, block_m, block_n, block_k=128):
    """Bytes, swizzle and padding: room for the output tile and the pipeline."""
    size = 2 * block_m * block_n + num_stages * (block_k * (block_m + block_n) + 4 * block_m)
    return size + 8 * (k // block_k) + 16 * num_stages, 0, 0


def get_best_configs(m, n, k, num_groups, num_sms):
    """One fixed tile that depends on the number of waves, as a real chooser's does."""
    block_n = 128 if -(-m // 128) * -(-n // 128) >= num_sms else 64
    stages = min(4, k // 128)
    cluster = (2, True) if n // block_n % 2 == 0 and num_sms % 2 == 0 else (1, True)
    return num_sms, 128, block_n, stages, cluster, get_smem_config(stages, k, 128, block_n)
