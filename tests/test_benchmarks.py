# SPDX-License-Identifier: Apache-2.0
"""serve.py with a stand-in server, accuracy.py's statistics, and the report."""
import json
import math
import os
import signal
import subprocess
import sys
import time

import pytest

from real_vllm import PROJECT

BENCHMARKS = PROJECT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
import accuracy  # noqa: E402
import serve  # noqa: E402

# A package `vllm` that serves /health and "measures" what the server's switch says.
STAND_IN = '''
import http.server, os, subprocess, sys
arguments = dict(zip(sys.argv, sys.argv[1:]))
on = os.environ["VLLM_USE_DEEP_GEMM_LINEAR"] == "1"
fault = os.environ.get("STAND_IN_FAULT", "")
assert sys.argv[1] == "serve"
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])  # an engine
if fault == "start" and on:
    sys.exit("the weights are not there")
if on and fault != "stock":
    print("INFO DeepGEMM linear layers: 4 weight shapes", flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"20.0" if on else b"10.0")
http.server.HTTPServer(("127.0.0.1", int(arguments["--port"])), Handler).serve_forever()
'''
STAND_IN_CLIENT = '''
import json, os, time, urllib.request
print("INFO vLLM logs to stdout from its first import on", flush=True)
def add_cli_args(parser):
    for name in ("model", "host", "port", "dataset-name", "random-input-len", "num-prompts",
                 "random-output-len", "seed", "max-concurrency", "percentile-metrics",
                 "metric-percentiles", "result-dir", "result-filename"):
        parser.add_argument("--" + name)
    for name in ("ignore-eos", "disable-tqdm", "save-result"):
        parser.add_argument("--" + name, action="store_true")
def main(args):
    fault = os.environ.get("STAND_IN_FAULT", "")
    if fault == "slow":
        time.sleep(600)
    if fault == "client":
        raise OSError("connection refused on purpose")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    value = float(opener.open(f"http://{args.host}:{args.port}/").read())
    with open(os.path.join(args.result_dir, args.result_filename), "w") as file:
        json.dump(dict(dict.fromkeys(METRICS, value),
                       completed=int(args.num_prompts) - (fault == "errors")), file)
'''.replace("METRICS", repr(serve.METRICS))


@pytest.fixture
def stand_in(tmp_path):
    cli = tmp_path / "site/vllm/entrypoints/cli"
    cli.mkdir(parents=True)
    (cli / "main.py").write_text(STAND_IN)
    (tmp_path / "site/vllm/benchmarks").mkdir()
    (tmp_path / "site/vllm/benchmarks/serve.py").write_text(STAND_IN_CLIENT)
    return {**os.environ, "PYTHONPATH": str(tmp_path / "site")}


def left_behind(tmp_path):
    """Processes that were started with this test's stand-in."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                if str(tmp_path / "site").encode() in file.read() and int(pid) != os.getpid():
                    found.append(pid)
        except OSError:
            continue
    return found


def run(stand_in, tmp_path, *arguments, **environment):
    return subprocess.run([sys.executable, str(BENCHMARKS / "serve.py"), "model", "--logs",
                           str(tmp_path / "logs"), "--out", str(tmp_path / "serve.json"),
                           *arguments], capture_output=True, text=True, timeout=120,
                          env={**stand_in, **environment})


@pytest.mark.parametrize("way", [[], ["--alone"]])
def test_serve_measures_in_turns_and_leaves_nothing(stand_in, tmp_path, way):
    done = run(stand_in, tmp_path, "--sweep", "--sweep-concurrency", "1", "10",
               "--sweep-input-len", "300", *way)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "serve.json").read_text())
    assert [r["variant"] for r in result["runs"]] == ["off", "on"] * 6
    assert [r["load"]["concurrency"] for r in result["runs"][::4]] == [10, 1, 10]
    assert result["path"] == dict(off="", on="DeepGEMM linear layers: 4 weight shapes")
    assert "| output throughput | 10.00 | 20.00 | 2.000 |" in done.stdout
    assert "| 10 at once, 300 in, 100 out | 10.0 | 20.0 | 2.000 |" in done.stdout
    assert not left_behind(tmp_path)


@pytest.mark.parametrize("fault, said", [
    ("start", "'on' ended with 1 while starting\n| the weights are not there"),
    ("stock", "'on' does not take the DeepGEMM path"),
    ("client", "OSError: connection refused on purpose"),
    ("errors", "answered 9 of 10 requests")])
def test_serve_says_what_failed(stand_in, tmp_path, fault, said):
    done = run(stand_in, tmp_path, STAND_IN_FAULT=fault)
    assert done.returncode == 2 and said in done.stderr and "\n\nhint: " in done.stderr
    assert "\nTraceback" not in done.stderr  # one quoted from a log is fine
    assert not left_behind(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_interrupted_leaves_nothing(stand_in, tmp_path, number):
    process = subprocess.Popen([sys.executable, str(BENCHMARKS / "serve.py"), "model", "--logs",
                                str(tmp_path / "logs")], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True,
                               env={**stand_in, "STAND_IN_FAULT": "slow"})
    deadline = time.monotonic() + 60
    while not (tmp_path / "logs/server-on.log").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1)
    process.send_signal(number)
    assert process.wait(timeout=60) == 130
    assert "Traceback" not in process.stderr.read()
    assert not left_behind(tmp_path)


def test_paired_difference():
    off, on = {0: 1.0, 1: 0.0, 2: 1.0, 3: 0.0}, {0: 1.0, 1: 1.0, 2: 1.0, 3: 0.0}
    told = accuracy.paired(off, on)
    assert (told["off"], told["on"], told["delta"], told["changed"]) == (0.5, 0.75, 0.25, 1)
    assert math.isclose(told["standard_error"], 0.25)  # std([0, 1, 0, 0]) / 2
    told = accuracy.paired({0: [-30.0, 10], 1: [-10.0, 10]}, {0: [-31.0, 10], 1: [-11.0, 10]})
    assert told["unit"] == "nats" and math.isclose(told["delta"], 0.1)
    assert math.isclose(told["standard_error"], 0, abs_tol=1e-12) and told["off"] == 2.0


def test_token_comparison():
    one = [dict(tokens=[1, 2, 3], logprobs=[-1.0, -2.0]), dict(tokens=[4, 5], logprobs=[-1.0])]
    other = [dict(tokens=[1, 2, 9], logprobs=[-1.5, -2.0]), dict(tokens=[4, 5], logprobs=[-1.0])]
    told = accuracy.compare_tokens(one, other)
    assert told["equal_answers"] == 1 and told["equal_first_tokens"] == 2
    assert math.isclose(told["mean_abs_logprob_difference"], 0.5 / 3)


def test_accuracy_names_a_missing_lm_eval(tmp_path):
    (tmp_path / "lm_eval.py").write_text("raise ImportError('no lm_eval here')")
    done = subprocess.run([sys.executable, str(BENCHMARKS / "accuracy.py"), "model"],
                          capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.returncode == 2 and "no lm_eval here" in done.stderr and "hint: " in done.stderr


def test_report_is_one_page(stand_in, tmp_path):
    assert run(stand_in, tmp_path).returncode == 0
    told = dict(kind="accuracy", model="m", reference=None, command="accuracy.py m", tokens={},
                tasks=dict(facts=dict(acc=accuracy.paired({0: 1.0, 1: 0.0}, {0: 1.0, 1: 1.0}))))
    (tmp_path / "accuracy.json").write_text(json.dumps(told))
    done = subprocess.run([sys.executable, str(BENCHMARKS / "report.py"),
                           str(tmp_path / "serve.json"), str(tmp_path / "accuracy.json"),
                           str(BENCHMARKS / "results/linear-h200.json"),
                           "--out", str(tmp_path / "report")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 3 and 'src="serve.png"' not in page
    assert "<td>2.000</td>" in page and "facts, acc" in page
    (tmp_path / "broken.json").write_text("{")
    done = subprocess.run([sys.executable, str(BENCHMARKS / "report.py"),
                           str(tmp_path / "broken.json")], capture_output=True, text=True)
    assert done.returncode == 2 and "is not a result" in done.stderr


def test_padding_keeps_the_function():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    import smollm2
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        hidden_size=96, intermediate_size=200, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=1, vocab_size=64, rms_norm_eps=1e-5, tie_word_embeddings=True)).eval()
    wide = smollm2.pad(model)
    assert {p.shape[i] % 128 for name, p in wide.named_parameters() if "_proj" in name
            for i in (0, 1)} == {0}
    tokens = torch.randint(0, 64, (1, 33))
    for dtype, limit in ((torch.float32, 1e-4), (torch.bfloat16, 1e-2)):
        with torch.no_grad():
            one, other = (m.to(dtype)(tokens).logits.float() for m in (model, wide))
        assert one.norm() > 0 and (one - other).norm() / one.norm() < limit


def test_block_quantization(tmp_path):
    torch = pytest.importorskip("torch")
    import smollm2
    weight = torch.randn(256, 384)
    weight[128:, :128] = 0
    values, scale = smollm2.quantize(weight)
    assert values.dtype == torch.float8_e4m3fn and scale.shape == (2, 3)
    full = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert (values.float() * full - weight).norm() / weight.norm() < 0.04


def test_local_tasks_are_the_same_every_time():
    import local_tasks
    facts, words = list(local_tasks.facts()), list(local_tasks.last_words())
    assert facts == list(local_tasks.facts()) and len(facts) == 360 and len(words) == 240
    for item in facts:
        assert len(set(item["choices"])) == 4
        table = next(t for q, t in local_tasks.QUESTIONS
                     if item["question"].startswith(q.split("{")[0]))
        assert item["choices"][item["label"]] in table.values()
    assert all(item["text"].endswith("Last word:") and item["answer"] in item["text"]
               for item in words)


def test_a_model_folder_from_a_config_alone(tmp_path):
    pytest.importorskip("tokenizers")
    import random_model
    folder = random_model.write(BENCHMARKS / "models/qwen3-32b.json", tmp_path / "m", layers=3)
    config = json.loads((folder / "config.json").read_text())
    assert config["num_hidden_layers"] == 3 and config["hidden_size"] == 5120
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer("t5 t7 t151000").input_ids == [5, 7, 151000]
