# SPDX-License-Identifier: Apache-2.0
"""The plan is exact: brute force over every M asks for the same kernels, no more.

Shared memory is counted by DeepGEMM where it is installed, elsewhere by a stand-in.
"""
import json
import sys

import pytest

from real_vllm import PROJECT

sys.path[:0] = [str(PROJECT / "overlay/vllm/model_executor/layers/quantization")]

import cpu_path  # noqa: E402

cpu_path.stand_in_deep_gemm()

from deep_gemm_linear import plan, shapes  # noqa: E402

MODELS = {path.stem: json.loads(path.read_text())
          for path in (PROJECT / "benchmarks/models").glob("*.json")}
RUNS = (("qwen3-32b", (1, 2, 4, 8)), ("qwen3-8b", (1,)), ("qwen3-14b", (1,)),
        ("deepseek-v3", (8,)))
SHAPES = sorted({shape for model, sizes in RUNS for tp in sizes
                 for shape in shapes.weight_shapes(MODELS[model], tp)
                 if not shapes.refusal(*shape)})


@pytest.mark.parametrize("num_sms", [78, 114, 132])
def test_equals_brute_force(num_sms):
    for n, k in SHAPES:
        asked = {}
        for m in range(1, 16385):
            asked.setdefault(plan.tile(m, n, k, num_sms).spec, m)
        planned = plan.kernels(n, k, num_sms, 16384)
        assert set(planned) == set(asked), (n, k)
        assert len(planned) == len(set(planned)) <= 40
        for limit in (1, 64, 65, 511, 513, 2048):
            assert set(plan.kernels(n, k, num_sms, limit)) >= {
                plan.tile(m, n, k, num_sms).spec for m in (1, limit)}


@pytest.mark.parametrize("m", [1, 7, 8, 63, 64, 65, 127, 128, 129, 511, 512, 513, 4095, 131072])
def test_tile_is_consistent(m):
    for n, k in SHAPES:
        tile = plan.tile(m, n, k, 132)
        spec = tile.spec
        assert m <= tile.rows < m + 256 and tile.rows % 8 == 0
        assert tile.box == min(tile.rows, spec.block_m)
        assert tile.rows <= spec.block_m or tile.rows % spec.block_m == 0
        assert 1 <= tile.grid <= 132
        assert 3 <= spec.stages * (spec.depth or 1) <= k // 128 + 1
        # Our own kernel knows one block of rows.
        assert not spec.depth or m <= spec.block_m


def test_short_k_gets_no_deeper_pipeline_than_it_has_steps():
    for k in (384, 512, 640):
        for n in (64, 576, 7168):
            for spec in plan.kernels(n, k, 132, 16384):
                depth = spec.depth or 1
                assert spec.stages * depth >= 3 and (spec.stages - 1) * depth < k // 128


def test_every_tile_of_the_tables_fits_shared_memory():
    for k in (384, 640, 25600):
        for spec in plan.candidates(64, 5120, k, 132):
            assert plan.smem_bytes(spec)[0] <= 227 * 1024


def test_shapes_of_known_models():
    assert shapes.weight_shapes(MODELS["qwen3-32b"], 1) == [
        (5120, 8192), (5120, 25600), (10240, 5120), (51200, 5120)]
    assert shapes.weight_shapes(MODELS["qwen3-32b"], 8) == [
        (1280, 5120), (5120, 1024), (5120, 3200), (6400, 5120)]
    assert shapes.weight_shapes(MODELS["deepseek-v3"], 8) == sorted([
        (576, 7168), (1536, 7168), (3072, 1536), (4096, 512), (7168, 2048),  # attention
        (4608, 7168), (7168, 2304),                                          # dense MLP
        (512, 7168), (7168, 256)])                                           # shared expert


def test_shapes_of_the_other_families():
    quantization = dict(quant_method="fp8", weight_block_size=[128, 128])
    moe = dict(model_type="qwen3_moe", hidden_size=2048, num_attention_heads=32,
               num_key_value_heads=4, head_dim=128, moe_intermediate_size=768,
               intermediate_size=6144, quantization_config=quantization)
    assert shapes.weight_shapes(moe, 1) == [(2048, 4096), (5120, 2048)]
    assert shapes.weight_shapes(moe, 8) == [(768, 2048), (2048, 512)]  # one KV head a rank
    llama = dict(model_type="llama", hidden_size=4096, num_attention_heads=32,
                 num_key_value_heads=8, intermediate_size=14336,
                 quantization_config=quantization)
    assert (28672, 4096) in shapes.weight_shapes(llama, 1)
    lite = dict(model_type="deepseek_v2", hidden_size=2048, num_attention_heads=16,
                kv_lora_rank=512, q_lora_rank=None, qk_rope_head_dim=64, qk_nope_head_dim=128,
                v_head_dim=128, moe_intermediate_size=1408, n_shared_experts=2,
                intermediate_size=10944, first_k_dense_replace=1,
                quantization_config=quantization)
    assert (3072, 2048) in shapes.weight_shapes(lite, 1)  # q_proj without a low rank


@pytest.mark.parametrize("change,why", [
    (dict(model_type="gpt2"), "gpt2"), (dict(quantization_config=None), "128x128"),
    (dict(quantization_config=dict(quant_method="fp8")), "128x128"),
    (dict(hidden_size=None), "hidden")])
def test_configs_that_are_refused(change, why):
    config = {**MODELS["qwen3-32b"], **change}
    if change.get("hidden_size", 1) is None:
        del config["hidden_size"]
    with pytest.raises(shapes.UnknownModel, match=why):
        shapes.weight_shapes(config, 1)
    with pytest.raises(shapes.UnknownModel, match="do not divide"):
        shapes.weight_shapes(MODELS["qwen3-32b"], 7)
