# SPDX-License-Identifier: Apache-2.0
"""The patched apply_w8a8_block_fp8_linear on a Hopper GPU, against the stock path
and float32. Which path ran is asserted by the overlay's own counters."""
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")

NS = (64, 576, 1280, 2112, 3072, 5120, 10240)
KS = (128, 256, 384, 512, 1536, 5120, 7168, 25600)
MS = (0, 1, 3, 5, 63, 64, 65, 80, 127, 128, 200, 511, 512, 513, 4096)
BLOCK = [128, 128]


def modules():
    from vllm.model_executor.layers.quantization.deep_gemm_linear import linear, plan
    from vllm.model_executor.layers.quantization.utils import fp8_utils
    return linear, plan, fp8_utils


def weight_of(n, k, seed=0, device="cuda"):
    generator = torch.Generator(device=device).manual_seed(seed)
    weight = torch.randn(n, k, generator=generator, device=device).clamp(-3, 3) * 100
    scale = torch.rand(-(-n // 128), -(-k // 128), generator=generator,
                       device=device) * 1e-3 + 1e-4
    return weight.to(torch.float8_e4m3fn), scale


def dequantized(weight, scale):
    n, k = weight.shape
    full = scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    return weight.float() * full


def error(out, exact):
    return ((out.float() - exact).norm() / exact.norm()).item()


def ready(n, k, ms, device="cuda"):
    """Compile and load what `ms` rows ask for; returns the layer."""
    linear, plan, _ = modules()
    weight, scale = weight_of(n, k, device=device)
    layer = linear.layer_for(torch.bfloat16, weight, scale, BLOCK, weight.device)
    if layer is not None:
        specs = {layer.tile(m).spec for m in ms if m}
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(linear.cache_of_process().get, specs))
        assert all(layer.load(spec) for spec in specs)
    return layer


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """All kernels of this file at once, on all cores."""
    linear, plan, _ = modules()
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    specs = {plan.tile(m, n, k, sms).spec for n in NS for k in KS if k >= 384
             for m in MS if m}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(linear.cache_of_process().get, specs))


def call(x, weight, scale, bias=None, deep_gemm=True):
    """Run the op and return output and path taken."""
    linear, _, fp8_utils = modules()
    before = dict(linear.counts)
    old = os.environ["VLLM_USE_DEEP_GEMM_LINEAR"]
    os.environ["VLLM_USE_DEEP_GEMM_LINEAR"] = "1" if deep_gemm else "0"
    try:
        out = torch.ops.vllm.apply_w8a8_block_fp8_linear(x, weight, BLOCK, scale, None, bias)
    finally:
        os.environ["VLLM_USE_DEEP_GEMM_LINEAR"] = old
    changed = [name for name in before if linear.counts[name] != before[name]]
    return out, (changed or ["off"])[0]


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("n", NS)
def test_as_exact_as_the_stock_path(n, k):
    weight, scale = weight_of(n, k)
    exact_weight = dequantized(weight, scale)
    ready(n, k, MS)
    for m in MS:
        if k < 384 and m == 0:
            continue  # vLLM 0.9.1's CUTLASS call divides by zero rows and ends the process
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        out, path = call(x, weight, scale)
        if k < 384:
            assert path == "stock_refused"
            continue
        assert out.shape == (m, n) and out.dtype == torch.bfloat16
        if m == 0:
            continue
        assert path == "deep_gemm", (m, path)
        stock, path = call(x, weight, scale, deep_gemm=False)
        assert path == "off"
        exact = x.float() @ exact_weight.t()
        assert error(out, exact) <= error(stock, exact) + 1e-3, (m, error(out, exact))
        assert not out.isnan().any()


@pytest.mark.parametrize("n,k", [(576, 384), (4096, 512), (5120, 3200), (1280, 5120),
                                 (10240, 5120), (5120, 25600)])
def test_both_kernels_give_the_same_bits(n, k):
    linear, plan, fp8_utils = modules()
    weight, scale = weight_of(n, k)
    layer = linear.layer_for(torch.bfloat16, weight, scale, BLOCK, weight.device)
    for m, block_m in ((1, 64), (10, 64), (64, 64), (10, 128), (65, 128), (128, 128)):
        specs = list(plan.candidates(block_m, n, k, layer.num_sms))
        theirs = next(s for s in specs if not s.depth)
        ours = [s for s in specs if s.depth and s.block_m == block_m][:3]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(linear.cache_of_process().get, [theirs, *ours]))
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        stream = torch.cuda.current_stream().cuda_stream
        outs = []
        for spec in (theirs, *ours):
            tile = plan.launch(spec, m, layer.num_sms)
            # What absent rows hold must not matter.
            buffer = torch.full((tile.rows * (k + k // 32),), 0x7f, device="cuda",
                                dtype=torch.uint8)
            out = torch.full((m, n), float("nan"), device="cuda", dtype=torch.bfloat16)
            q = buffer.data_ptr()
            linear.quantizer_of_device(0).run(m, k, x.data_ptr(), k, q, q + tile.rows * k,
                                              tile.rows, stream)
            layer.load(spec).run(tile, m, q, q + tile.rows * k, weight.data_ptr(),
                                 scale.data_ptr(), out.data_ptr(), stream)
            outs.append(out)
        assert error(outs[0], x.float() @ dequantized(weight, scale).t()) < 0.05
        for spec, out in zip(ours, outs[1:]):
            assert torch.equal(out, outs[0]), (m, spec.name)


@pytest.mark.parametrize("m", [1, 5, 64, 200])
def test_bias_three_dimensions_and_strides(m):
    n, k = 1280, 5120
    weight, scale = weight_of(n, k)
    ready(n, k, [m, 2 * m])
    bias = torch.randn(n, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(2, m, k, device="cuda", dtype=torch.bfloat16)
    out, path = call(x, weight, scale, bias)
    stock, _ = call(x, weight, scale, bias, deep_gemm=False)
    assert path == "deep_gemm" and out.shape == (2, m, n)
    assert error(out, stock.float()) < 5e-3
    for offset, width in ((0, k + 8), (8, k + 64), (1, k + 3)):
        wide = torch.randn(m, width, device="cuda", dtype=torch.bfloat16)
        part = wide[:, offset:offset + k]
        if part.shape[1] < k:
            part = wide[:, width - k:]
        out, path = call(part, weight, scale)
        again, _ = call(part.contiguous(), weight, scale)
        assert path == "deep_gemm" and torch.equal(out, again)


def test_quantizer_gives_the_stock_bits():
    linear, plan, fp8_utils = modules()
    for m, k in ((1, 384), (7, 5120), (65, 7168), (513, 25600)):
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16) * 3
        x[0, :128] = 0
        q, scales = fp8_utils.per_token_group_quant_fp8(x, 128)
        rows = -(-m // 8) * 8
        mine = torch.zeros(rows, k, device="cuda", dtype=torch.uint8)
        mine_scales = torch.zeros(k // 128, rows, device="cuda")
        linear.quantizer_of_device(0).run(
            m, k, x.data_ptr(), k, mine.data_ptr(), mine_scales.data_ptr(), rows,
            torch.cuda.current_stream().cuda_stream)
        assert torch.equal(mine[:m], q.view(torch.uint8))
        assert torch.equal(mine_scales[:, :m].t(), scales)


def test_a_row_is_the_same_in_every_batch():
    """Numerics do not depend on M within one kernel, and barely across kernels."""
    n, k = 5120, 5120
    weight, scale = weight_of(n, k)
    ready(n, k, [1, 64, 65, 512, 513, 4096])
    x = torch.randn(4096, k, device="cuda", dtype=torch.bfloat16)
    one, _ = call(x[:1], weight, scale)
    assert torch.equal(call(x[:64], weight, scale)[0][:1], one)
    for m in (65, 512, 513, 4096):
        out, path = call(x[:m], weight, scale)
        assert path == "deep_gemm" and error(out[:1], one.float()) < 4e-3


def test_very_many_rows():
    n, k, m = 576, 7168, 131072 * 3
    weight, scale = weight_of(n, k)
    ready(n, k, [m])
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    out, path = call(x, weight, scale)
    assert path == "deep_gemm"
    exact = x[-64:].float() @ dequantized(weight, scale).t()
    assert error(out[-64:], exact) < 0.05


def test_graph_capture_and_replay():
    n, k = 1280, 5120
    weight, scale = weight_of(n, k)
    ready(n, k, [10])
    x = torch.randn(10, k, device="cuda", dtype=torch.bfloat16)
    expected, _ = call(x, weight, scale)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, path = call(x, weight, scale)
    assert path == "deep_gemm"
    out.zero_()
    graph.replay()
    assert torch.equal(out, expected)
    x.mul_(-2)
    graph.replay()
    assert torch.equal(out, call(x, weight, scale)[0])


def test_missing_kernel_in_capture_takes_the_stock_path():
    linear, _, _ = modules()
    n, k = 1280, 5120
    weight, scale = weight_of(n, k)
    call(torch.randn(9, k, device="cuda", dtype=torch.bfloat16), weight, scale,
         deep_gemm=False)
    layer = linear.Layer(n, k, torch.device("cuda:0"))
    kept = dict(linear._layers)
    for key in linear._layers:
        if linear._layers[key] is not None and linear._layers[key].n == n:
            linear._layers[key] = layer
    try:
        x = torch.randn(9, k, device="cuda", dtype=torch.bfloat16)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, path = call(x, weight, scale)
        assert path == "stock_missing_kernel"
        graph.replay()
        assert torch.equal(out, call(x, weight, scale, deep_gemm=False)[0])
        assert call(x, weight, scale)[1] == "deep_gemm"  # loaded outside capture
    finally:
        linear._layers.update(kept)


def test_weights_may_change_in_place_move_and_be_replaced():
    n, k, m = 1280, 5120, 16
    ready(n, k, [m])
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    first, second = weight_of(n, k, 1), weight_of(n, k, 2)
    wanted = [call(x, *pair, deep_gemm=False)[0].float() for pair in (first, second)]
    weight, scale = first[0].clone(), first[1].clone()
    assert error(call(x, weight, scale)[0], wanted[0]) < 5e-3
    weight.copy_(second[0])
    scale.copy_(second[1])
    assert error(call(x, weight, scale)[0], wanted[1]) < 5e-3
    for turn in range(20):  # freed and allocated anew: addresses come back
        del weight, scale
        weight, scale = ((first, second)[turn % 2][i].cpu().cuda() for i in (0, 1))
        out, path = call(x, weight, scale)
        assert path == "deep_gemm" and error(out, wanted[turn % 2]) < 5e-3


def test_a_call_sees_all_that_its_stream_did_before():
    """Both launches may start early: neither reads what a copy, a memset or another
    stream ahead of them still writes, eagerly and in a graph."""
    n, k, m = 5120, 5120, 16
    ready(n, k, [m])
    pairs = [weight_of(n, k, seed) for seed in (1, 2)]
    xs = [torch.randn(m, k, device="cuda", dtype=torch.bfloat16) for _ in pairs]
    expected = [[call(x, *pair)[0] for pair in pairs] for x in xs]
    weight, scale, x = torch.empty_like(pairs[0][0]), torch.empty_like(pairs[0][1]), \
        torch.empty_like(xs[0])
    other = torch.cuda.Stream()

    def update_x(i):
        x.copy_(xs[i])

    def update_weight(j):
        scale.copy_(pairs[j][1])
        weight.copy_(pairs[j][0])

    def steps():
        """Outputs and what they must be, the updates in every order."""
        for turn in range(12):
            i, j = turn % 2, turn // 2 % 2
            if turn % 3 == 0:
                update_weight(j)
                x.zero_()
                update_x(i)
            elif turn % 3 == 1:
                update_x(i)
                update_weight(j)
            else:
                other.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(other):
                    update_x(i)
                update_weight(j)
                torch.cuda.current_stream().wait_stream(other)
            yield call(x, weight, scale)[0], expected[i][j]
    for _ in range(20):
        assert all([torch.equal(out, wanted) for out, wanted in list(steps())])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = list(steps())
    alone = torch.cuda.CUDAGraph()  # a graph that begins with the call
    with torch.cuda.graph(alone):
        out = call(x, weight, scale)[0]
    for turn in range(20):
        graph.replay()
        update_weight(turn % 2)
        update_x(1 - turn % 2)
        alone.replay()
        assert torch.equal(out, expected[1 - turn % 2][turn % 2])
        assert all([torch.equal(out, wanted) for out, wanted in found])


def sleeping_weights():
    """Sleep mode as vLLM does it: level 1 brings the weights back, after level 2 they are
    loaded anew. Captured graphs must stay right as well."""
    from vllm.device_allocator.cumem import CuMemAllocator
    allocator = CuMemAllocator.get_instance()
    n, k, m = 1280, 5120, 16
    ready(n, k, [m])
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    first, second = weight_of(n, k, 1), weight_of(n, k, 2)
    with allocator.use_memory_pool(tag="weights"):
        weight, scale = first[0].clone(), first[1].clone()
    before, _ = call(x, weight, scale)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, _ = call(x, weight, scale)
    for level in (1, 2):
        allocator.sleep(offload_tags=("weights",) if level == 1 else ())
        allocator.wake_up()
        if level == 2:
            weight.copy_(second[0])
            scale.copy_(second[1])
            before, _ = call(x, *second)
        out, path = call(x, weight, scale)
        graph.replay()
        assert path == "deep_gemm" and torch.equal(out, before) and torch.equal(captured, before)
    # torch 2.7 aborts when it frees such a pool at exit.
    os._exit(0)


def test_weights_may_sleep():
    import multiprocessing
    process = multiprocessing.get_context("spawn").Process(target=sleeping_weights)
    process.start()
    process.join(120)
    assert process.exitcode == 0


def test_models_side_by_side():
    """Two models' weights, some of one shape, taking turns at changing row counts."""
    shapes = [(1280, 5120), (1280, 5120), (5120, 1536), (3072, 5120)]
    ms = (1, 40, 100, 600)
    weights = [weight_of(n, k, seed) for seed, (n, k) in enumerate(shapes)]
    for n, k in shapes:
        ready(n, k, ms)
    inputs = {k: torch.randn(max(ms), k, device="cuda", dtype=torch.bfloat16)
              for _, k in shapes}
    expected = {(i, m): call(inputs[k][:m], *weights[i])[0]
                for i, (_, k) in enumerate(shapes) for m in ms}
    for _ in range(3):
        for m in ms:
            for i, (_, k) in enumerate(shapes):
                out, path = call(inputs[k][:m], *weights[i])
                assert path == "deep_gemm" and torch.equal(out, expected[i, m])
    assert not torch.equal(expected[0, 40], expected[1, 40])


def test_a_missing_kernel_is_made_behind_the_request(tmp_path, monkeypatch):
    """The first call takes the stock path at once; after the compile ours is swapped in."""
    linear, plan, _ = modules()
    from pathlib import Path

    from vllm.model_executor.layers.quantization.deep_gemm_linear import background, gate
    from vllm.model_executor.layers.quantization.deep_gemm_linear.kernel_cache import KernelCache
    monkeypatch.setattr(linear, "_cache", KernelCache(gate.include_folder(), [Path(tmp_path)]))
    monkeypatch.setattr(linear, "_layers", {})
    weight, scale = weight_of(1280, 5120)
    x = torch.randn(7, 5120, device="cuda", dtype=torch.bfloat16)
    out, path = call(x, weight, scale)
    assert path == "stock_missing_kernel"
    background.wait()
    again, path = call(x, weight, scale)
    assert path == "deep_gemm" and linear.cache_of_process().compiled == 1
    assert error(again, out.float()) < 5e-3


def test_descriptor_table_may_overflow_in_the_middle_of_a_call(monkeypatch):
    linear, _, _ = modules()
    monkeypatch.setattr(linear, "_MAX_DESCRIPTORS", 2)
    n, k = 1280, 5120
    weight, scale = weight_of(n, k)
    ready(n, k, range(1, 65))
    x = torch.randn(64, k, device="cuda", dtype=torch.bfloat16)
    expected, _ = call(x, weight, scale)
    for m in range(1, 65):
        assert torch.equal(call(x[:m], weight, scale)[0], expected[:m])


def test_streams_and_threads():
    import threading
    n, k = 1280, 5120
    weight, scale = weight_of(n, k)
    ready(n, k, [1, 33, 100])
    failures = []

    def work(m):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
            expected = call_plain(x, weight, scale)
            for _ in range(200):
                if not torch.equal(call_plain(x, weight, scale), expected):
                    failures.append(m)
        stream.synchronize()

    def call_plain(x, weight, scale):
        return torch.ops.vllm.apply_w8a8_block_fp8_linear(x, weight, BLOCK, scale, None, None)

    workers = [threading.Thread(target=work, args=(m,)) for m in (1, 33, 100)]
    [w.start() for w in workers]
    [w.join() for w in workers]
    assert not failures


def test_memory_does_not_grow():
    import resource
    n, k = 1280, 5120
    weight, scale = weight_of(n, k)
    ready(n, k, range(1, 65))
    x = torch.randn(64, k, device="cuda", dtype=torch.bfloat16)
    for m in range(1, 65):
        call(x[:m], weight, scale)
    torch.cuda.synchronize()
    device, host = torch.cuda.memory_allocated(), resource.getrusage(resource.RUSAGE_SELF)
    for turn in range(10_000):
        torch.ops.vllm.apply_w8a8_block_fp8_linear(x[:turn % 64 + 1], weight, BLOCK, scale,
                                                   None, None)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == device
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - host.ru_maxrss < 16 << 10


def test_peak_memory_is_near_the_stock_path():
    n, k, m = 5120, 5120, 8192
    weight, scale = weight_of(n, k)
    ready(n, k, [m])
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    peaks = []
    for deep_gemm in (False, True):
        call(x, weight, scale, deep_gemm=deep_gemm)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        call(x, weight, scale, deep_gemm=deep_gemm)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] - peaks[0] <= 64 << 20


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU only")
def test_another_device():
    n, k = 1280, 5120
    for device in ("cuda:1", "cuda:0"):
        weight, scale = weight_of(n, k, device=device)
        ready(n, k, [10], device)
        x = torch.randn(10, k, device=device, dtype=torch.bfloat16)
        out, path = call(x, weight, scale)
        assert path == "deep_gemm" and out.device == x.device
        assert error(out, x.float() @ dequantized(weight, scale).t()) < 0.05


@pytest.mark.parametrize("kind", ["fp8 dynamic", "fp8 static", "compressed-tensors"])
def test_per_tensor_checkpoints_merged_layers(kind):
    """vLLM's own linear methods load three shards with a scale each; then ours takes over."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsLinearMethod,
    )
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
        CompressedTensorsW8A8Fp8,
    )
    from vllm.model_executor.layers.quantization.deep_gemm_linear import per_tensor
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config, Fp8LinearMethod
    k, shards, static = 5120, [1024, 128, 128], kind == "fp8 static"
    layer = torch.nn.Module()
    with set_current_vllm_config(VllmConfig()), torch.device("cuda"):
        if kind == "compressed-tensors":
            worker = layer.scheme = CompressedTensorsW8A8Fp8("tensor", False)
            method = CompressedTensorsLinearMethod(None)
        else:
            method = worker = Fp8LinearMethod(Fp8Config(True, "static" if static else "dynamic"))
            method.out_dtype = torch.bfloat16
        worker.out_dtype = torch.bfloat16
        worker.create_weights(layer, input_size_per_partition=k, output_partition_sizes=shards,
                              input_size=k, output_size=sum(shards), params_dtype=torch.bfloat16,
                              weight_loader=lambda *_: None)
    layer.quant_method = method
    scales = torch.tensor([1e-3, 5e-4, 2e-3], device="cuda")
    weight, _ = weight_of(sum(shards), k)
    layer.weight.data.copy_(weight)
    layer.weight_scale.data.copy_(scales)
    if static:
        layer.input_scale.data.fill_(5 / 448)
    exact_weight = weight.float() * scales.repeat_interleave(
        torch.tensor(shards, device="cuda"))[:, None]
    worker.process_weights_after_loading(layer)
    x = torch.randn(16, k, device="cuda", dtype=torch.bfloat16)
    bias = torch.randn(sum(shards), device="cuda", dtype=torch.bfloat16)
    exact = x.float() @ exact_weight.t() + bias.float()
    stock = method.apply(layer, x, bias)
    assert per_tensor.adopt(torch.nn.Sequential(layer), torch.bfloat16) == 1
    ready(sum(shards), k, [16])
    linear, _, _ = modules()
    before = linear.counts["deep_gemm"]
    out = layer.quant_method.apply(layer, x, bias)
    assert linear.counts["deep_gemm"] == before + 1
    assert error(out, exact) <= error(stock, exact) + 1e-3


def test_half_precision_runs_the_stock_path():
    weight, scale = weight_of(1280, 5120)
    x = torch.randn(3, 5120, device="cuda", dtype=torch.float16)
    out, path = call(x, weight, scale)
    assert path == "stock_refused"
    # Stream-K sums in no fixed order, so two stock runs need not agree to the bit.
    assert error(out, call(x, weight, scale, deep_gemm=False)[0].float()) < 1e-3


def test_torch_compile_with_symbolic_rows():
    n, k = 1280, 5120
    weight, scale = weight_of(n, k)
    ready(n, k, [1, 5, 64])
    graphs = []

    def backend(module, _):
        graphs.append(module)
        return module.forward

    @torch.compile(backend=backend, fullgraph=True, dynamic=True)
    def layer(x, bias):
        return torch.relu(torch.ops.vllm.apply_w8a8_block_fp8_linear(
            x, weight, BLOCK, scale, None, bias)) * 2

    bias = torch.randn(n, device="cuda", dtype=torch.bfloat16)
    for m in (5, 64, 33):
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        out = layer(x, bias)
        assert torch.equal(out, torch.relu(call(x, weight, scale, bias)[0]) * 2)
    assert len(graphs) == 1
