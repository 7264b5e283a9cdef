# SPDX-License-Identifier: Apache-2.0
"""The patched linear path on a CPU: the real quantizer in Triton's interpreter, the
real decision, plan and buffers, and a reference GEMM that reads those buffers by
address as DeepGEMM's kernel would.

    TRITON_INTERPRET=1 PYTHONPATH=SITE python tests/cpu_path.py

SITE holds a patched vllm. Prints the error against float32 for a few shapes and
exits 1 if one is too large. The interpreter rounds some 3 % of the conversions to
FP8 wrongly, so layouts are proven here and rounding on a GPU.
"""
import contextlib
import ctypes
import importlib.util
import os
import sys

import torch

SHAPES = ((1, 576, 512), (5, 1280, 1152), (63, 256, 384), (64, 512, 640), (65, 128, 512),
          (130, 192, 384))
BLOCK = [128, 128]


def at(address, dtype, *shape):
    """A tensor over the memory at `address`."""
    count = torch.tensor([], dtype=dtype).element_size()
    for size in shape:
        count *= size
    memory = (ctypes.c_uint8 * count).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(*shape)


class InterpretedQuantizer:
    """The overlay's Triton kernel, run by Triton's interpreter."""

    def run(self, m, k, x, row_stride, q, scales, scales_stride, stream):
        from vllm.model_executor.layers.quantization.deep_gemm_linear import quantize
        groups = k // 128
        values = at(x, torch.bfloat16, (m - 1) * row_stride + k)
        quantize._group_quantize[(m, -(-groups // quantize.GROUPS_PER_PROGRAM))](
            values, at(q, torch.float8_e4m3fn, m, k),
            at(scales, torch.float32, groups, scales_stride), row_stride // 8, groups,
            scales_stride, quantize.EPS, quantize.FP8_MAX,
            GROUPS=quantize.GROUPS_PER_PROGRAM, CHAINED=False)


class ReferenceGemm:
    """float32 product of what lies in the buffers; absent rows are poisoned first."""

    def __init__(self, spec):
        self.spec, self.described = spec, set()

    def describe_weight(self, address):
        self.described.add(address)

    def run(self, tile, m, q, scales, weight, weight_scale, out, stream):
        n, k, rows = self.spec.n, self.spec.k, tile.rows
        assert m <= rows and rows % 8 == 0 and tile.box <= self.spec.block_m
        a = at(q, torch.float8_e4m3fn, rows, k).float()
        a_scale = at(scales, torch.float32, k // 128, rows).t()
        b = at(weight, torch.float8_e4m3fn, n, k).float()
        b_scale = at(weight_scale, torch.float32, -(-n // 128), k // 128)
        full = b_scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)
        product = (a * a_scale.repeat_interleave(128, 1)) @ (b * full).t()
        at(out, torch.bfloat16, m, n).copy_(product[:m])


def stand_in_deep_gemm():
    """Where DeepGEMM is not installed: a package with what the plan asks of it."""
    if importlib.util.find_spec("deep_gemm") is None:
        sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "stand_in"))


def install():
    """Put the stand-ins where the GPU would be. Returns the linear module."""
    stand_in_deep_gemm()
    from vllm.model_executor.layers.quantization.deep_gemm_linear import gate, linear
    gate.device_refusal = lambda device: None
    torch.cuda.current_device = lambda: None
    torch.cuda.device = contextlib.nullcontext
    torch.cuda.synchronize = lambda: None
    torch.cuda.is_current_stream_capturing = lambda: False
    torch._C._cuda_getCurrentRawStream = lambda index: 0

    class Properties:
        multi_processor_count = 132

    torch.cuda.get_device_properties = lambda device: Properties
    linear.Layer.load = lambda self, spec: self._gemms.setdefault(spec, ReferenceGemm(spec))
    linear._quantizers[None] = InterpretedQuantizer()
    return linear


def weight_of(n, k):
    weight = (torch.randn(n, k).clamp(-3, 3) * 100).to(torch.float8_e4m3fn)
    return weight, torch.rand(-(-n // 128), k // 128) * 1e-3 + 1e-4


def exact(x, weight, scale):
    n = weight.shape[0]
    full = scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)
    return x.float() @ (weight.float() * full).t()


def main():
    os.environ["VLLM_USE_DEEP_GEMM_LINEAR"] = "1"
    torch.manual_seed(0)
    linear = install()
    from vllm.model_executor.layers.quantization.utils import fp8_utils
    worst = 0.0
    for m, n, k in SHAPES:
        weight, scale = weight_of(n, k)
        x = torch.randn(m, k, dtype=torch.bfloat16)
        out = fp8_utils.apply_w8a8_block_fp8_linear(x, weight, BLOCK, scale)
        wanted = exact(x, weight, scale)
        error = ((out.float() - wanted).norm() / wanted.norm()).item()
        worst = max(worst, error)
        tile = linear.layer_for(x.dtype, weight, scale, BLOCK, x.device).tile(m)
        print(f"M {m:4} N {n:5} K {k:5}: error against float32 {error:.4f}, "
              f"{tile.rows} rows quantized, kernel {tile.spec.name}")
    assert linear.counts["deep_gemm"] == len(SHAPES), linear.counts
    print(f"{len(SHAPES)} calls took the DeepGEMM path; largest error {worst:.4f}")
    return 0 if worst < 0.06 else 1


if __name__ == "__main__":
    sys.exit(main())
