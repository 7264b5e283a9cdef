# SPDX-License-Identifier: Apache-2.0
"""Compile kernels behind the server's back: one at a time, off the request.

Only files are made here. The serving thread loads them, at a moment when no
graph is being captured.
"""
import queue
import threading
from typing import Optional

from vllm.logger import init_logger

from .kernel_cache import CompileError, KernelCache, KernelSpec

logger = init_logger("vllm.deep_gemm_linear")

_pending: "queue.Queue" = queue.Queue()
_thread: Optional[threading.Thread] = None
_start = threading.Lock()


def compile_later(cache: KernelCache, spec: KernelSpec) -> threading.Event:
    """Queue one kernel; returns at once. The event is set when there is a file."""
    global _thread
    made = threading.Event()
    _pending.put((cache, spec, made))
    with _start:
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(target=_work, name="deep_gemm_linear", daemon=True)
            _thread.start()
    return made


def wait() -> None:
    """Return when all that was queued is compiled or has failed."""
    _pending.join()


def _work() -> None:
    while True:
        cache, spec, made = _pending.get()
        try:
            cache.get(spec)
            made.set()
            logger.info("kernel %s compiled in the background", spec.name)
        except (CompileError, OSError) as error:
            logger.warning("kernel %s cannot be compiled, vLLM's own path goes on "
                           "serving its row counts: %s", spec.name, error)
        finally:
            _pending.task_done()
