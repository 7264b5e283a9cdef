# SPDX-License-Identifier: Apache-2.0
"""The CUDA driver, by ctypes: load a cubin, describe tensors for TMA, launch.

DeepGEMM's own launcher spends about 70 us of host time a call on bindings that
build every structure anew. Here a launch is one foreign call over structures
that were laid out once; only addresses, the row count and the stream change.
Neither a CUDA toolkit nor cuobjdump is needed: the driver names the kernels in
a cubin (since CUDA 12.4).

Source: CUDA driver API reference, modules "Library Management", "Tensor Map
Object Management" and "Execution Control".
"""
import ctypes
import functools
import threading
from ctypes import byref, c_int, c_uint32, c_uint64, c_void_p
from typing import Optional, Sequence

# Enumerators of cuda.h that are used here.
UINT8, FLOAT32, BFLOAT16 = 0, 7, 9
_SWIZZLE = {0: 0, 32: 1, 64: 2, 128: 3}
_L2_PROMOTION_256B = 3
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
_PROGRAMMATIC_STREAM_SERIALIZATION = 6
_MIN_DRIVER = 12040


class DriverError(RuntimeError):
    """A driver call failed; the text names the call and CUDA's own error."""


@functools.cache
def _libcuda() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverError(f"the CUDA driver cannot be loaded: {error}") from None


def _check(call: str, result: int) -> None:
    if result:
        text = ctypes.c_char_p()
        _libcuda().cuGetErrorString(result, byref(text))
        why = text.value.decode() if text.value else f"error {result}"
        raise DriverError(f"{call} failed: {why}")


@functools.cache
def version() -> int:
    """The CUDA version the driver supports, as 1000 * major + 10 * minor.

    Raises DriverError if there is no driver.
    """
    value = c_int()
    _check("cuDriverGetVersion", _libcuda().cuDriverGetVersion(byref(value)))
    return value.value


def unusable() -> Optional[str]:
    """Why kernels cannot be loaded through this driver, or None."""
    try:
        if version() < _MIN_DRIVER:
            return (f"the driver supports CUDA {version() // 1000}."
                    f"{version() % 1000 // 10}, kernels are found by name "
                    "from CUDA 12.4 on")
    except DriverError as error:
        return str(error)
    return None


class _Attribute(ctypes.Structure):
    _fields_ = [("id", c_int), ("pad", c_int), ("value", c_uint32 * 16)]


class _Config(ctypes.Structure):
    _fields_ = [("grid_x", c_uint32), ("grid_y", c_uint32), ("grid_z", c_uint32),
                ("block_x", c_uint32), ("block_y", c_uint32), ("block_z", c_uint32),
                ("shared_bytes", c_uint32), ("stream", c_void_p),
                ("attributes", ctypes.POINTER(_Attribute)),
                ("num_attributes", c_uint32)]


class Kernel:
    """The one kernel of a cubin. Usable on every device of the process.

    Raises DriverError if `cubin` cannot be loaded or holds several kernels.
    """

    def __init__(self, cubin: bytes, name: Optional[str] = None):
        cuda, library, count = _libcuda(), c_void_p(), c_uint32()
        _check("cuInit", cuda.cuInit(0))
        _check("cuLibraryLoadData",
               cuda.cuLibraryLoadData(byref(library), cubin, None, None, 0,
                                      None, None, 0))
        self.handle = c_void_p()
        if name is None:
            _check("cuLibraryGetKernelCount",
                   cuda.cuLibraryGetKernelCount(byref(count), library))
            if count.value != 1:
                cuda.cuLibraryUnload(library)
                raise DriverError(f"a cubin of one kernel holds {count.value}")
            _check("cuLibraryEnumerateKernels",
                   cuda.cuLibraryEnumerateKernels(byref(self.handle), 1, library))
        else:
            _check("cuLibraryGetKernel",
                   cuda.cuLibraryGetKernel(byref(self.handle), library,
                                           name.encode()))
        # The library stays loaded for the life of the process: captured graphs
        # keep no reference to it, and unloading it under them is fatal.
        self._library = library

    def load(self, device: int, shared_bytes: int) -> None:
        """Load for the current `device`, with room for `shared_bytes` a block.

        Not while a graph is being captured: the driver may allocate.
        """
        cuda, function = _libcuda(), c_void_p()
        _check("cuKernelGetFunction",
               cuda.cuKernelGetFunction(byref(function), self.handle))
        _check("cuKernelSetAttribute",
               cuda.cuKernelSetAttribute(_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                         shared_bytes, self.handle, device))


class TensorMap(ctypes.Structure):
    """A TMA descriptor (CUtensorMap): 128 opaque bytes.

    It holds an address and a shape and nothing that lives, so two equal
    requests may always share one.
    """
    _fields_ = [("opaque", c_uint64 * 16)]


_ELEMENT_BYTES = {UINT8: 1, FLOAT32: 4, BFLOAT16: 2}
_staging = threading.local()


def tensor_map(dtype: int, address: int, sizes: Sequence[int], strides: Sequence[int],
               box: Sequence[int], swizzle: int) -> TensorMap:
    """Describe a tensor of up to three dimensions for TMA, the contiguous one first.

    `sizes` count elements, `strides` are the distances in elements along all
    dimensions but the first, `box` is what one copy moves, `swizzle` is in
    bytes (0, 32, 64 or 128).
    Raises DriverError, e.g. where the address is not 16-byte aligned.
    """
    if not hasattr(_staging, "map"):
        # The driver wants the descriptor 64-byte aligned, which ctypes does not
        # promise; so it is written here and copied.
        _staging.memory = ctypes.create_string_buffer(192)
        _staging.map = (ctypes.addressof(_staging.memory) + 63) // 64 * 64
        _staging.sizes, _staging.strides = (c_uint64 * 3)(), (c_uint64 * 2)()
        _staging.box, _staging.steps = (c_uint32 * 3)(), (c_uint32 * 3)(1, 1, 1)
    rank, width = len(sizes), _ELEMENT_BYTES[dtype]
    _staging.sizes[:rank] = sizes
    _staging.strides[:rank - 1] = [stride * width for stride in strides]
    _staging.box[:rank] = box
    result = _libcuda().cuTensorMapEncodeTiled(
        c_void_p(_staging.map), dtype, rank, c_void_p(address), _staging.sizes,
        _staging.strides, _staging.box, _staging.steps, 0, _SWIZZLE[swizzle],
        _L2_PROMOTION_256B, 0)
    if result:
        _check("cuTensorMapEncodeTiled", result)
    return TensorMap.from_buffer_copy(ctypes.string_at(_staging.map, 128))


class Launch:
    """A kernel with its launch shape and parameters, ready to be run again.

    `parameters` are ctypes objects that are handed over by address: change their
    `.value`, or an entry of `pointers`, between runs. The kernel may be on the
    GPU before the one ahead of it in the stream is done, and waits for it by itself
    (programmatic dependent launch). Nothing is locked here.
    """

    def __init__(self, kernel: Kernel, block: int, shared_bytes: int, parameters: Sequence):
        self._attributes = (_Attribute * 1)(
            _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 0, (c_uint32 * 16)(1)))
        self.config = _Config(1, 1, 1, block, 1, 1, shared_bytes, None,
                              self._attributes, 1)
        self.parameters = parameters
        self.pointers = (c_void_p * len(parameters))(
            *[ctypes.addressof(parameter) for parameter in parameters])
        self._handle = kernel.handle
        self._config_ref = byref(self.config)
        self._launch = _libcuda().cuLaunchKernelEx

    def run(self, grid_x: int, grid_y: int, stream: int) -> None:
        """Enqueue on a raw CUDA stream of the current device. Raises DriverError."""
        config = self.config
        config.grid_x, config.grid_y, config.stream = grid_x, grid_y, stream
        result = self._launch(self._config_ref, self._handle, self.pointers, None)
        if result:
            _check("cuLaunchKernelEx", result)
