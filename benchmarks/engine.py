#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""One vLLM engine in this process: start, first prompts, TTFT, TPOT, path taken.

    VLLM_USE_DEEP_GEMM_LINEAR=1 python benchmarks/engine.py MODEL --out on.json
    ... --shapes-of benchmarks/models/qwen3-32b.json --layers 16     random weights

The first prompt of a length is where a missing kernel or an unplanned row count
would show: it is timed before any other of that length, then again (median of
three). VLLM_USE_V1=0 measures the V0 engine.
"""
import argparse
import json
import os
import random
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import random_model  # noqa: E402
from serve import keep  # noqa: E402

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
OVERLAY = "vllm.model_executor.layers.quantization.deep_gemm_linear.linear"
PROMPTS = (1, 7, 65, 129, 449, 700, 1025, 3000, 8000)


def path_state():
    """Kernels compiled in this process and calls by path, or None while switched off."""
    linear = sys.modules.get(OVERLAY)
    if linear is None:
        return None
    return dict(compiled=linear.cache_of_process().compiled, **linear.counts)


def measure(options):
    model = options.model
    arguments = dict(max_model_len=options.max_len, max_num_seqs=256,
                     max_num_batched_tokens=options.max_len, enable_chunked_prefill=False,
                     gpu_memory_utilization=0.85, enable_prefix_caching=False,
                     enforce_eager=options.eager)
    if options.shapes_of:
        model = str(random_model.write(options.shapes_of, layers=options.layers))
        arguments.update(load_format="dummy", skip_tokenizer_init=True)
    started = time.time()
    import torch
    from vllm import LLM, SamplingParams
    if os.environ.get("VLLM_USE_V1") != "0":
        arguments["compilation_config"] = dict(
            level=0 if options.eager else 3, full_cuda_graph=options.full_graph,
            cudagraph_capture_sizes=[1, 2, 4, 8, 10, 16])
    llm = LLM(model=model, **arguments)
    result = dict(command=" ".join(sys.argv), gpu=torch.cuda.get_device_name(0),
                  switch=os.environ.get("VLLM_USE_DEEP_GEMM_LINEAR", ""),
                  v1=os.environ.get("VLLM_USE_V1", "1"), layers=options.layers,
                  start_s=round(time.time() - started, 1), after_start=path_state())
    random.seed(0)
    vocabulary = llm.llm_engine.model_config.get_vocab_size() - 1000

    def run(prompts, tokens_in, tokens_out):
        texts = [dict(prompt_token_ids=random.choices(range(10, vocabulary), k=tokens_in))
                 for _ in range(prompts)]
        torch.cuda.synchronize()
        begin = time.perf_counter()
        llm.generate(texts, SamplingParams(max_tokens=tokens_out, ignore_eos=True,
                                           detokenize=False, temperature=0), use_tqdm=False)
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) * 1e3

    def again(*shape):
        return statistics.median(run(*shape) for _ in range(3))

    run(1, 33, 2)  # what any first request pays, whatever its length
    result["first_ms"], result["again_ms"] = {}, {}
    for length in options.prompts:
        result["first_ms"][length] = round(run(1, length, 1), 2)
        result["again_ms"][length] = round(again(1, length, 1), 2)
    for batch in (1, 10):
        run(batch, 100, 8)
        ttft, whole = again(batch, 100, 1), again(batch, 100, 100)
        result[f"ttft_{batch}_ms"] = round(ttft, 2)
        result[f"tpot_{batch}_ms"] = round((whole - ttft) / 99, 3)
    result["at_end"] = path_state()
    print(json.dumps(result), flush=True)
    keep(result, options)
    if options.profile:
        profile(torch, lambda: run(10, 100, 12))


def profile(torch, call):
    """Print the 25 kernels that take the most of `call`."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        call()
    for event in sorted(trace.key_averages(), key=lambda e: -e.self_device_time_total)[:25]:
        print(f"{event.self_device_time_total / 1e3:9.2f} ms {event.count:6} x "
              f"{event.self_device_time_total / event.count:9.2f} us  {event.key[:100]}")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="model folder or id")
    parser.add_argument("--shapes-of", metavar="CONFIG", help="random weights of this config.json")
    parser.add_argument("--layers", type=int, help="instead of the config's")
    parser.add_argument("--prompts", type=int, nargs="*", default=list(PROMPTS), metavar="TOKENS")
    parser.add_argument("--max-len", type=int, default=8192, help="tokens in one step at most")
    parser.add_argument("--eager", action="store_true", help="no torch.compile, no graphs")
    parser.add_argument("--full-graph", action="store_true", help="whole-model CUDA graphs")
    parser.add_argument("--profile", action="store_true", help="kernel table of 12 decode steps")
    parser.add_argument("--out", help="JSON to write")
    options = parser.parse_args()
    if bool(options.model) == bool(options.shapes_of):
        parser.error("give a model or --shapes-of CONFIG")
    measure(options)


if __name__ == "__main__":
    main()
