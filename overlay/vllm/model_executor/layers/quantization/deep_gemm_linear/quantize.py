# SPDX-License-Identifier: Apache-2.0
"""Group quantization of activations, straight into DeepGEMM's layout.

One pass: 128 neighbouring values of a row share one float32 scale; the scales
are written column-major with the row count rounded up to 4 (TMA-aligned), so
that nothing has to be moved between this kernel and the GEMM.

The arithmetic is that of vLLM's own `per_token_group_quant_fp8` (absolute
maximum over the group, at least 1e-10, over 448), in the same order, so both
paths see the same 8-bit values.
"""
import triton
import triton.language as tl

GROUP_SIZE = 128
GROUPS_PER_PROGRAM = 8
NUM_WARPS = 4


@triton.jit(do_not_specialize=["row_stride_16b", "num_groups", "scales_stride"])
def _group_quantize(x_ptr, q_ptr, scales_ptr, row_stride_16b, num_groups,
                    scales_stride, eps: tl.constexpr, fp8_max: tl.constexpr,
                    GROUPS: tl.constexpr, TRIGGER: tl.constexpr):
    if TRIGGER:
        # The GEMM may start its prologue now; it waits before it reads q.
        tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [],
            dtype=tl.int32, is_pure=False, pack=1)
    row = tl.program_id(0).to(tl.int64)
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
