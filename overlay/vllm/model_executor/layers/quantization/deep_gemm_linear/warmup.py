# SPDX-License-Identifier: Apache-2.0
"""Every kernel a model can ask for, loaded before the first request.

Runs in each worker once its weights are loaded, before memory profiling and
graph capture. Ranks walk the missing kernels from different starting points and
each kernel is compiled under its lock, so a node compiles it once.
"""
import os
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, Dict, Iterator, List, Tuple

import torch
from vllm.logger import init_logger

from . import linear, per_tensor, plan
from .kernel_cache import CompileError, KernelSpec

logger = init_logger("vllm.deep_gemm_linear")

MODES = ("off", "load", "strict")
_PROGRESS_SECONDS = 5


class MissingKernels(RuntimeError):
    """Strict mode: planned kernels are not in the cache."""


def mode() -> str:
    """VLLM_DEEP_GEMM_WARMUP: off, load (default) or strict. Raises ValueError."""
    value = os.environ.get("VLLM_DEEP_GEMM_WARMUP") or "load"
    if value not in MODES:
        raise ValueError(f"VLLM_DEEP_GEMM_WARMUP is {value!r}, not one of {MODES}")
    return value


def block_fp8_weights(model: torch.nn.Module) -> Iterator[Tuple[torch.Tensor, torch.Tensor, list]]:
    """Weight, block scales and block size of each block-FP8 linear layer."""
    for module in model.modules():
        block_size = getattr(module, "weight_block_size", None)
        scale = getattr(module, "weight_scale_inv", None)
        weight = getattr(module, "weight", None)
        if block_size and isinstance(scale, torch.Tensor) and isinstance(weight, torch.Tensor):
            yield weight, scale, list(block_size)


def warm_up(worker: Any) -> None:
    """Load, and where allowed compile, all kernels of a worker's model.

    `worker`: a V0 or V1 GPU worker with its model loaded. Raises MissingKernels
    in strict mode, ValueError for an unknown mode; nothing else stops a start.
    """
    # V0 multi-step wraps the runner that holds the model.
    runner = getattr(worker.model_runner, "_base_model_runner", worker.model_runner)
    if per_tensor.wanted():
        per_tensor.adopt(runner.model, worker.model_config.dtype)
    if mode() == "off":
        return
    started = time.monotonic()
    max_m = worker.vllm_config.scheduler_config.max_num_batched_tokens
    layers: Dict[linear.Layer, List[Tuple[torch.Tensor, torch.Tensor]]] = {}
    for weight, scale, block_size in block_fp8_weights(runner.model):
        if not weight.is_cuda:
            continue
        layer = linear.layer_for(worker.model_config.dtype, weight, scale, block_size,
                                 weight.device)
        if layer is not None:
            layers.setdefault(layer, []).append((weight, scale))
    if not layers:
        return
    wanted = {(layer, spec): None for layer in layers
              for spec in plan.kernels(layer.n, layer.k, layer.num_sms, max_m)}
    cache = linear.cache_of_process()
    missing = list({spec: None for _, spec in wanted if cache.find(spec) is None})
    if missing and mode() == "strict":
        raise MissingKernels(
            f"{len(missing)} of {len(wanted)} DeepGEMM kernels are not in "
            f"{cache.folders[0]}, the first is {missing[0].name}\n\nhint: python "
            "kernels.py precompile CONFIG --tp-size N --max-m M, or VLLM_DEEP_GEMM_WARMUP=load")
    parallel = max(1, worker.parallel_config.world_size)
    _compile(missing, worker.local_rank * len(missing) // parallel, parallel)
    loaded = 0
    for layer, spec in wanted:
        if layer.load(spec) is not None:
            layer.touch(spec, [weight for weight, _ in layers[layer]], layers[layer][0][1])
            loaded += 1
    torch.cuda.synchronize()
    for layer in layers:
        linear.quantizer_of_device(layer.device.index)
    logger.info(
        "DeepGEMM linear layers: %d weight shapes, %d of %d kernels for up to %d "
        "tokens loaded, %d compiled here, %.1f s", len(layers), loaded, len(wanted),
        max_m, cache.compiled, time.monotonic() - started)


def _compile(missing: List[KernelSpec], first: int, ranks: int) -> None:
    if not missing:
        return
    cache = linear.cache_of_process()
    workers = max(1, (os.cpu_count() or 1) // ranks)
    logger.info("compiling %d DeepGEMM kernels into %s, %d at a time", len(missing),
                cache.folders[0], workers)
    started = said = time.monotonic()
    with ThreadPoolExecutor(workers) as pool:
        jobs = {pool.submit(cache.get, spec): spec for spec in
                missing[first:] + missing[:first]}
        for done, job in enumerate(as_completed(jobs), 1):
            try:
                job.result()
            except (CompileError, OSError) as error:
                logger.warning("kernel %s cannot be compiled, vLLM's own path serves "
                               "its row counts: %s", jobs[job].name, error)
            if time.monotonic() - said > _PROGRESS_SECONDS:
                said = time.monotonic()
                logger.info("%d of %d kernels, %.0f s", done, len(missing), said - started)
