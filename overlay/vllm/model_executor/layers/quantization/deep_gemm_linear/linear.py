# SPDX-License-Identifier: Apache-2.0
"""One block-FP8 linear call through DeepGEMM, or None for vLLM's own path.

A call decides by a table look-up, allocates two buffers and makes two launches.
Everything that a launch depends on is part of the key it is kept under: shapes,
dtypes, strides and device for the decision; addresses and row counts for TMA
descriptors. A descriptor holds no reference, so weights may be updated in
place, replaced or moved: a new address is a new descriptor.
"""
import ctypes
import threading
from typing import Dict, List, Optional, Tuple

import torch
from vllm.logger import init_logger

from . import driver, gate, kernel_cache, plan
from .background import compile_later
from .quantize import Quantizer

logger = init_logger("vllm.deep_gemm_linear")

# Calls so far by the path they took.
counts = {"deep_gemm": 0, "stock_refused": 0, "stock_missing_kernel": 0}

# Launch structures are shared by the threads of a process.
_lock = threading.Lock()
_MAX_DESCRIPTORS = 4096


class Gemm:
    """One loaded kernel on one device."""

    def __init__(self, spec: kernel_cache.KernelSpec, cubin: bytes, device: int):
        self.spec = spec
        shared, self._swizzle, _ = kernel_cache.smem_bytes(spec)
        kernel = driver.Kernel(cubin)
        kernel.load(device, shared)
        self._kernel = kernel
        self._out, self._scales_b = ctypes.c_void_p(), ctypes.c_void_p()
        self._rows = ctypes.c_uint32()
        maps = [driver.TensorMap() for _ in range(4)]
        self._launch = driver.Launch(
            kernel, plan.threads(spec), shared,
            [self._out, self._scales_b, ctypes.c_void_p(), self._rows, *maps])
        self._maps: Dict[Tuple[int, ...], driver.TensorMap] = {}

    def _map(self, *key: int) -> driver.TensorMap:
        """A descriptor. `key`: kind, address, and what else decides it."""
        found = self._maps.get(key)
        if found is None:
            if len(self._maps) >= _MAX_DESCRIPTORS:
                # The driver copies them at launch; the caller holds those of this one.
                self._maps.clear()
            found = self._maps[key] = self._describe(*key)
        return found

    def _describe(self, kind: int, address: int, rows: int, box: int) -> driver.TensorMap:
        spec, k = self.spec, self.spec.k
        if kind == 1:
            return driver.tensor_map(driver.FLOAT32, address, (rows, k // 128), (rows,),
                                     (box, spec.depth or 1), 0)
        if kind == 3:
            # Clipped to the rows that exist: the output needs no padding.
            width = self._swizzle // 2 or spec.block_n
            return driver.tensor_map(driver.BFLOAT16, address, (spec.n, rows), (spec.n,),
                                     (width, spec.block_m), self._swizzle)
        if kind == 2:
            rows, box = spec.n, spec.block_n
        if spec.depth:
            # K in blocks, so that one copy brings several with their own swizzle.
            return driver.tensor_map(driver.UINT8, address, (128, rows, k // 128), (k, 128),
                                     (128, box, spec.depth), 128)
        return driver.tensor_map(driver.UINT8, address, (k, rows), (k,), (128, box), 128)

    def describe_weight(self, address: int) -> driver.TensorMap:
        return self._map(2, address, 0, 0)

    def run(self, tile: plan.Tile, m: int, q: int, scales: int, weight: int,
            weight_scale: int, out: int, stream: int) -> None:
        """out[m, N] = q[rows, K] x weight[N, K]^T with their scales; all are addresses."""
        rows, box = tile.rows, tile.box
        maps = (self._map(0, q, rows, box), self.describe_weight(weight),
                self._map(1, scales, rows, box), self._map(3, out, m, 0))
        self._launch.pointers[4:] = [ctypes.addressof(one) for one in maps]
        self._out.value, self._scales_b.value = out, weight_scale
        self._rows.value = rows
        self._launch.run(tile.grid, 1, stream)


class Layer:
    """All kernels of one weight shape on one device."""

    def __init__(self, n: int, k: int, device: torch.device):
        self.n, self.k, self.device = n, k, device
        self.num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self._gemms: Dict[kernel_cache.KernelSpec, Gemm] = {}
        self._tiles: Dict[int, plan.Tile] = {}
        self._missing: Dict[kernel_cache.KernelSpec, threading.Event] = {}

    def tile(self, m: int) -> plan.Tile:
        """The tile for `m` rows, from the plan."""
        found = self._tiles.get(m)
        if found is None:
            found = self._tiles[m] = plan.tile(m, self.n, self.k, self.num_sms)
        return found

    def load(self, spec: kernel_cache.KernelSpec) -> Optional[Gemm]:
        """The kernel, loaded from the cache; None if it is not there.

        Never compiles. An unloadable file is discarded and counts as missing.
        """
        gemm = self._gemms.get(spec)
        if gemm is not None:
            return gemm
        cache = cache_of_process()
        path = cache.find(spec)
        if path is None:
            return None
        try:
            with torch.cuda.device(self.device):
                gemm = Gemm(spec, path.read_bytes(), self.device.index)
        except driver.DriverError as error:
            logger.warning("cached kernel %s is not usable and will be made anew: %s",
                           path, error)
            cache.discard(path)
            return None
        self._gemms[spec] = gemm
        return gemm

    def touch(self, spec: kernel_cache.KernelSpec, weights: List[torch.Tensor],
              weight_scale: torch.Tensor) -> None:
        """Run a loaded kernel on one row: its code reaches the GPU with its first launch.

        Also describes `weights`, so that a first long prompt finds all of it done.
        """
        gemm, tile = self._gemms[spec], plan.launch(spec, 1, self.num_sms)
        rows, k = tile.rows, self.k
        with torch.cuda.device(self.device), _lock:
            buffer = torch.zeros(rows * (k + k // 32), dtype=torch.uint8, device=self.device)
            out = torch.empty((1, self.n), dtype=torch.bfloat16, device=self.device)
            q = buffer.data_ptr()
            gemm.run(tile, 1, q, q + rows * k, weights[0].data_ptr(), weight_scale.data_ptr(),
                     out.data_ptr(), torch._C._cuda_getCurrentRawStream(self.device.index))
            for weight in weights:
                gemm.describe_weight(weight.data_ptr())

    def _load_or_compile_later(self, spec: kernel_cache.KernelSpec) -> Optional[Gemm]:
        # A load may allocate, which ends a graph capture.
        if torch.cuda.is_current_stream_capturing():
            return None
        made = self._missing.get(spec)
        if made is not None and not made.is_set():
            return None
        gemm = self.load(spec)
        if gemm is None:
            logger.warning(
                "kernel %s is not cached; vLLM's own path serves until it is "
                "compiled in the background", spec.name)
            self._missing[spec] = compile_later(cache_of_process(), spec)
        return gemm

    def run(self, x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor,
            bias: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
        m, k = x.shape[0], self.k
        out = torch.empty((m, self.n), dtype=x.dtype, device=self.device)
        if m == 0:
            return out
        tile = self._tiles.get(m) or self.tile(m)
        gemm = self._gemms.get(tile.spec)
        if gemm is None:
            gemm = self._load_or_compile_later(tile.spec)
            if gemm is None:
                counts["stock_missing_kernel"] += 1
                return None
        stride, address = x.stride(0), x.data_ptr()
        if x.stride(1) != 1 or stride % 8 or address % 16:
            # Not contiguous(): that keeps a lone row where it is, aligned or not.
            x = x.clone(memory_format=torch.contiguous_format)
            stride, address = k, x.data_ptr()
        # FP8 values of `rows` rows, then their scales: one allocation.
        rows = tile.rows
        buffer = torch.empty(rows * (k + k // 32), dtype=torch.uint8, device=self.device)
        q = buffer.data_ptr()
        scales = q + rows * k
        index = self.device.index
        stream = torch._C._cuda_getCurrentRawStream(index)
        quantizer = quantizer_of_device(index)
        with _lock:
            quantizer.run(m, k, address, stride, q, scales, rows, stream)
            gemm.run(tile, m, q, scales, weight.data_ptr(), weight_scale.data_ptr(),
                     out.data_ptr(), stream)
        counts["deep_gemm"] += 1
        return out if bias is None else out.add_(bias)


_layers: Dict[tuple, Optional[Layer]] = {}
_quantizers: Dict[int, Quantizer] = {}
_cache: Optional[kernel_cache.KernelCache] = None


def cache_of_process() -> kernel_cache.KernelCache:
    """The kernel cache that this process reads and fills."""
    global _cache
    if _cache is None:
        _cache = kernel_cache.KernelCache(gate.include_folder())
    return _cache


def quantizer_of_device(device: int) -> Quantizer:
    """The quantizer, compiled on the first request in the process."""
    found = _quantizers.get(device)
    if found is None:
        found = next(iter(_quantizers.values()), None) or Quantizer()
        with torch.cuda.device(device):
            found.load(device)
        _quantizers[device] = found
    return found


def layer_for(activation: torch.dtype, weight: torch.Tensor, weight_scale: torch.Tensor,
              block_size: List[int], device: torch.device) -> Optional[Layer]:
    """The Layer of a weight, or None if it runs vLLM's own path.

    Decided once for each combination of shapes, dtypes, strides and device; the
    decision and its reason are logged once.
    """
    key = (weight.shape, weight.dtype, weight.stride(), weight_scale.shape,
           weight_scale.dtype, weight_scale.stride(), activation, tuple(block_size),
           device.index)
    if key not in _layers:
        why = gate.device_refusal(device.index or 0)
        why = why or gate.weight_refusal(activation, weight, weight_scale, block_size)
        if why is None:
            n, k = weight.shape
            _layers[key] = Layer(n, k, device)
            logger.info("DeepGEMM serves weights of shape [%d, %d] on %s", n, k, device)
        else:
            _layers[key] = None
            logger.info("vLLM's own path serves weights of shape %s on %s: %s",
                        list(weight.shape), device, why)
    return _layers[key]


def block_fp8_linear(x: torch.Tensor, weight: torch.Tensor, block_size: List[int],
                     weight_scale: torch.Tensor,
                     bias: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    """x @ weight^T with both quantized to FP8, plus `bias`.

    x: bfloat16 [M, K], any M and any row stride; quantized here, 1x128.
    weight: float8_e4m3fn [N, K]; weight_scale: float32 [ceil(N/128), K/128].
    bias: [N] or None. Returns bfloat16 [M, N], or None where vLLM's own path
    must serve: a refused weight, or a kernel that is not there yet.
    """
    layer = layer_for(x.dtype, weight, weight_scale, block_size, x.device)
    if layer is None:
        counts["stock_refused"] += 1
        return None
    if layer.device.index != torch.cuda.current_device():
        with torch.cuda.device(layer.device):
            return layer.run(x, weight, weight_scale, bias)
    return layer.run(x, weight, weight_scale, bias)
