# SPDX-License-Identifier: Apache-2.0
"""Layout and shape handling of one call, with the real quantizer interpreted."""
import multiprocessing
import os

import pytest
import torch

import cpu_path

BLOCK = [128, 128]


def call(x, weight, scale, bias=None):
    from vllm.model_executor.layers.quantization.utils import fp8_utils
    return fp8_utils.apply_w8a8_block_fp8_linear(x, weight, BLOCK, scale, None, bias)


def error(out, wanted):
    return ((out.float() - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("m", [1, 3, 4, 7, 64, 65])
def test_row_counts(path, m):
    weight, scale = cpu_path.weight_of(192, 512)
    x = torch.randn(m, 512, dtype=torch.bfloat16)
    out = call(x, weight, scale)
    assert out.shape == (m, 192) and error(out, cpu_path.exact(x, weight, scale)) < 0.08
    assert path.counts == {"deep_gemm": 1, "stock_refused": 0, "stock_missing_kernel": 0}


def test_no_rows(path):
    weight, scale = cpu_path.weight_of(192, 512)
    assert call(torch.zeros(0, 512, dtype=torch.bfloat16), weight, scale).shape == (0, 192)


def test_bias_and_three_dimensions(path):
    weight, scale = cpu_path.weight_of(192, 512)
    x, bias = torch.randn(2, 3, 512, dtype=torch.bfloat16), torch.randn(192).bfloat16()
    plain = call(x, weight, scale)
    assert plain.shape == (2, 3, 192)
    assert torch.equal(call(x, weight, scale, bias), plain + bias)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("offset,width", [(0, 520), (8, 576), (1, 515), (0, 513)])
def test_strided_input(path, rows, offset, width):
    weight, scale = cpu_path.weight_of(192, 512)
    wide = torch.randn(rows, width, dtype=torch.bfloat16)
    part = wide[:, offset:offset + 512]
    assert torch.equal(call(part, weight, scale), call(part.clone(), weight, scale))


def _in_worker(send):
    torch.set_num_threads(1)  # a forked child has none of its parent's threads
    linear = cpu_path.install()
    import os
    os.environ["VLLM_USE_DEEP_GEMM_LINEAR"] = "1"
    weight, scale = cpu_path.weight_of(128, 512)
    call(torch.randn(2, 512, dtype=torch.bfloat16), weight, scale)
    assert hasattr(torch.ops.vllm, "apply_w8a8_block_fp8_linear")
    send.send(linear.counts["deep_gemm"])


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_forked_and_spawned_workers(path, method):
    before = path.counts["deep_gemm"]
    context = multiprocessing.get_context(method)
    receive, send = context.Pipe(False)
    worker = context.Process(target=_in_worker, args=(send,))
    worker.daemon = True
    worker.start()
    worker.join(120)
    worker.kill()
    assert worker.exitcode == 0 and receive.recv() == before + 1


def test_descriptors_of_a_call_outlive_a_full_table(path, monkeypatch):
    """The table is emptied when full; what the present launch points at must stay."""
    import ctypes

    from vllm.model_executor.layers.quantization.deep_gemm_linear import driver
    launched = []

    class Kernel:
        handle = ctypes.c_void_p()

        def __init__(self, *_):
            pass

        def load(self, *_):
            pass

    def launch(config, handle, pointers, extra):
        launched.append([ctypes.string_at(pointers[slot], 16) for slot in (4, 5, 6, 7)])
        return 0

    class Cuda:
        cuLaunchKernelEx = staticmethod(launch)

    def describe(dtype, address, *_):
        return driver.TensorMap((ctypes.c_uint64 * 16)(dtype, address))

    monkeypatch.setattr(driver, "Kernel", Kernel)
    monkeypatch.setattr(driver, "_libcuda", lambda: Cuda)
    monkeypatch.setattr(driver, "tensor_map", describe)
    monkeypatch.setattr(path, "_MAX_DESCRIPTORS", 2)
    from vllm.model_executor.layers.quantization.deep_gemm_linear import plan
    tile = plan.tile(5, 128, 512, 132)
    gemm = path.Gemm(tile.spec, b"", 0)
    for turn in range(1, 50):
        gemm.run(tile, 5, turn, 1000 + turn, 2000 + turn, 0, 3000 + turn, 0)
        wanted = [(0, turn), (0, 2000 + turn), (7, 1000 + turn), (9, 3000 + turn)]
        assert launched[-1] == [a.to_bytes(8, "little") + b.to_bytes(8, "little")
                                for a, b in wanted]


def test_a_home_that_cannot_be_written_does_not_stop_the_quantizer(monkeypatch):
    from vllm.model_executor.layers.quantization.deep_gemm_linear import quantize
    folders = []

    class Kernel:
        def warmup(self, *args, **kwargs):
            folders.append(os.environ.get("TRITON_CACHE_DIR"))
            if len(folders) == 1:
                raise PermissionError("/.triton")
            return "compiled"

    monkeypatch.setattr(quantize, "_group_quantize", Kernel())
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    assert quantize._compile() == "compiled"
    assert folders[0] is None and folders[1] and not os.path.exists(folders[1])
    assert "TRITON_CACHE_DIR" not in os.environ
