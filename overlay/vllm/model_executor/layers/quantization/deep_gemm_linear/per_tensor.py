# SPDX-License-Identifier: Apache-2.0
"""Per-tensor FP8 checkpoints as block-FP8 ones, where the user asks for it.

One scale for a whole weight is the same weight with that scale in every block of
[128, 128]. So with VLLM_USE_DEEP_GEMM_PER_TENSOR=1 each such layer is turned into
a block-FP8 layer once its weights are loaded (and merged: vLLM has requantized
qkv and gate_up to one scale by then). Activations are then quantized by groups of
128 instead of by token or by tensor. docs/per-tensor.md has what that gains.

Channel scales are left alone: multiplying them in afterwards costs more than
DeepGEMM gains.
"""
import os
from typing import Optional

import torch
from vllm.logger import init_logger

from . import gate, linear

logger = init_logger("vllm.deep_gemm_linear")


def wanted() -> bool:
    """VLLM_USE_DEEP_GEMM_PER_TENSOR: 1 asks for it. Raises ValueError for no number."""
    return bool(int(os.environ.get("VLLM_USE_DEEP_GEMM_PER_TENSOR") or 0))


def _serves(method: object, layer: torch.nn.Module) -> bool:
    """Whether the layer is run by vLLM's linear method for FP8 weights and activations."""
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsLinearMethod,
    )
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
        CompressedTensorsW8A8Fp8,
    )
    from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod
    if isinstance(method, Fp8LinearMethod):
        return not method.block_quant and not method.use_marlin
    return (isinstance(method, CompressedTensorsLinearMethod)
            and isinstance(getattr(layer, "scheme", None), CompressedTensorsW8A8Fp8))


def refusal(layer: torch.nn.Module) -> Optional[str]:
    """Why an FP8 layer keeps its own path, or None if it can become a block-FP8 layer.

    `layer.weight`: [K, N], the transpose of what is stored; `layer.weight_scale`: float32.
    """
    weight, scale = layer.weight, layer.weight_scale
    if scale.numel() != 1:
        return "it has a scale for each channel"
    if weight.dim() != 2 or not weight.t().is_contiguous():
        return "the weight is not the transpose of a contiguous one"
    return None


class BlockScaled:
    """Takes the place of a layer's linear method; the operator is vLLM's own."""

    def apply(self, layer: torch.nn.Module, x: torch.Tensor,
              bias: Optional[torch.Tensor] = None) -> torch.Tensor:
        """bfloat16 [..., K] to [..., N], as `block_fp8_linear`."""
        return torch.ops.vllm.apply_w8a8_block_fp8_linear(
            x, layer.weight, layer.weight_block_size, layer.weight_scale_inv, None, bias,
            layer.cutlass_block_fp8)


def adopt(model: torch.nn.Module, activation: torch.dtype) -> int:
    """Turn the per-tensor layers of a loaded model into block-FP8 layers; how many.

    `activation`: the model's dtype. Layers that DeepGEMM's gate refuses keep their
    own path, and the log says why.
    """
    adopted, refused = 0, {}
    for layer in model.modules():
        method, weight = getattr(layer, "quant_method", None), getattr(layer, "weight", None)
        if not isinstance(weight, torch.Tensor) or weight.dtype != torch.float8_e4m3fn \
                or not isinstance(getattr(layer, "weight_scale", None), torch.Tensor) \
                or not _serves(method, layer):
            continue
        why = refusal(layer)
        if why is None:
            stored, (block_n, block_k) = weight.t(), gate.BLOCK_SIZE
            blocks = layer.weight_scale.float().reshape(1, 1).repeat(
                -(-stored.shape[0] // block_n), -(-stored.shape[1] // block_k))
            if linear.layer_for(activation, stored, blocks, list(gate.BLOCK_SIZE),
                                weight.device) is None:
                why = "DeepGEMM cannot serve it, see above"
        if why:
            refused[why] = refused.get(why, 0) + 1
            continue
        layer.weight = torch.nn.Parameter(stored, requires_grad=False)
        layer.weight_scale_inv = torch.nn.Parameter(blocks, requires_grad=False)
        layer.weight_block_size = list(gate.BLOCK_SIZE)
        # Only for the calls that wait for a kernel; vLLM's check, which DeepGEMM's N may miss.
        layer.cutlass_block_fp8 = stored.shape[0] % 128 == 0
        layer.quant_method = BlockScaled()
        adopted += 1
    logger.info("per-tensor FP8 layers: %d run as block-FP8 layers%s", adopted, "".join(
        f"; {count} do not: {why}" for why, count in refused.items()))
    return adopted
