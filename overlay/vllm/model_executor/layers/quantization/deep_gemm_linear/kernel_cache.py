# SPDX-License-Identifier: Apache-2.0
"""Kernels on disk: source text, key, compiler, one file a kernel.

    <root>/<sources>/<compiler>/<kernel>.cubin

`sources` hashes DeepGEMM's headers, the text below, the flags and the
architecture; a cubin made by another compiler from the same sources is as good,
so a runtime without a toolkit takes what a build machine left. Files appear by
an atomic rename, one process compiles while the others wait on its lock, and
what is empty or cut short counts as missing.

This module needs neither a GPU nor vLLM.
"""
import contextlib
import fcntl
import functools
import hashlib
import os
import re
import shutil
import struct
import subprocess
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator, List, NamedTuple, Optional, Tuple

from .overlapped_gemm import SOURCE as OVERLAPPED

ARCHITECTURE = "sm_90a"
FLAGS = ("-std=c++20", "-cubin", "-O3", "-gencode=arch=compute_90a,code=sm_90a",
         "--expt-relaxed-constexpr", "--expt-extended-lambda",
         "--ptxas-options=--register-usage-level=10",
         "--diag-suppress=39,161,174,177,940",
         "--compiler-options=-fPIC,-O3,-fconcepts,-Wno-deprecated-declarations,-Wno-abi")
OLDEST_NVCC = (12, 3)
# Up to here DeepGEMM rewrites the reuse bits of FFMA in the machine code.
_LAST_INTERLEAVED = (12, 8)

_INSTANCE = """
auto kernel = reinterpret_cast<void*>(&deep_gemm_linear::overlapped_gemm<
    {n}, {k}, {block_m}, {block_n}, {stages}, {depth}, {swizzle}, {smem}>);
"""

# Two things are threaded through DeepGEMM's kernel by the preprocessor, at names
# that its kernel calls once: the producer waits for the quantizer's data only
# after its own set-up (programmatic dependent launch), and a block that is not
# full receives only the rows that exist, so it must expect fewer bytes. The
# shared memory of absent rows holds anything; rows of a product do not mix.
_SOURCE = """\
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>

namespace cutlass::arch {{
template <uint32_t kRegisters>
__device__ __forceinline__ void dealloc_then_wait_for_quantizer() {{
    warpgroup_reg_dealloc<kRegisters>();
    asm volatile("griddepcontrol.wait;" ::: "memory");
}}
}}
namespace deep_gemm {{
// Bytes of A and of its scales that a block of `rows` lacks to BLOCK_M.
template <uint32_t kBlockM>
__device__ __forceinline__ uint32_t absent_bytes(uint32_t rows) {{
    return rows < kBlockM ? (kBlockM - rows) * (128 + sizeof(float)) : 0;
}}
}}
#define warpgroup_reg_dealloc dealloc_then_wait_for_quantizer
#define arrive_and_expect_tx(bytes) \\
    arrive_and_expect_tx((bytes) - absent_bytes<BLOCK_M>(shape_m))
#include <deep_gemm/fp8_gemm.cuh>

auto kernel = reinterpret_cast<void*>(&deep_gemm::fp8_gemm_kernel<
    {n}, {k}, {block_m}, {block_n}, 128, {padding}, {swizzle}, 1, {stages},
    128, 128, 1, false, deep_gemm::GemmType::Normal>);
"""


# Needs what the kernels need of nvcc and its host compiler, in half a second.
_PROBE = """\
#include <concepts>
#include <cuda_fp8.h>
template <std::integral T> __global__ void probe(T* out) { *out = 1; }
template __global__ void probe<int>(int*);
"""


class KernelSpec(NamedTuple):
    """What one compiled kernel is specialised for.

    `n`, `k`: weight shape. `block_m`, `block_n`: tile of the output. `stages`:
    stages of the TMA pipeline. `depth`: steps of 128 along K in a stage of our own
    kernel (`overlapped_gemm`, one block of rows only); 0: DeepGEMM's kernel, whose
    stages hold one step. No two thread blocks share a tile (TMA multicast): that was
    2 to 10 % slower wherever it was measured.
    """
    n: int
    k: int
    block_m: int
    block_n: int
    stages: int
    depth: int = 0

    @property
    def name(self) -> str:
        return (f"n{self.n}_k{self.k}_m{self.block_m}_n{self.block_n}_s{self.stages}"
                + (f"_d{self.depth}" if self.depth else ""))


class CompileError(RuntimeError):
    """nvcc failed; the text ends with what it printed."""


@dataclass(frozen=True)
class Compiler:
    """An nvcc and its version."""
    path: str
    version: Tuple[int, int]
    cuobjdump: Optional[str]

    @property
    def name(self) -> str:
        interleave = self.version <= _LAST_INTERLEAVED and self.cuobjdump
        return f"nvcc-{self.version[0]}.{self.version[1]}" + ("-interleaved" if interleave else "")


def find_compiler() -> Tuple[Optional[Compiler], str]:
    """The nvcc to use, or None and why not.

    Looked for in DG_JIT_NVCC_COMPILER, CUDA_HOME, CUDA_PATH, PATH, /usr/local/cuda.
    CUDA 12.3 is the oldest; newer ones than DeepGEMM knew work, since kernels are
    found through the driver (13.0 was run on an H200).
    """
    found = [os.environ.get("DG_JIT_NVCC_COMPILER")]
    found += [os.path.join(os.environ[name], "bin", "nvcc")
              for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    found += [shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc"]
    path = next((p for p in found if p and os.access(p, os.X_OK)), None)
    if path is None:
        return None, "no nvcc in DG_JIT_NVCC_COMPILER, CUDA_HOME, PATH or /usr/local/cuda"
    return _inspect(path)


@functools.cache
def _inspect(path: str) -> Tuple[Optional[Compiler], str]:
    try:
        text = subprocess.run([path, "--version"], capture_output=True, text=True,
                              timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"{path} does not run: {error}"
    match = re.search(r"release (\d+)\.(\d+)", text)
    if not match:
        return None, f"{path} does not tell its version"
    version = int(match[1]), int(match[2])
    if version < OLDEST_NVCC:
        return None, (f"{path} is CUDA {version[0]}.{version[1]}, DeepGEMM needs "
                      "12.3 or newer")
    beside = os.path.join(os.path.dirname(path), "cuobjdump")
    cuobjdump = beside if os.access(beside, os.X_OK) else shutil.which("cuobjdump")
    return Compiler(path, version, cuobjdump), ""


def toolchain_error(compiler: Compiler) -> Optional[str]:
    """Why nvcc cannot compile at all (a host compiler too old or absent), or None."""
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder, "probe.cu"), Path(folder, "probe.cubin")
        source.write_text(_PROBE)
        run = subprocess.run([compiler.path, str(source), "-o", str(made), *FLAGS],
                             capture_output=True, text=True, stdin=subprocess.DEVNULL)
        lines = [line for line in (run.stderr + run.stdout).splitlines() if line.strip()]
        if run.returncode or not made.exists():
            return next((line for line in lines if "error" in line.lower()),
                        lines[-1] if lines else f"exit code {run.returncode}").strip()
    return None


@functools.cache
def sources_key(include: str) -> str:
    """Hash of all that decides a kernel's code but the compiler.

    `include` is DeepGEMM's include folder. Raises FileNotFoundError if its own
    headers or CUTLASS's are not in it.
    """
    digest = hashlib.sha256(repr((_SOURCE, OVERLAPPED, _INSTANCE, FLAGS, ARCHITECTURE)).encode())
    for folder in ("cute", "cutlass"):
        if not os.path.isdir(os.path.join(include, folder)):
            raise FileNotFoundError(f"{include} has no {folder} headers")
    for path in sorted(Path(include, "deep_gemm").glob("*.cuh")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def roots() -> List[Path]:
    """Cache folders in the order they are searched; writing takes the first writable.

    DG_JIT_CACHE_DIR wins, then VLLM_CACHE_ROOT, then XDG_CACHE_HOME or ~/.cache;
    last one below the temporary folder, for a missing or read-only HOME.
    """
    named = os.environ.get("DG_JIT_CACHE_DIR")
    if not named:
        named = os.environ.get("VLLM_CACHE_ROOT") or os.path.join(
            os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "vllm")
    private = os.path.join(tempfile.gettempdir(), f"deep_gemm_linear-{os.getuid()}")
    return [Path(named, "deep_gemm_linear"), Path(private)]


def is_whole(cubin: bytes) -> bool:
    """Whether `cubin` is an ELF file that ends where its own header says."""
    if len(cubin) < 64 or cubin[:4] != b"\x7fELF":
        return False
    program, section = struct.unpack_from("<QQ", cubin, 32)
    sizes = struct.unpack_from("<4H", cubin, 54)
    return max(program + sizes[0] * sizes[1], section + sizes[2] * sizes[3]) <= len(cubin)


class KernelCache:
    """The kernels made from one DeepGEMM, in `folders` (default: `roots()`)."""

    def __init__(self, include: str, folders: Optional[List[Path]] = None):
        self.include = include
        self.sources = sources_key(include)
        self.folders = folders or roots()
        self.compiled = 0

    def find(self, spec: KernelSpec) -> Optional[Path]:
        """The file of a kernel, whichever compiler made it, or None."""
        compiler = find_compiler()[0]
        for folder in self.folders:
            made = folder / self.sources
            try:
                makers = sorted((p.name for p in made.iterdir()), reverse=True)
            except OSError:
                continue
            if compiler and compiler.name in makers:
                makers.insert(0, compiler.name)
            for maker in makers:
                path = made / maker / f"{spec.name}.cubin"
                with contextlib.suppress(OSError):
                    if is_whole(path.read_bytes()):
                        return path
        return None

    def discard(self, path: Path) -> None:
        """Take a file out that the driver would not load."""
        with contextlib.suppress(OSError):
            path.unlink()

    def get(self, spec: KernelSpec) -> Path:
        """The file of a kernel, compiled if it is missing; one process compiles.

        Raises CompileError, or OSError if no folder can be written.
        """
        path = self.find(spec)
        if path is None:
            compiler, why = find_compiler()
            if compiler is None:
                raise CompileError(why)
            folder = self._writable(compiler)
            with _lock(folder / f"{spec.name}.lock"):
                path = self.find(spec)
                if path is None:
                    path = folder / f"{spec.name}.cubin"
                    self._compile(spec, compiler, path)
                    self.compiled += 1
        return path

    def _writable(self, compiler: Compiler) -> Path:
        for root in self.folders:
            folder = root / self.sources / compiler.name
            with contextlib.suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
                if os.access(folder, os.W_OK | os.X_OK):
                    return folder
        raise PermissionError(f"no kernel cache can be written: {self.folders}")

    def _compile(self, spec: KernelSpec, compiler: Compiler, path: Path) -> None:
        stem = path.parent / f".{spec.name}.{os.getpid()}.{uuid.uuid4().hex}"
        source, made = Path(f"{stem}.cu"), Path(f"{stem}.tmp")
        try:
            source.write_text(source_text(spec))
            run = subprocess.run(
                [compiler.path, str(source), "-o", str(made), f"-I{self.include}", *FLAGS],
                capture_output=True, text=True, stdin=subprocess.DEVNULL)
            if run.returncode or not made.exists() or not is_whole(made.read_bytes()):
                raise CompileError(f"nvcc failed on {spec.name}: "
                                   f"{(run.stderr or run.stdout).strip()[-2000:]}")
            if compiler.name.endswith("-interleaved") and not spec.depth:
                from deep_gemm.jit import interleave_ffma
                interleave_ffma.process(str(made))
            with open(made, "rb") as file:
                os.fsync(file.fileno())
            os.replace(made, path)
        finally:
            for leftover in (source, made):
                with contextlib.suppress(OSError):
                    leftover.unlink()


def smem_bytes(spec: KernelSpec) -> Tuple[int, int, int]:
    """Dynamic shared memory in bytes, swizzle in bytes and padding of the output tile.

    DeepGEMM's kernel relies on its own accounting, ours asserts this one.
    """
    _, k, block_m, block_n, stages, depth = spec
    if not depth:
        from deep_gemm.jit_kernels.gemm import get_smem_config
        return get_smem_config(stages, k, block_m, block_n)
    steps = k // 128
    scales_b = steps + steps % 2 if 128 % block_n == 0 else 2 * steps
    size = (-(-block_m * block_n * 2 // 1024) * 1024 + scales_b * 4 + stages * 16
            + stages * depth * (128 * (block_m + block_n) + 4 * block_m))
    return size, next((s for s in (128, 64, 32) if block_n * 2 % s == 0), 0), 0


def source_text(spec: KernelSpec) -> str:
    """The CUDA source of one kernel."""
    smem, swizzle, padding = smem_bytes(spec)
    if spec.depth:
        return OVERLAPPED + _INSTANCE.format(**spec._asdict(), swizzle=swizzle, smem=smem)
    return _SOURCE.format(**spec._asdict(), padding=padding, swizzle=swizzle)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    # Best effort: without the lock two processes compile the same file, and the
    # rename keeps either result whole.
    with open(path, "a") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
