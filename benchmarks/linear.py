#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every path a user of these releases could have, side by side on one GPU.

    python benchmarks/linear.py --out linear.json      measure (Hopper, patched vLLM)
    python benchmarks/linear.py --plot linear.json     linear.png from a result
    python benchmarks/linear.py --tiles --quick        the likeliest tiles, and the plan's choice
    python benchmarks/linear.py --scales tensor        per-tensor weights (or channel)

Paths: `ours` (the patched op), `cutlass` and `triton` (vLLM's own, through the
same op), `pr19085` (vLLM's quantizer with column-major scales, then
deep_gemm.gemm_fp8_fp8_bf16_nt). Each is checked against float32 first, then
timed under CUDA graphs over weights rotated past the L2 cache, median of many,
paths taking turns. `gemm` is our GEMM alone, `quant` our quantizer alone.

With `--scales` the rivals are vLLM's Fp8LinearOp, which serves such checkpoints,
with activation scales `token` (dynamic, its default), `tensor` (dynamic) and
`static`. Ours sees the weight's one scale expanded to blocks, or unit block
scales and the channels' scales multiplied in afterwards.
"""
import argparse
import json
import math
import os
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from serve import SWITCH, keep  # noqa: E402

PROJECT = Path(__file__).resolve().parent.parent
MODELS = PROJECT / "benchmarks" / "models"
MS = (1, 2, 4, 8, 10, 16, 24, 32, 48, 64, 65, 80, 96, 128, 160, 192, 256, 384, 512,
      1024, 2048, 4096, 8192)
RUNS = (("qwen3-32b", 1), ("qwen3-32b", 2), ("qwen3-32b", 4), ("qwen3-32b", 8),
        ("qwen3-8b", 1), ("qwen3-14b", 1), ("deepseek-v3", 8))
BLOCK = [128, 128]
PATHS = ("ours", "cutlass", "triton", "pr19085")
PARTS = ("gemm", "quant")
TILE_MS = (16, 64, 96, 128, 192, 256, 320, 384, 512, 640, 768, 1024, 1536, 2048, 3072, 4096)


def layers(options):
    """(label, N, K) of each distinct weight, first model first."""
    if options.weight:
        return [("", n, k) for n, k in options.weight]
    from vllm.model_executor.layers.quantization.deep_gemm_linear import shapes
    found = {}
    for model, tp in RUNS[:1] if options.quick else RUNS:
        config = json.loads((MODELS / f"{model}.json").read_text())
        for n, k in shapes.weight_shapes(config, tp):
            if not shapes.refusal(n, k):
                found.setdefault((n, k), f"{model} TP{tp}")
    return [(label, n, k) for (n, k), label in found.items()]


class Bench:
    """Tensors of one weight shape and the four paths over them."""

    def __init__(self, torch, n, k, max_m):
        from vllm.model_executor.layers.quantization.deep_gemm_linear import linear
        from vllm.model_executor.layers.quantization.utils import fp8_utils
        self.torch, self.n, self.k = torch, n, k
        self.linear, self.fp8_utils = linear, fp8_utils
        copies = max(2, math.ceil(200e6 / (n * k)))
        self.weights = []
        for _ in range(copies):
            # Random bytes without the two NaN codes: cheap for any size.
            bits = torch.randint(0, 256, (n, k), device="cuda", dtype=torch.uint8)
            bits[(bits & 0x7F) > 0x60] = 0x38
            scale = torch.rand(-(-n // 128), k // 128, device="cuda") * 1e-2 + 1e-3
            self.weights.append((bits.view(torch.float8_e4m3fn), scale))
        self.copies, self.buffers = copies, {}
        self.x = torch.randn(max_m, k, device="cuda", dtype=torch.bfloat16)
        self.layer = linear.layer_for(torch.bfloat16, *self.weights[0], BLOCK,
                                      self.x.device)

    def turns(self, m):
        """Passes over the copies that make a graph long enough to time."""
        floor = max(4, self.n * self.k / 4e6, 2 * m * self.n * self.k / 1e9)
        return -(-min(64, math.ceil(400 / floor)) // self.copies)

    def run(self, path, m, copy):
        x, (weight, scale) = self.x[:m], self.weights[copy]
        torch, fp8 = self.torch, self.fp8_utils
        os.environ[SWITCH] = "1" if path == "ours" else "0"
        if path == "pr19085":
            import deep_gemm
            q, s = fp8.per_token_group_quant_fp8(x, 128, column_major_scales=True)
            out = torch.empty(m, self.n, device="cuda", dtype=torch.bfloat16)
            deep_gemm.gemm_fp8_fp8_bf16_nt((q, s), (weight, scale), out)
            return out
        return fp8.apply_w8a8_block_fp8_linear(
            x, weight, BLOCK, scale, cutlass_block_fp8_supported=path != "triton")

    def part(self, which, m, copy, tile=None):
        """Our quantizer, our GEMM or both, on buffers made once for each row count."""
        torch, tile = self.torch, tile or self.layer.tile(m)
        weight, scale = self.weights[copy]
        if (m, tile.rows) not in self.buffers:
            if any(rows != m for rows, _ in self.buffers):
                self.buffers.clear()
            self.buffers[m, tile.rows] = (
                torch.zeros(tile.rows * (self.k + self.k // 32), device="cuda", dtype=torch.uint8),
                torch.empty(m, self.n, device="cuda", dtype=torch.bfloat16))
            # Real values: a product of zeros draws less power and runs at higher clocks.
            self.part("quant", m, copy, tile)
        buffer, out = self.buffers[m, tile.rows]
        q = buffer.data_ptr()
        scales, stream = q + tile.rows * self.k, torch.cuda.current_stream().cuda_stream
        if which != "gemm":
            self.linear.quantizer_of_device(0).run(m, self.k, self.x.data_ptr(), self.k, q,
                                                   scales, tile.rows, stream)
        if which != "quant":
            self.layer.load(tile.spec).run(tile, m, q, scales, weight.data_ptr(),
                                           scale.data_ptr(), out.data_ptr(), stream)

    def paths(self):
        # What vLLM's own gate and PR 19085's would refuse is no rival.
        whole = self.n % 128 == 0 and self.k % 128 == 0
        return [p for p in PATHS if whole or p in ("ours", "triton")]

    def expanded(self, scale):
        return scale.repeat_interleave(128, 0)[:self.n].repeat_interleave(128, 1)

    def errors(self, m):
        """Relative error of each path against float32 on the bfloat16 input."""
        weight, scale = self.weights[0]
        exact = self.x[:m].float() @ (weight.float() * self.expanded(scale)).t()
        return {p: ((self.run(p, m, 0).float() - exact).norm() / exact.norm()).item()
                for p in self.paths()}

    def graph(self, call, turns):
        """A graph over all weight copies, several times."""
        torch = self.torch
        copies = list(range(self.copies)) * turns
        call(0)
        torch.cuda.synchronize()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        # Not torch.cuda.graph: it collects garbage first, a quarter of a second here.
        with torch.cuda.stream(stream):
            graph.capture_begin()
            for copy in copies:
                call(copy)
            graph.capture_end()
        return graph

    def time(self, calls, m, budget_ms):
        """Median microseconds of one call for each name, names taking turns."""
        torch, turns = self.torch, self.turns(m)
        graphs = {name: self.graph(call, turns) for name, call in calls.items()}
        starts, ends = ([torch.cuda.Event(enable_timing=True) for _ in range(64)]
                        for _ in range(2))
        times = {name: [] for name in graphs}
        for graph in graphs.values():
            graph.replay()
        torch.cuda.synchronize()
        spent, rounds = 0.0, 0
        while rounds < 5 or (spent < budget_ms and rounds < 60):
            for slot, graph in enumerate(graphs.values()):
                starts[slot].record()
                graph.replay()
                ends[slot].record()
            torch.cuda.synchronize()
            for slot, name in enumerate(graphs):
                elapsed = starts[slot].elapsed_time(ends[slot])
                times[name].append(elapsed * 1e3 / self.copies / turns)
                spent += elapsed
            rounds += 1
        return {name: statistics.median(values) for name, values in times.items()}

    def host(self, path, m):
        """Median host microseconds of one eager call, the GPU never waited for."""
        torch, values = self.torch, []
        for turn in range(60):
            start = time.perf_counter()
            self.run(path, m, turn % self.copies)
            values.append((time.perf_counter() - start) * 1e6)
            if turn % 10 == 9:
                torch.cuda.synchronize()
        return statistics.median(values[20:])


class ScaledBench(Bench):
    """The same weights with one scale a tensor or a channel."""

    def __init__(self, torch, n, k, max_m, scales):
        from vllm.model_executor.layers.quantization.utils.w8a8_utils import Fp8LinearOp
        super().__init__(torch, n, k, max_m)
        self.blocks = [scale for _, scale in self.weights]
        shape = (1,) if scales == "tensor" else (n, 1)
        self.weights = [(weight, torch.rand(shape, device="cuda") * 1e-2 + 1e-3)
                        for weight, _ in self.weights]
        for block, (_, scale) in zip(self.blocks, self.weights):
            block.fill_(scale.item() if scales == "tensor" else 1.0)
        self.rivals = {"token": (Fp8LinearOp(True, True, False), None),
                       "tensor": (Fp8LinearOp(True, False, False), None),
                       "static": (Fp8LinearOp(True, False, False),
                                  (self.x.abs().max() / 448).float().reshape(1))}

    def run(self, path, m, copy):
        x, (weight, scale) = self.x[:m], self.weights[copy]
        if path == "ours":
            os.environ[SWITCH] = "1"
            out = self.fp8_utils.apply_w8a8_block_fp8_linear(x, weight, BLOCK,
                                                             self.blocks[copy])
            return out if scale.numel() == 1 else out.mul_(scale.view(-1))
        op, input_scale = self.rivals[path]
        return op.apply(x, weight.t(), scale, x.dtype, input_scale)

    def paths(self):
        return ["ours", *self.rivals]

    def expanded(self, scale):
        return scale


def _best_ms(torch, call):
    """Least milliseconds of ten runs."""
    best = math.inf
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end))
    return best


def read_bandwidth(torch):
    """Best of ten sums over 4 GiB, in TB/s: the floor's rate."""
    data = torch.randn(1 << 30, device="cuda")
    return data.numel() * 4 / _best_ms(torch, data.sum) / 1e9


def copy_bandwidth(torch):
    """Best of ten copies of 2 GiB, read plus write, in TB/s."""
    data = torch.randn(1 << 29, device="cuda")
    other = torch.empty_like(data)
    return data.numel() * 8 / _best_ms(torch, partial(other.copy_, data)) / 1e9


def short(kernel):
    """A kernel's name without the weight's shape."""
    return kernel.split("_", 2)[2]


def _compile_all(jobs, what):
    """Call `jobs` on all cores; the one place where kernels are compiled here."""
    started = time.time()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for job in [pool.submit(job) for job in jobs]:
            job.result()
    print(f"{what}, {time.time() - started:.0f} s", flush=True)


def prepare(found, ms, sms, pr):
    """Compile on all cores what any path will ask for."""
    from deep_gemm.jit import build
    from deep_gemm.jit_kernels.gemm import get_best_configs
    from deep_gemm.jit_kernels.runtime import FP8GemmRuntime, GemmType
    from vllm.model_executor.layers.quantization.deep_gemm_linear import linear, plan
    cache = linear.cache_of_process()
    ours = {plan.tile(m, n, k, sms).spec for _, n, k in found for m in ms}
    theirs = {}
    for _, n, k in found if pr else ():
        for m in ms:
            if n % 128 == 0:
                _, bm, bn, stages, (cluster, on_a), smem = get_best_configs(m, n, k, 1, sms)
                theirs[(n, k, bm, bn, stages, cluster, on_a, smem)] = None

    def build_theirs(key):
        n, k, bm, bn, stages, cluster, on_a, smem = key
        code = FP8GemmRuntime.generate(
            N=n, K=k, BLOCK_M=bm, BLOCK_N=bn, BLOCK_K=128, BLOCK_N_PADDING=smem[2],
            SWIZZLE_D_MODE=smem[1], NUM_GROUPS=1, NUM_STAGES=stages, NUM_TMA_THREADS=128,
            NUM_MATH_THREADS_PER_GROUP=128, NUM_TMA_MULTICAST=cluster,
            IS_TMA_MULTICAST_ON_A=on_a, GEMM_TYPE=GemmType.Normal)
        build("gemm_fp8_fp8_bf16_nt", code, FP8GemmRuntime)

    _compile_all([partial(cache.get, spec) for spec in ours]
                 + [partial(build_theirs, key) for key in theirs],
                 f"{len(ours)} kernels of ours, {len(theirs)} of the PR's path")


def steady(torch):
    """Run until the clocks are those of a busy GPU; what the result says of the machine."""
    import vllm
    torch.manual_seed(0)
    warm = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(300):
        warm @ warm
    result = dict(gpu=torch.cuda.get_device_name(0),
                  sms=torch.cuda.get_device_properties(0).multi_processor_count,
                  torch=torch.__version__, vllm=vllm.__version__, command=" ".join(sys.argv),
                  read_tb_s=read_bandwidth(torch), copy_tb_s=copy_bandwidth(torch), cells=[])
    print(f"{result['gpu']}: reads {result['read_tb_s']:.2f} TB/s, copies "
          f"{result['copy_tb_s']:.2f} TB/s", flush=True)
    return result


def measure(options):
    import torch
    found = layers(options)
    ms, paths = options.m or MS, set(options.paths)
    result = dict(steady(torch), scales=options.scales)
    prepare(found, ms, result["sms"], "pr19085" in paths and options.scales == "block")
    for label, n, k in found:
        bench = Bench(torch, n, k, max(ms)) if options.scales == "block" else \
            ScaledBench(torch, n, k, max(ms), options.scales)
        print(f"\n{label}: weight [{n}, {k}], us a call, weight read once "
              f"{n * k / result['read_tb_s'] / 1e6:.1f} us", flush=True)
        rivals = [p for p in bench.paths() if p in paths or options.scales != "block"]
        for m in ms:
            calls = {p: partial(bench.run, p, m) for p in rivals}
            calls.update({part: partial(bench.part, part, m) for part in PARTS})
            cell = dict(layer=label, n=n, k=k, m=m, kernel=bench.layer.tile(m).spec.name,
                        us=bench.time(calls, m, options.budget))
            if m in (10, 65, 512) and n * k < 150e6:
                cell["error"] = bench.errors(m)
            if m in (1, 10, 512):
                cell["host_us"] = {p: bench.host(p, m) for p in rivals}
            result["cells"].append(cell)
            print(f"M {m:5} " + " ".join(f"{p} {t:8.2f}" for p, t in cell["us"].items())
                  + f"  {short(cell['kernel'])}", flush=True)
        bench = None
        torch.cuda.empty_cache()
        keep(result, options)
    summarize(result)


def measure_tiles(options):
    """Our call with the likeliest tiles: is the plan's choice the best one?

    Ends with each tile's time of one step along K in the GEMM alone, what
    plan.STEP_NS and plan.OVERLAPPED_NS are made of.
    """
    import torch
    from vllm.model_executor.layers.quantization.deep_gemm_linear import linear, plan
    result, gaps, steps = steady(torch), [], {}
    sms, found = result["sms"], layers(options)
    cache = linear.cache_of_process()
    ms = options.m or TILE_MS
    # More than the likely ones: what is never timed can never be found.
    tried = {(n, k, m): list(islice(plan.candidates(-(-m // 64) * 64, n, k, sms), options.tried))
             for _, n, k in found for m in ms}
    specs = dict.fromkeys(spec for some in tried.values() for spec in some)
    _compile_all([partial(cache.get, spec) for spec in specs], f"{len(specs)} kernels")
    for label, n, k in found:
        bench = Bench(torch, n, k, max(ms))
        print(f"\n{label}: weight [{n}, {k}], us a call: chosen, then the best three")
        for m in ms:
            tiles = {short(spec.name): plan.launch(spec, m, sms)
                     for spec in tried[n, k, m]}
            us, alone = (bench.time({name: partial(bench.part, part, m, tile=tile)
                                     for name, tile in tiles.items()}, m, options.budget)
                         for part in ("whole", "gemm"))
            chosen = short(bench.layer.tile(m).spec.name)
            best = sorted(us, key=us.get)
            for name, tile in tiles.items():
                spec = tile.spec
                blocks = plan.tiles(m, n, spec.block_m, spec.block_n)
                # Where the memory decides, a step's time says nothing of the tile.
                if alone[name] > 1.3 * n * k / result["read_tb_s"] / 1e6:
                    kind = f"{spec.block_m}x{spec.block_n}" + (spec.depth > 0) * " overlapped"
                    steps.setdefault(kind, []).append(
                        (alone[name] * 1e3 / -(-blocks // sms) - plan.TILE_NS) / (k // 128))
            gaps.append(us[chosen] / us[best[0]] - 1)
            result["cells"].append(dict(layer=label, n=n, k=k, m=m, chosen=chosen, tiles=us,
                                        alone=alone))
            print(f"M {m:5} {chosen} {us[chosen]:.2f} ({100 * gaps[-1]:+.1f} %)  "
                  + "  ".join(f"{name} {us[name]:.2f}" for name in best[:3]), flush=True)
        keep(result, options)
    print(f"\n{len(gaps)} choices: {100 * statistics.mean(gaps):.1f} % above the best tile on "
          f"average, {100 * max(gaps):.1f} % at most\nns a step:")
    result["step_ns"] = {name: statistics.median(values) for name, values in steps.items()}
    for name, value in sorted(result["step_ns"].items()):
        print(f"  {name:18} {value:5.0f}  ({len(steps[name])} cells, "
              f"{min(steps[name]):.0f} to {max(steps[name]):.0f})")
    keep(result, options)


def rivals_of(cell):
    return [p for p in cell["us"] if p not in ("ours", *PARTS)]


def geomean(values):
    values = list(values)
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def summarize(result):
    """The lines of the speed table, from a result."""
    cells = result["cells"]
    slower = sorted(((c["us"]["ours"] / min(c["us"][p] for p in rivals_of(c)) - 1, c)
                     for c in cells), key=lambda pair: -pair[0])
    over3 = [s for s, _ in slower if s > 0.03]
    over1 = [s for s, _ in slower if s > 0.01]
    print(f"\n{len(cells)} cells; slower than the best rival by more than 3 %: {len(over3)}, "
          f"by more than 1 %: {len(over1)} ({100 * len(over1) / len(cells):.1f} %)")
    for gap, cell in slower[:12]:
        if gap > 0.01:
            print(f"  {100 * gap:5.1f} %  [{cell['n']}, {cell['k']}] M {cell['m']} "
                  f"{short(cell['kernel'])}: "
                  + ", ".join(f"{p} {cell['us'][p]:.1f}" for p in ("ours", *rivals_of(cell))))
    small = [c for c in cells if c["layer"] == "qwen3-32b TP1" and c["m"] <= 64]
    for rival in dict.fromkeys(p for c in cells for p in rivals_of(c)):
        for some, where in ((small, "Qwen3-32B TP1, M <= 64"), (cells, "all cells")):
            ratio = geomean(c["us"][rival] / c["us"]["ours"] for c in some if rival in c["us"])
            print(f"{where}, geometric mean over {rival}: {ratio:.2f}x")
    if result.get("scales", "block") != "block":
        return summarize_scaled(cells)
    for name, n, k in (("gate_up", 51200, 5120), ("down", 5120, 25600)):
        share = [n * k / result["read_tb_s"] / 1e6 / c["us"]["gemm"] for c in small
                 if (c["n"], c["k"]) == (n, k)]
        if share:
            print(f"{name}, M <= 64, GEMM alone, share of read bandwidth: "
                  f"{100 * min(share):.0f} to {100 * max(share):.0f} %")
    for c in cells:
        if (c["n"], c["k"], c["m"]) == (5120, 25600, 4096):
            moved = c["m"] * c["k"] * (3 + 4 / 128)
            print(f"quantization K 25600 M 4096: {c['us']['quant']:.1f} us, "
                  f"{100 * moved / result['copy_tb_s'] / 1e6 / c['us']['quant']:.0f} % of copy "
                  f"bandwidth\ndown_proj M 4096 over CUTLASS: "
                  f"{c['us'].get('cutlass', math.nan) / c['us']['ours']:.2f}x")
    host = [c["host_us"] for c in cells if "cutlass" in c.get("host_us", {})]
    if host:
        print("host time of an eager call, ours / CUTLASS: "
              f"{geomean(h['ours'] / h['cutlass'] for h in host):.2f} "
              f"({statistics.median(h['ours'] for h in host):.1f} and "
              f"{statistics.median(h['cutlass'] for h in host):.1f} us)")
    errors = [c["error"] for c in cells if "cutlass" in c.get("error", {})]
    if errors:
        print("relative error against float32, ours less CUTLASS, largest: "
              f"{max(e['ours'] - e['cutlass'] for e in errors):.1e}")


def summarize_scaled(cells):
    """By row count: how often and by how much ours wins against each of vLLM's ways."""
    for m in dict.fromkeys(c["m"] for c in cells):
        mine = [c for c in cells if c["m"] == m]
        print(f"M {m:5} ours is faster by " + ", ".join(
            f"{geomean(c['us'][p] / c['us']['ours'] for c in mine):.2f}x over {p} (wins by 3 % "
            f"in {sum(c['us'][p] / c['us']['ours'] >= 1.03 for c in mine)} of {len(mine)})"
            for p in rivals_of(mine[0])))
    for path in ("ours", *rivals_of(cells[0])):
        errors = [c["error"][path] for c in cells if "error" in c]
        print(f"relative error against float32, {path}: {statistics.mean(errors):.4f} on "
              f"average, {max(errors):.4f} at most")


def plot(path):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    result = json.loads(Path(path).read_text())
    cells = [c for c in result["cells"] if "cutlass" in c["us"]]
    figure, axes = plt.subplots(1, 2, figsize=(14, 5.5))
    for n, k in dict.fromkeys((c["n"], c["k"]) for c in cells
                              if c["layer"] == "qwen3-32b TP1"):
        mine = [c for c in cells if (c["n"], c["k"]) == (n, k)]
        xs = [c["m"] for c in mine]
        axes[0].plot(xs, [c["us"]["cutlass"] / c["us"]["ours"] for c in mine], marker="o",
                     markersize=3, label=f"[{n}, {k}] over CUTLASS")
        if "pr19085" in mine[0]["us"]:
            axes[0].plot(xs, [c["us"]["pr19085"] / c["us"]["ours"] for c in mine], marker="x",
                         markersize=3, linestyle="--", color=axes[0].lines[-1].get_color(),
                         label=f"[{n}, {k}] over PR 19085")
        axes[1].plot(xs, [n * k / result["read_tb_s"] / 1e6 / c["us"]["gemm"] for c in mine],
                     marker="o", markersize=3, label=f"[{n}, {k}]")
    axes[0].axhline(1, color="grey", linewidth=0.8)
    axes[0].set_title("Speed-up of our whole op, Qwen3-32B TP1")
    axes[1].set_title("Weight read at the bandwidth limit / time of our GEMM")
    for axis in axes:
        axis.set_xscale("log", base=2)
        axis.set_xlabel("rows (M)")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    figure.suptitle(f"{result['gpu']}, vLLM {result['vllm']}")
    figure.tight_layout()
    figure.savefig(Path(path).with_suffix(".png"), dpi=110)
    print(Path(path).with_suffix(".png"))


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="JSON to write")
    parser.add_argument("--plot", metavar="JSON", help="draw a result instead of measuring")
    parser.add_argument("--summary", metavar="JSON", help="print a result's summary again")
    parser.add_argument("--quick", action="store_true", help="Qwen3-32B TP1 only")
    parser.add_argument("--weight", type=int, nargs=2, metavar=("N", "K"), action="append",
                        help="this weight only (may be repeated)")
    parser.add_argument("--m", type=int, nargs="+", help="row counts")
    parser.add_argument("--paths", nargs="+", default=list(PATHS), choices=PATHS)
    parser.add_argument("--scales", default="block", choices=("block", "tensor", "channel"),
                        help="scales of the weights (default: block)")
    parser.add_argument("--tiles", action="store_true", help="time the likeliest tiles")
    parser.add_argument("--tried", type=int, default=16, help="with --tiles: how many a cell")
    parser.add_argument("--budget", type=float, default=12, help="ms of timing a cell")
    options = parser.parse_args()
    if options.plot:
        return plot(options.plot)
    if options.summary:
        return summarize(json.loads(Path(options.summary).read_text()))
    return measure_tiles(options) if options.tiles else measure(options)


if __name__ == "__main__":
    sys.exit(main())
