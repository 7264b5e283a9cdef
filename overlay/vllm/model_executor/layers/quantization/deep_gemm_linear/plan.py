# SPDX-License-Identifier: Apache-2.0
"""Which kernel serves which row count, and so every kernel a weight can ask for.

Up to 512 rows the tile is the one with the least predicted time,

    max(waves x (K / 128 x step + 1 us), N x K bytes at the memory's rate),

where a wave is one tile on every SM and `step` is the time of 128 values of K on
one SM, a property of the tile alone, fitted to 1,900 timings on an H200 (132 SMs).
Where memory decides, the tile that leaves the busiest SM the least to read wins.
DeepGEMM's own chooser counts waves but knows no step times; it is followed above
512 rows, where it also shares tiles between two thread blocks.

Neither rule sees more of M than the number of 64-row blocks, which is why the
set of kernels is small and can be listed. No GPU and no vLLM are needed here.
"""
import functools
from typing import Dict, List, NamedTuple, Tuple

from .kernel_cache import KernelSpec

# Nanoseconds of one step of 128 along K, by (block_m, block_n).
STEP_NS: Dict[Tuple[int, int], int] = {
    (64, 16): 110, (64, 24): 123, (64, 32): 124, (64, 40): 139, (64, 48): 144,
    (64, 56): 159, (64, 64): 153, (64, 72): 191, (64, 80): 194, (64, 88): 217,
    (64, 96): 247, (64, 104): 247, (64, 112): 278, (64, 120): 286, (64, 160): 320,
    (128, 16): 134, (128, 24): 157, (128, 32): 158, (128, 40): 198, (128, 48): 208,
    (128, 56): 248, (128, 64): 228, (128, 80): 314, (128, 96): 330, (128, 104): 375,
    (128, 112): 459, (128, 120): 414, (128, 144): 529, (128, 160): 422,
    (256, 48): 422, (256, 80): 558, (256, 112): 790,
}
TILE_NS = 1000
# What one SM reads when all of them read, in bytes per nanosecond.
SM_READ = 32
MAX_PREDICTED_M = 512
# Below this weight size the early start of the GEMM costs more than it hides.
_OVERLAP_MIN_BYTES = 6 << 20
_SMEM_BYTES = 232448


class Tile(NamedTuple):
    """How one row count is run: the kernel and what a launch passes to it.

    `rows`: rows of the quantized input that exist, at least M. `box`: rows that
    one copy brings into a tile. `grid`: thread blocks.
    """
    spec: KernelSpec
    rows: int
    box: int
    grid: int


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def threads(spec: KernelSpec) -> int:
    """Threads of a block: one warp group copies, one or two multiply."""
    return 256 if spec.block_m == 64 else 384


def overlaps(spec: KernelSpec) -> bool:
    """Whether the GEMM is set up while the quantizer runs."""
    return spec.n * spec.k >= _OVERLAP_MIN_BYTES


@functools.cache
def _stages(k: int, block_m: int, block_n: int) -> int:
    """Deepest pipeline that fits shared memory and K.

    Where a tile straddles two scale blocks in few ways DeepGEMM unrolls over
    both, and more than four stages would make the code too large.
    """
    from deep_gemm.jit_kernels.gemm import get_smem_config
    unrolled = 128 % block_n != 0 and block_n % 32 == 0
    for stages in ((4, 3) if unrolled else (8, 7, 6, 5, 4, 3)):
        if stages <= k // 128 and \
                get_smem_config(stages, k, block_m, block_n)[0] <= _SMEM_BYTES:
            return stages
    raise ValueError(f"no pipeline of at least 3 stages for K = {k}, "
                     f"{block_m}x{block_n}")


def kernel_of_tile(n: int, k: int, block_m: int, block_n: int, cluster: int = 1) -> KernelSpec:
    """The kernel for a weight [n, k] with one tile; a pair shares the tile's longer side."""
    return KernelSpec(n, k, block_m, block_n, _stages(k, block_m, block_n), cluster,
                      cluster > 1 and block_m > block_n)


@functools.cache
def _kernel(blocks: int, n: int, k: int, num_sms: int) -> KernelSpec:
    """The kernel for `blocks` blocks of 64 rows."""
    m = blocks * 64
    if m <= MAX_PREDICTED_M:
        memory = n * k / num_sms / SM_READ

        def predicted(tile: Tuple[int, int]) -> Tuple[float, int, int]:
            tiles = _ceil_div(m, tile[0]) * _ceil_div(n, tile[1])
            waves = _ceil_div(tiles, num_sms)
            compute = waves * (k // 128 * STEP_NS[tile] + TILE_NS)
            return max(compute, memory), waves * tile[0] * tile[1], -tile[1]
        block_m, block_n = min(STEP_NS, key=predicted)
        return kernel_of_tile(n, k, block_m, block_n)
    from deep_gemm.jit_kernels.gemm import get_best_configs
    _, block_m, block_n, stages, (cluster, share_a), _ = get_best_configs(
        m, n, k, 1, num_sms)
    return KernelSpec(n, k, block_m, block_n, min(stages, k // 128), cluster,
                      share_a if cluster > 1 else False)


def tile(m: int, n: int, k: int, num_sms: int) -> Tile:
    """The tile for an [m, k] x [n, k]^T product on a GPU with `num_sms` SMs.

    m >= 1, n % 64 == 0, k % 128 == 0, k >= 384.
    """
    return launch(_kernel(_ceil_div(m, 64), n, k, num_sms), m, num_sms)


def launch(spec: KernelSpec, m: int, num_sms: int) -> Tile:
    """How `spec` is run on `m` rows, m >= 1."""
    # A lone block is brought in by the 8 rows, several are brought in whole:
    # rows that no copy reaches cost nothing, rows past a tensor's end cost double.
    rows = _ceil_div(m, 8) * 8 if m <= spec.block_m else \
        _ceil_div(m, spec.block_m) * spec.block_m
    tiles = _ceil_div(rows, spec.block_m) * _ceil_div(spec.n, spec.block_n)
    waves = _ceil_div(tiles, num_sms)
    grid = _ceil_div(_ceil_div(tiles, waves), spec.cluster) * spec.cluster
    return Tile(spec, rows, min(rows, spec.block_m), grid)


def kernels(n: int, k: int, num_sms: int, max_m: int) -> List[KernelSpec]:
    """Every kernel that 1 to `max_m` rows can ask for, in the order of first use."""
    found = {}
    for blocks in range(1, _ceil_div(max_m, 64) + 1):
        found[_kernel(blocks, n, k, num_sms)] = None
    return list(found)
