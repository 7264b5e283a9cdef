# SPDX-License-Identifier: Apache-2.0
"""Which layers run through DeepGEMM, in which order that is decided, and the switches."""
import inspect
import os
import subprocess
import sys
import types

import pytest
import torch


def fresh(code, **environment):
    """Run code in a new interpreter with the same patched vLLM; returns stdout."""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                         env={**os.environ, **environment})
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout


def test_switch_off_imports_nothing_of_ours():
    out = fresh(
        "import sys\n"
        "import vllm.model_executor.layers.quantization.utils.fp8_utils as f\n"
        "import vllm.envs as envs\n"
        "assert not envs.VLLM_USE_DEEP_GEMM_LINEAR\n"
        "print([m for m in sys.modules if 'deep_gemm' in m])\n",
        VLLM_USE_DEEP_GEMM_LINEAR="", VLLM_USE_DEEP_GEMM="0")
    assert out.strip().endswith("[]")


@pytest.mark.parametrize("moe,linear,wanted", [
    (None, None, False), ("0", None, False), ("1", None, True), ("1", "0", False),
    ("0", "1", True), ("1", "1", True), ("0", "0", False), ("1", "", True)])
def test_switches(monkeypatch, moe, linear, wanted):
    import vllm.envs as envs
    for name, value in (("VLLM_USE_DEEP_GEMM", moe), ("VLLM_USE_DEEP_GEMM_LINEAR", linear)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert envs.VLLM_USE_DEEP_GEMM_LINEAR is wanted
    assert envs.VLLM_USE_DEEP_GEMM is (moe == "1")  # the MoE layers' choice


def test_fake_function_has_the_real_signature():
    from vllm.model_executor.layers.quantization.utils import fp8_utils
    real = inspect.signature(fp8_utils.apply_w8a8_block_fp8_linear)
    fake = inspect.signature(fp8_utils.apply_w8a8_block_fp8_linear_fake)
    assert list(real.parameters.values()) == list(fake.parameters.values())


class FakePlatform:
    def __init__(self, cuda, capability):
        self.cuda, self.capability = cuda, capability

    def is_cuda(self):
        return self.cuda

    def get_device_capability(self, device=0):
        return self.capability


@pytest.fixture
def gate(monkeypatch):
    from vllm.model_executor.layers.quantization.deep_gemm_linear import gate
    asked = []
    monkeypatch.setattr(gate, "include_folder", lambda: asked.append(1) or "/nowhere")
    for cached in (gate.device_refusal,):
        cached.cache_clear()
    gate.asked = asked
    yield gate
    gate.device_refusal.cache_clear()


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0), None])
def test_only_capability_9_0_and_no_import_before(gate, monkeypatch, capability):
    monkeypatch.setattr(gate, "current_platform", FakePlatform(True, capability))
    assert "exactly 9.0" in gate.device_refusal(0)
    assert not gate.asked


def test_not_cuda(gate, monkeypatch):
    monkeypatch.setattr(gate, "current_platform", FakePlatform(False, (9, 0)))
    assert gate.device_refusal(0) == "the platform is not CUDA"
    assert not gate.asked


def test_hopper_asks_for_the_package_then_driver_then_compiler(gate, monkeypatch, tmp_path):
    import cpu_path
    monkeypatch.setattr(gate, "current_platform", FakePlatform(True, (9, 0)))
    assert "deep_gemm cannot be used" in gate.device_refusal(0)  # /nowhere has no headers
    assert gate.asked
    gate.device_refusal.cache_clear()
    stand_in = os.path.join(os.path.dirname(cpu_path.__file__), "stand_in/deep_gemm/include")
    monkeypatch.setattr(gate, "include_folder", lambda: stand_in)
    monkeypatch.setattr(gate.driver, "unusable", lambda: "no driver here")
    assert gate.device_refusal(0) == "no driver here"
    gate.device_refusal.cache_clear()
    monkeypatch.setattr(gate.driver, "unusable", lambda: None)
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(gate.kernel_cache, "roots", lambda: [tmp_path])
    monkeypatch.setattr(gate.kernel_cache, "find_compiler", lambda: (None, "no nvcc at all"))
    assert "no nvcc at all" in gate.device_refusal(0)
    gate.device_refusal.cache_clear()
    (tmp_path / gate.kernel_cache.sources_key(stand_in)).mkdir()
    assert gate.device_refusal(0) is None  # cached kernels need no compiler


@pytest.mark.parametrize("broken,why", [
    ("raise ImportError(\"No module named 'cuda'\")", "cuda"),
    ("", "gemm_fp8_fp8_bf16_nt"),
    ("def fp8_gemm_nt(): pass", "commit bfe983c is needed")])
def test_unusable_packages_are_named(tmp_path, broken, why):
    (tmp_path / "deep_gemm").mkdir()
    (tmp_path / "deep_gemm/__init__.py").write_text(broken)
    out = fresh(
        "from vllm.model_executor.layers.quantization.deep_gemm_linear import gate\n"
        "class P:\n"
        "    is_cuda = lambda self: True\n"
        "    get_device_capability = lambda self, d=0: (9, 0)\n"
        "gate.current_platform = P()\n"
        "print(gate.device_refusal(0))\n",
        PYTHONPATH=f"{tmp_path}:{os.environ['PYTHONPATH']}")
    assert why in out and "deep_gemm cannot be used" in out


def weight(n, k, dtype=torch.float8_e4m3fn):
    return torch.zeros(n, k).to(dtype)


def scales(n, k, dtype=torch.float32):
    return torch.zeros(-(-n // 128), -(-k // 128), dtype=dtype)


@pytest.mark.parametrize("n,k,why", [
    (7168, 128, "less than 384"), (7168, 256, "less than 384"), (7168, 384, None),
    (7168, 512, None), (576, 7168, None), (2112, 7168, None), (100, 512, "multiple of 64"),
    (128, 192, "multiple of 128"), (64, 640, None)])
def test_shapes(n, k, why):
    from vllm.model_executor.layers.quantization.deep_gemm_linear import gate
    got = gate.weight_refusal(torch.bfloat16, weight(n, k), scales(n, k), [128, 128])
    assert got is None if why is None else why in got


@pytest.mark.parametrize("change,why", [
    (dict(activation=torch.float16), "bfloat16"),
    (dict(weight=weight(128, 512, torch.float8_e5m2)), "float8_e4m3fn"),
    (dict(scale=scales(128, 512, torch.bfloat16)), "float32 scales"),
    (dict(block=[64, 128]), "block size"), (dict(block=[128, 64]), "block size"),
    (dict(scale=torch.zeros(1, 5)), "shape"),
    (dict(weight=weight(512, 128).t()), "contiguous"),
    (dict(weight=weight(0, 512), scale=torch.zeros(0, 4)), "empty")])
def test_everything_else_that_is_looked_at(change, why):
    from vllm.model_executor.layers.quantization.deep_gemm_linear import gate
    good = dict(activation=torch.bfloat16, weight=weight(128, 512), scale=scales(128, 512),
                block=[128, 128])
    asked = {**good, **change}
    assert why in gate.weight_refusal(asked["activation"], asked["weight"], asked["scale"],
                                      asked["block"])
    assert gate.weight_refusal(*good.values()) is None


def test_refusal_is_decided_and_logged_once(path, monkeypatch):
    said = []
    monkeypatch.setattr(path.logger, "info", lambda *a: said.append(a[0] % a[1:]))
    x, w, s = torch.zeros(2, 256, dtype=torch.bfloat16), weight(128, 256), scales(128, 256)
    for _ in range(3):
        assert path.block_fp8_linear(x, w, [128, 128], s, None) is None
    assert path.counts["stock_refused"] == 3
    assert len(said) == 1 and "K = 256 is less than 384" in said[0]


def test_missing_kernel_is_compiled_once_behind_the_server(path, monkeypatch):
    queued = []
    monkeypatch.setattr(path.Layer, "load", lambda self, spec: None)
    monkeypatch.setattr(path, "cache_of_process", lambda: "cache")

    class Event:
        is_set = staticmethod(lambda: False)

    monkeypatch.setattr(path, "compile_later", lambda c, spec: queued.append(spec) or Event)
    x, w, s = torch.zeros(2, 512, dtype=torch.bfloat16), weight(128, 512), scales(128, 512)
    for _ in range(3):
        assert path.block_fp8_linear(x, w, [128, 128], s, None) is None
    assert len(queued) == 1 and path.counts["stock_missing_kernel"] == 3


def test_no_compile_and_no_load_in_graph_capture(path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(path.Layer, "load", lambda *a: pytest.fail("loaded in capture"))
    monkeypatch.setattr(path, "compile_later", lambda *a: pytest.fail("compiled in capture"))
    x, w, s = torch.zeros(2, 512, dtype=torch.bfloat16), weight(128, 512), scales(128, 512)
    assert path.block_fp8_linear(x, w, [128, 128], s, None) is None


class Linear(torch.nn.Module):
    def __init__(self, n, k):
        super().__init__()
        self.weight = torch.nn.Parameter(weight(n, k), requires_grad=False)
        self.weight_scale_inv = torch.nn.Parameter(scales(n, k), requires_grad=False)
        self.weight_block_size = [128, 128]


def worker_of(model, max_m=64):
    spaces = types.SimpleNamespace
    return spaces(model_runner=spaces(model=model), local_rank=0,
                  model_config=spaces(dtype=torch.bfloat16),
                  parallel_config=spaces(world_size=1),
                  vllm_config=spaces(scheduler_config=spaces(max_num_batched_tokens=max_m)))


def test_warm_up_modes(path, monkeypatch, tmp_path):
    from vllm.model_executor.layers.quantization.deep_gemm_linear import warmup
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    found, asked = {}, []

    class Cache:
        folders, compiled = [tmp_path], 0

        def find(self, spec):
            return found.get(spec)

        def get(self, spec):
            asked.append(spec)
            found[spec] = tmp_path
            Cache.compiled += 1

    cache = Cache()
    monkeypatch.setattr(path, "cache_of_process", lambda: cache)
    worker = worker_of(torch.nn.Sequential(Linear(128, 512), Linear(128, 512), Linear(64, 256)))
    monkeypatch.setenv("VLLM_DEEP_GEMM_WARMUP", "off")
    warmup.warm_up(worker)
    assert not asked and not path._layers
    monkeypatch.setenv("VLLM_DEEP_GEMM_WARMUP", "strict")
    with pytest.raises(warmup.MissingKernels, match="kernels.py precompile|precompile"):
        warmup.warm_up(worker)
    monkeypatch.delenv("VLLM_DEEP_GEMM_WARMUP")
    warmup.warm_up(worker)
    assert len(asked) == len(set(asked)) == 1  # one shape, one block of rows
    gemm, = next(layer for layer in path._layers.values() if layer)._gemms.values()
    assert gemm.described == {m.weight.data_ptr() for m in list(worker.model_runner.model)[:2]}
    monkeypatch.setenv("VLLM_DEEP_GEMM_WARMUP", "strict")
    warmup.warm_up(worker)
    monkeypatch.setenv("VLLM_DEEP_GEMM_WARMUP", "sometimes")
    with pytest.raises(ValueError, match="sometimes"):
        warmup.warm_up(worker)


def test_warm_up_leaves_unquantized_models_alone(monkeypatch):
    from vllm.model_executor.layers.quantization.deep_gemm_linear import linear, warmup
    monkeypatch.delenv("VLLM_DEEP_GEMM_WARMUP", raising=False)
    monkeypatch.setattr(linear, "cache_of_process", lambda: pytest.fail("asked for DeepGEMM"))
    warmup.warm_up(worker_of(torch.nn.Linear(4, 4)))


@pytest.mark.parametrize("switch", ["0", "1"])
@pytest.mark.parametrize("name", ["vllm.worker.worker", "vllm.v1.worker.gpu_worker"])
def test_v0_and_v1_workers_warm_up_once_the_model_is_loaded(name, switch, monkeypatch):
    import importlib

    from vllm.model_executor.layers.quantization import deep_gemm_linear
    module, order = importlib.import_module(name), []
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM_LINEAR", switch)
    monkeypatch.setattr(deep_gemm_linear, "warm_up", lambda worker: order.append(worker),
                        raising=False)
    spaces = types.SimpleNamespace
    config = spaces(enable_sleep_mode=False)
    worker = spaces(model_config=config, vllm_config=spaces(model_config=config),
                    model_runner=spaces(load_model=lambda *a, **k: order.append("loaded")))
    module.Worker.load_model(worker)
    assert order == (["loaded", worker] if switch == "1" else ["loaded"])
