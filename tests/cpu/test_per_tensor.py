# SPDX-License-Identifier: Apache-2.0
"""Per-tensor layers turned into block-FP8 ones, on vLLM's own classes of each pin."""
import pytest
import torch

pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")


def stored(n, k):
    return (torch.randn(n, k).clamp(-3, 3) * 100).to(torch.float8_e4m3fn)


def layer_of(method, n, k, scale=None, scheme=None):
    """A linear layer as it is once its weights are loaded and processed."""
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(stored(n, k).t(), requires_grad=False)
    layer.weight_scale = torch.nn.Parameter(torch.tensor(2e-3) if scale is None else scale,
                                            requires_grad=False)
    layer.quant_method = method
    if scheme is not None:
        layer.scheme = scheme
    return layer


def fp8_method(block_quant=False, use_marlin=False):
    from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod
    method = object.__new__(Fp8LinearMethod)  # its __init__ asks for a GPU
    method.block_quant, method.use_marlin = block_quant, use_marlin
    return method


def compressed():
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsLinearMethod,
    )
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
        CompressedTensorsW8A8Fp8,
    )
    return dict(method=object.__new__(CompressedTensorsLinearMethod),
                scheme=object.__new__(CompressedTensorsW8A8Fp8))


@pytest.fixture
def operator_on_cpu():
    """vLLM registers its operator for the GPU alone."""
    from vllm.model_executor.layers.quantization.utils import fp8_utils
    library = torch.library.Library("vllm", "FRAGMENT")
    library.impl("apply_w8a8_block_fp8_linear", fp8_utils.apply_w8a8_block_fp8_linear, "CPU")
    yield
    library._destroy()


@pytest.mark.parametrize("kind", ["fp8", "compressed-tensors"])
def test_a_per_tensor_layer_becomes_a_block_layer(path, operator_on_cpu, kind):
    from vllm.model_executor.layers.quantization.deep_gemm_linear import per_tensor, warmup
    from vllm.model_executor.layers.quantization.utils import fp8_utils
    layer = layer_of(n=576, k=512, **(dict(method=fp8_method()) if kind == "fp8"
                                      else compressed()))
    weight, scale = layer.weight.t().float(), layer.weight_scale.item()
    address, x = layer.weight.data_ptr(), torch.randn(2, 5, 512, dtype=torch.bfloat16)
    assert per_tensor.adopt(torch.nn.Sequential(layer), torch.bfloat16) == 1
    bias = torch.randn(576, dtype=torch.bfloat16)
    out = layer.quant_method.apply(layer, x, bias=bias)
    exact = x.float() @ (weight * scale).t() + bias.float()
    assert out.shape == (2, 5, 576) and path.counts["deep_gemm"] == 1
    assert (out.float() - exact).norm() / exact.norm() < 0.06
    blocks = torch.full((5, 4), scale)
    assert torch.equal(out, fp8_utils.apply_w8a8_block_fp8_linear(
        x, weight.to(torch.float8_e4m3fn), [128, 128], blocks, bias=bias))
    assert layer.weight.data_ptr() == address  # no second copy of the weight
    assert layer.weight_scale_inv.shape == (5, 4)
    assert len(list(warmup.block_fp8_weights(torch.nn.Sequential(layer)))) == 1
    assert per_tensor.adopt(torch.nn.Sequential(layer), torch.bfloat16) == 0  # once


def test_what_stays_as_it_is(path):
    from vllm.model_executor.layers.quantization.deep_gemm_linear import per_tensor
    other = type("Other", (), {})()
    layers = [layer_of(fp8_method(), 256, 512, scale=torch.rand(256, 1)),  # channels
              layer_of(fp8_method(), 256, 256),                            # K too small
              layer_of(fp8_method(), 100, 512),                            # N not a multiple of 64
              layer_of(fp8_method(use_marlin=True), 256, 512),
              layer_of(fp8_method(block_quant=True), 256, 512),
              layer_of(other, 256, 512)]
    contiguous = layer_of(fp8_method(), 256, 512)
    contiguous.weight = torch.nn.Parameter(contiguous.weight.contiguous(), requires_grad=False)
    before = [(layer.quant_method, layer.weight) for layer in [*layers, contiguous]]
    assert per_tensor.adopt(torch.nn.Sequential(*layers, contiguous), torch.bfloat16) == 0
    assert before == [(layer.quant_method, layer.weight) for layer in [*layers, contiguous]]
    half = layer_of(fp8_method(), 256, 512)
    assert per_tensor.adopt(torch.nn.Sequential(half), torch.float16) == 0


def test_only_when_asked(path, monkeypatch):
    import types

    from vllm.model_executor.layers.quantization.deep_gemm_linear import per_tensor, warmup
    asked = []
    monkeypatch.setattr(per_tensor, "adopt", lambda model, dtype: asked.append(model))
    monkeypatch.setenv("VLLM_DEEP_GEMM_WARMUP", "off")
    spaces = types.SimpleNamespace
    worker = spaces(model_runner=spaces(model="m"), model_config=spaces(dtype=torch.bfloat16))
    for value, wanted in ((None, []), ("0", []), ("", []), ("1", ["m"])):
        monkeypatch.delenv("VLLM_USE_DEEP_GEMM_PER_TENSOR", raising=False)
        if value is not None:
            monkeypatch.setenv("VLLM_USE_DEEP_GEMM_PER_TENSOR", value)
        asked.clear()
        warmup.warm_up(worker)
        assert asked == wanted
