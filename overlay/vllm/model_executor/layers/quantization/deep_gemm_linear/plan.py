# SPDX-License-Identifier: Apache-2.0
"""Which kernel serves which row count, and so every kernel a weight can ask for.

The tile is the one whose multiplications take the least time,

    waves x (K / 128 x step + 1 us),

where a wave is one tile on every SM and `step` is the time of 128 values of K on
one SM, a property of the tile and the kernel alone, measured on an H200 (132 SMs) by
`benchmarks/linear.py --tiles`. Reading the weight takes the same time whatever the
tile, and is met best by the tile that needs the least of the SMs. DeepGEMM's own
chooser counts waves but knows no step times: 256x112 tiles fill M = 2048 better than
128x160 and take a quarter longer.

There are two kernels: DeepGEMM's, and for one block of rows our own, which hides a
step's additions behind the next step's product (`overlapped_gemm.py`).

The rule sees no more of M than the number of 64-row blocks, which is why the set
of kernels is small and can be listed. No GPU and no vLLM are needed here.
"""
import functools
from typing import Dict, Iterator, List, NamedTuple, Tuple

from .kernel_cache import KernelSpec, smem_bytes

# Nanoseconds of one step of 128 along K, by (block_m, block_n).
STEP_NS: Dict[Tuple[int, int], int] = {
    (64, 16): 134, (64, 24): 150, (64, 32): 151, (64, 40): 170, (64, 48): 176, (64, 56): 194,
    (64, 64): 187, (64, 72): 216, (64, 80): 226, (64, 88): 249, (64, 96): 303, (64, 104): 275,
    (64, 112): 289, (64, 120): 317, (64, 128): 286, (64, 160): 373, (128, 16): 155,
    (128, 24): 180, (128, 32): 182, (128, 40): 228, (128, 48): 224, (128, 56): 252,
    (128, 64): 240, (128, 80): 345, (128, 96): 360, (128, 104): 442, (128, 120): 483,
    (128, 128): 420, (128, 160): 515, (256, 48): 430, (256, 80): 632, (256, 128): 840,
}
# The same for our own kernel. Tiles of 128 rows are on STEP_NS's scale: DeepGEMM's value
# times what whole calls at M = 96 and 128 took against its kernel. 64x128 has room for
# one step a stage only and is slow where memory decides, so it stands higher than timed.
OVERLAPPED_NS: Dict[Tuple[int, int], int] = {
    (64, 16): 117, (64, 24): 125, (64, 32): 130, (64, 40): 144, (64, 48): 149, (64, 56): 160,
    (64, 64): 147, (64, 72): 182, (64, 80): 189, (64, 88): 211, (64, 96): 205, (64, 104): 250,
    (64, 112): 271, (64, 120): 283, (64, 128): 300, (128, 16): 155, (128, 24): 173,
    (128, 32): 168, (128, 40): 221, (128, 48): 229, (128, 56): 253, (128, 64): 205,
    (128, 80): 308, (128, 96): 337, (128, 104): 448, (128, 112): 430, (128, 120): 477,
    (128, 128): 385,
}
TILE_NS = 1000
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
    """Threads of a block: one warp group copies, one or two multiply.

    Our own kernel copies with two warps where registers need not be moved between groups.
    """
    if spec.block_m == 64:
        return 192 if spec.depth else 256
    return 384


@functools.cache
def _spec(n: int, k: int, block_m: int, block_n: int, overlapped: bool) -> KernelSpec:
    """A kernel with the deepest pipeline that fits shared memory and K, and that helps."""
    steps = k // 128
    if overlapped:
        # Two steps a stage, if that leaves enough stages to keep copies under way; more
        # than six of them only wait for memory.
        limits = [(2, 6, min(5, _ceil_div(steps, 2))), (1, 16, 3)]
    else:
        # Where a tile straddles two scale blocks in few ways DeepGEMM unrolls over
        # both, and more than four stages would make the code too large.
        limits = [(0, 4 if 128 % block_n != 0 and block_n % 32 == 0 else 8, 3)]
    for depth, most, least in limits:
        for stages in range(most, least - 1, -1):
            spec = KernelSpec(n, k, block_m, block_n, stages, depth)
            if stages <= _ceil_div(steps, depth or 1) and smem_bytes(spec)[0] <= _SMEM_BYTES:
                return spec
    raise ValueError(f"no pipeline of at least 3 stages for K = {k}, "
                     f"{block_m}x{block_n}")


def tiles(m: int, n: int, block_m: int, block_n: int) -> int:
    """How many tiles cover an output of [m, n]."""
    return _ceil_div(m, block_m) * _ceil_div(n, block_n)


def candidates(m: int, n: int, k: int, num_sms: int) -> Iterator[KernelSpec]:
    """The kernels that could serve `m` rows, the one with the least predicted time first."""
    ranked = [(_ceil_div(tiles(m, n, *shape), num_sms) * (k // 128 * step + TILE_NS),
               shape, overlapped)
              for overlapped, table in ((False, STEP_NS), (True, OVERLAPPED_NS))
              for shape, step in table.items() if not overlapped or m <= shape[0]]
    return (_spec(n, k, *shape, overlapped) for _, shape, overlapped in sorted(ranked))


@functools.cache
def _kernel(blocks: int, n: int, k: int, num_sms: int) -> KernelSpec:
    """The kernel for `blocks` blocks of 64 rows."""
    return next(candidates(blocks * 64, n, k, num_sms))


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
    count = tiles(m, spec.n, spec.block_m, spec.block_n)
    # No more thread blocks than the number of waves needs.
    grid = _ceil_div(count, _ceil_div(count, num_sms))
    return Tile(spec, rows, min(rows, spec.block_m), grid)


def kernels(n: int, k: int, num_sms: int, max_m: int) -> List[KernelSpec]:
    """Every kernel that 1 to `max_m` rows can ask for, in the order of first use."""
    found = {}
    for blocks in range(1, _ceil_div(max_m, 64) + 1):
        found[_kernel(blocks, n, k, num_sms)] = None
    return list(found)
