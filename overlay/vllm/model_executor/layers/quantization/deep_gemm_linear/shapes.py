# SPDX-License-Identifier: Apache-2.0
"""Weight shapes of a model's block-FP8 linear layers, from its config alone.

Follows how vLLM 0.8.5 to 0.9.1 merges and shards: query, key and value are one
weight, gate and up are one, column-parallel weights are cut along N and
row-parallel ones along K. Experts of MoE layers are not linear layers and are
left out; shared experts are in.
"""
from typing import Any, Dict, List, Set, Tuple

Shape = Tuple[int, int]

_DENSE = {"qwen2", "qwen3", "llama", "mistral"}
_MOE = {"qwen2_moe", "qwen3_moe"}
_MLA = {"deepseek_v2", "deepseek_v3", "kimi_k2"}


class UnknownModel(ValueError):
    """The config is not that of a block-FP8 model whose shapes are known."""


def _attention(c: Dict[str, Any], tp: int) -> Set[Shape]:
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    head = c.get("head_dim") or hidden // heads
    # Key and value heads are replicated once there are more ranks than heads.
    kv = max(1, (c.get("num_key_value_heads") or heads) // tp)
    return {((heads // tp + 2 * kv) * head, hidden), (hidden, heads // tp * head)}


def _mlp(hidden: int, intermediate: int, tp: int) -> Set[Shape]:
    return {(2 * intermediate // tp, hidden), (hidden, intermediate // tp)}


def _mla(c: Dict[str, Any], tp: int) -> Set[Shape]:
    hidden, heads = c["hidden_size"], c["num_attention_heads"] // tp
    nope, rope, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    found = {(c["kv_lora_rank"] + rope, hidden), (heads * (nope + value), c["kv_lora_rank"]),
             (hidden, heads * value)}
    if c.get("q_lora_rank"):
        found |= {(c["q_lora_rank"], hidden), (heads * (nope + rope), c["q_lora_rank"])}
    else:
        found.add((heads * (nope + rope), hidden))
    if c.get("first_k_dense_replace"):
        found |= _mlp(hidden, c["intermediate_size"], tp)
    if c.get("n_shared_experts"):
        found |= _mlp(hidden, c["moe_intermediate_size"] * c["n_shared_experts"], tp)
    return found


def weight_shapes(config: Dict[str, Any], tp: int) -> List[Shape]:
    """(N, K) of every distinct block-FP8 linear weight on one of `tp` ranks.

    `config`: the parsed config.json. Raises UnknownModel for another model type
    or quantization, or where heads or widths do not divide by `tp`.
    """
    c = {**config, **config.get("text_config", {})}
    quantization = config.get("quantization_config") or {}
    if quantization.get("quant_method") != "fp8" or \
            list(quantization.get("weight_block_size") or []) != [128, 128]:
        raise UnknownModel("the config is not that of an FP8 checkpoint with 128x128 blocks "
                           "(quantization_config: quant_method fp8, weight_block_size "
                           "[128, 128])")
    kind = c.get("model_type", "")
    if kind not in _DENSE | _MOE | _MLA:
        raise UnknownModel(f"model type {kind!r} is not one whose shapes are known: "
                           f"{', '.join(sorted(_DENSE | _MOE | _MLA))}")
    try:
        if c["num_attention_heads"] % tp:
            raise UnknownModel(f"{c['num_attention_heads']} attention heads do not divide "
                               f"by tensor-parallel size {tp}")
        if kind in _MLA:
            found = _mla(c, tp)
        else:
            found = _attention(c, tp)
            hidden = c["hidden_size"]
            if kind in _DENSE or c.get("mlp_only_layers") or c.get("decoder_sparse_step", 1) > 1:
                found |= _mlp(hidden, c["intermediate_size"], tp)
            if c.get("shared_expert_intermediate_size"):
                found |= _mlp(hidden, c["shared_expert_intermediate_size"], tp)
    except KeyError as error:
        raise UnknownModel(f"the config of this {kind} model has no {error}") from None
    return sorted(found)


def refusal(n: int, k: int) -> str:
    """Why a weight of this shape never runs through DeepGEMM, or an empty string."""
    if n % 64:
        return f"N = {n} is not a multiple of 64"
    if k % 128:
        return f"K = {k} is not a multiple of 128"
    # bfe983c's chooser finds no pipeline for fewer than three steps of 128.
    if k < 384:
        return f"K = {k} is less than 384, the least DeepGEMM bfe983c supports"
    return ""
