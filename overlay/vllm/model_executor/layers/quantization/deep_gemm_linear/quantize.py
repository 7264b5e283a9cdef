# SPDX-License-Identifier: Apache-2.0
"""Group quantization of activations, straight into DeepGEMM's layout.

One pass: 128 neighbouring values of a row share one float32 scale; the scales
are written column-major with the row count rounded up to 4 (TMA-aligned), so
that nothing has to be moved between this kernel and the GEMM.

The arithmetic is that of vLLM's own `per_token_group_quant_fp8` (absolute
maximum over the group, at least 1e-10, over 448), in the same order, so both
paths see the same 8-bit values.
"""
import os
import tempfile
from ctypes import c_int32, c_void_p

import torch
import triton
import triton.language as tl

from . import driver

GROUP_SIZE = 128
GROUPS_PER_PROGRAM = 16
NUM_WARPS = 4
EPS, FP8_MAX = 1e-10, 448.0


@triton.jit(do_not_specialize=["row_stride_16b", "num_groups", "scales_stride"])
def _group_quantize(x_ptr, q_ptr, scales_ptr, row_stride_16b, num_groups,
                    scales_stride, eps: tl.constexpr, fp8_max: tl.constexpr,
                    GROUPS: tl.constexpr, CHAINED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if CHAINED:
        # Launched before x is there: wait for it. From then on the GEMM may come and
        # read weights, which whoever wrote them has finished; it waits before it reads
        # q. The zero ties every address to the wait.
        row += tl.inline_asm_elementwise(
            "griddepcontrol.wait; griddepcontrol.launch_dependents; mov.u32 $0, 0;",
            "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    live = group < num_groups

    x = tl.load(x_ptr + row * (row_stride_16b.to(tl.int64) * 8) + column,
                mask=live[:, None], other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), axis=1), eps) / fp8_max
    q = tl.clamp(x / scale[:, None], -fp8_max, fp8_max)
    tl.store(q_ptr + row * (num_groups.to(tl.int64) * 128) + column,
             q.to(q_ptr.dtype.element_ty), mask=live[:, None])
    tl.store(scales_ptr + group.to(tl.int64) * scales_stride + row, scale,
             mask=live)


def _compile():
    """Triton's compiled kernel; its cache need not be writable.

    A uid without a home cannot write ~/.triton, and Triton does not go on without.
    """
    def compiled():
        return _group_quantize.warmup(
            torch.bfloat16, torch.float8_e4m3fn, torch.float32, 2, 2, 2,
            EPS, FP8_MAX, GROUPS=GROUPS_PER_PROGRAM, CHAINED=True,
            num_warps=NUM_WARPS, grid=(1, 1))
    try:
        return compiled()
    except OSError:
        before = os.environ.get("TRITON_CACHE_DIR")
        with tempfile.TemporaryDirectory() as folder:
            os.environ["TRITON_CACHE_DIR"] = folder
            try:
                return compiled()
            finally:
                if before is None:
                    del os.environ["TRITON_CACHE_DIR"]
                else:
                    os.environ["TRITON_CACHE_DIR"] = before


class Quantizer:
    """The compiled kernel, launched without Triton's own launcher.

    Triton compiles it once a process (its bundled ptxas, no CUDA toolkit); one
    binary serves every shape and every Hopper device.
    """

    def __init__(self):
        compiled = _compile()
        shared = compiled.metadata.shared
        self._kernel = driver.Kernel(compiled.asm["cubin"], compiled.metadata.name)
        self._x, self._q, self._scales = c_void_p(), c_void_p(), c_void_p()
        self._stride, self._groups, self._scales_stride = c_int32(), c_int32(), c_int32()
        # Later Tritons append scratch pointers; a kernel without them ignores these.
        self._launch = driver.Launch(
            self._kernel, NUM_WARPS * 32, shared,
            [self._x, self._q, self._scales, self._stride, self._groups,
             self._scales_stride, c_void_p(), c_void_p()])

    def load(self, device: int) -> None:
        """Load for the current device."""
        self._kernel.load(device, self._launch.config.shared_bytes)

    def run(self, m: int, k: int, x: int, row_stride: int, q: int, scales: int,
            scales_stride: int, stream: int) -> None:
        """Quantize `m` rows of `k` bfloat16 values at address `x`.

        `row_stride` counts elements and is a multiple of 8, `x` is 16-byte
        aligned. Writes float8_e4m3fn [m, k] at `q` and float32 scales at
        `scales`, where row r of group g is at g * `scales_stride` + r.
        """
        self._x.value, self._q.value, self._scales.value = x, q, scales
        self._stride.value = row_stride // 8
        groups = self._groups.value = k // GROUP_SIZE
        self._scales_stride.value = scales_stride
        self._launch.run(m, -(-groups // GROUPS_PER_PROGRAM), stream)
