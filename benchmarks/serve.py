#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` with the DeepGEMM linear path off and on, driven by `vllm bench serve`.

    python benchmarks/serve.py Qwen/Qwen3-32B-FP8 --out serve.json
    python benchmarks/serve.py --shapes-of benchmarks/models/qwen3-32b.json --sweep
    ... --variant later=/srv/later/bin/python      one more vLLM; -- ARGS go to `vllm serve`

The default load is PR 19085's: 10 random prompts of 100 tokens in and out, all at
once, no prefix caching. Variants take turns (A B A B), so that drift cancels. All
servers share the GPU, one starting after the other; with --alone each has it for
itself and is started anew for every turn. Never two starts at once: vLLM's memory
profiling and torch.compile's cache are not made for it.

Exit codes: 0 measured, 2 a server or a load failed, 130 interrupted.
"""
import argparse
import json
import os
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import random_model

PROJECT = Path(__file__).resolve().parent.parent
SWITCH = "VLLM_USE_DEEP_GEMM_LINEAR"
PATH_LINE = "DeepGEMM linear layers:"
LATENCIES = [f"{kind}_{name}_ms" for name in ("ttft", "tpot", "itl")
             for kind in ("mean", "median", "p99")]
METRICS = ["request_throughput", "output_throughput", "total_token_throughput", *LATENCIES]


# A proxy in the environment is not for this machine's own servers.
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Failure(Exception):
    """An expected failure: one sentence, a hint, and the end of a log."""

    def __init__(self, sentence, hint, log=None):
        tail = "".join(f"\n| {line}" for line in log.read_text(errors="replace")
                       .splitlines()[-15:]) if log else ""
        super().__init__(f"error: {sentence}{tail}\n\nhint: {hint}")


# vLLM's own load generator, imported once for all loads of one interpreter.
_CLIENT = """
import argparse, json, os, sys, traceback
replies = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # whatever vLLM prints goes to the log, from its first import on
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
for line in sys.stdin:
    try:
        main(parser.parse_args(json.loads(line)))
        reply = "done"
    except BaseException:
        traceback.print_exc()
        reply = "failed"
    print(reply, file=replies, flush=True)
"""


class Client:
    """`vllm bench serve` of one interpreter, load after load."""

    def __init__(self, python, folder):
        self.log = folder / "client.log"
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [python, "-c", _CLIENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=log, text=True, start_new_session=True)

    def run(self, arguments):
        """Whether `vllm bench serve` with these arguments went well."""
        try:
            print(json.dumps(arguments), file=self.process.stdin, flush=True)
        except BrokenPipeError:
            return False
        return self.process.stdout.readline() == "done\n"

    def stop(self):
        end_group(self.process)


def path_taken(log):
    """What the warm-up said of the DeepGEMM path in a log of vLLM's, or nothing."""
    return next((line[line.index(PATH_LINE):] for line in
                 log.read_text(errors="replace").splitlines() if PATH_LINE in line), "")


def load_name(load):
    return f"{load['concurrency']} at once, {load['input_len']} in, {load['output_len']} out"


class Server:
    """One `vllm serve` in a process group of its own."""

    def __init__(self, name, python, model, folder, arguments, environment):
        self.name, self.python, self.model = name, python, model
        self.log = folder / f"server-{name}.log"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.command = [python, "-m", "vllm.entrypoints.cli.main", "serve", model,
                        "--host", "127.0.0.1", "--port", str(self.port),
                        "--no-enable-prefix-caching", "--disable-log-requests", *arguments]
        self.environment = {**os.environ, **environment}
        self.process = None

    def start(self, seconds):
        """Returns the seconds until it is healthy. Raises Failure."""
        began = said = time.monotonic()
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=subprocess.STDOUT,
                                            env=self.environment, start_new_session=True)
        while not self.healthy():
            if self.process.poll() is not None:
                raise Failure(f"the server '{self.name}' ended with {self.process.returncode} "
                              "while starting", f"{SWITCH}={self.environment[SWITCH]} "
                              + shlex.join(self.command), self.log)
            now = time.monotonic()
            if now - began > seconds:
                raise Failure(f"the server '{self.name}' is not up after {seconds:.0f} s",
                              "--start-timeout SECONDS", self.log)
            if now - said > 10:
                said = now
                last = self.log.read_text(errors="replace").splitlines()[-1:]
                print(f"starting {self.name}, {now - began:.0f} s  {''.join(last)[-80:]}",
                      flush=True)
            time.sleep(0.5)
        took = time.monotonic() - began
        self.path = path_taken(self.log)
        print(f"{self.name}: up after {took:.0f} s. {self.path or 'stock linear layers'}",
              flush=True)
        if self.environment[SWITCH] == "1" and not self.path:
            raise Failure(f"the server '{self.name}' does not take the DeepGEMM path",
                          f"{self.python} doctor.py", self.log)
        return took

    def healthy(self):
        try:
            with _direct.open(f"http://127.0.0.1:{self.port}/health", timeout=5) as answer:
                return answer.status == 200
        except (OSError, urllib.error.URLError):
            return False

    def drive(self, client, load, seed):
        """Metrics of one load, as `vllm bench serve` saves them. Raises Failure."""
        if self.process.poll() is not None:
            raise Failure(f"the server '{self.name}' ended with {self.process.returncode}",
                          "its log tells why", self.log)
        result = self.log.with_name("bench.json")
        result.unlink(missing_ok=True)
        went_well = client.run([
            "--model", self.model, "--host", "127.0.0.1", "--port", str(self.port),
            "--dataset-name", "random", "--random-input-len", str(load["input_len"]),
            "--random-output-len", str(load["output_len"]), "--ignore-eos",
            "--num-prompts", str(load["prompts"]), "--seed", str(seed),
            "--max-concurrency", str(load["concurrency"]), "--disable-tqdm",
            "--percentile-metrics", "ttft,tpot,itl", "--metric-percentiles", "99",
            "--save-result", "--result-dir", str(result.parent),
            "--result-filename", result.name])
        if not went_well or not result.exists():
            raise Failure(f"`vllm bench serve` against '{self.name}' failed",
                          "its log is above", client.log)
        metrics = json.loads(result.read_text())
        if metrics["completed"] != load["prompts"]:
            raise Failure(f"the server '{self.name}' answered {metrics['completed']} of "
                          f"{load['prompts']} requests", "its log is above", self.log)
        return {name: metrics[name] for name in METRICS}

    def stop(self):
        end_group(self.process)


def run_group(command, environment, output):
    """Run to the end; its whole process group goes with it."""
    process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT,
                               env=environment, start_new_session=True)
    try:
        return process.wait()
    finally:
        end_group(process)


def end_group(process):
    """Ask a process group to end, then make it."""
    for number, patience in ((signal.SIGTERM, 15), (signal.SIGKILL, 5)):
        if process is None:
            return
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            process.poll()
            return
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            process.poll()
            try:
                os.killpg(process.pid, 0)
            except ProcessLookupError:
                return
            time.sleep(0.1)


def loads_of(options):
    def load(concurrency, input_len):
        return dict(concurrency=concurrency, input_len=input_len, output_len=options.output_len,
                    prompts=options.prompts or max(10, concurrency))
    found = [load(options.concurrency, options.input_len)]
    if options.sweep:
        found += [load(c, options.input_len) for c in options.sweep_concurrency
                  if c != options.concurrency]
        found += [load(options.concurrency, n) for n in options.sweep_input_len
                  if n != options.input_len]
    return found


def servers_of(options, model, folder):
    variants = [("off", sys.executable, "0"), ("on", sys.executable, "1")]
    for text in options.variant:
        name, _, python = text.partition("=")
        if not python or not os.access(python, os.X_OK):
            raise Failure(f"--variant {text} names no interpreter that can be run",
                          "--variant NAME=/path/to/bin/python")
        variants.append((name, python, os.environ.get(SWITCH, "0")))
    arguments = list(options.serve_arguments)
    if "--gpu-memory-utilization" not in arguments:
        share = 0.9 if options.alone else 0.9 / len(variants)
        arguments += ["--gpu-memory-utilization", f"{share:.2f}"]
    if options.shapes_of:
        arguments += ["--load-format", "dummy"]
    return [Server(name, python, model, folder, arguments, {SWITCH: switch})
            for name, python, switch in variants]


def measure(options):
    folder = Path(options.logs or tempfile.mkdtemp(prefix="serve-"))
    folder.mkdir(parents=True, exist_ok=True)
    model = options.model
    if options.shapes_of:
        model = str(random_model.write(options.shapes_of, layers=options.layers))
    servers, loads = servers_of(options, model, folder), loads_of(options)
    result = dict(kind="serve", command=shlex.join(sys.argv), model=options.model or (
        f"{options.shapes_of}, {options.layers or 'all'} layers, random weights"),
        start_s={}, path={}, runs=[])
    turns = [(load, turn) for load in loads
             for turn in range(options.rounds if load is loads[0] else options.sweep_rounds)]
    clients = {}

    def up(server):
        result["start_s"][server.name] = round(server.start(options.start_timeout), 1)
        result["path"][server.name] = server.path
        # Not counted: what a first request pays, on either side.
        server.drive(clients[server.python], loads[0], seed=options.rounds)
    try:
        for server in servers:
            if server.python not in clients:
                clients[server.python] = Client(server.python, folder)
            if not options.alone:
                up(server)
        result["environment"] = environment()
        for count, (load, turn) in enumerate(turns, 1):
            for server in servers:
                if options.alone:
                    up(server)
                metrics = server.drive(clients[server.python], load, seed=turn)
                result["runs"].append(dict(variant=server.name, load=load, turn=turn, **metrics))
                if options.alone:
                    server.stop()
                print(f"{count} of {len(turns)}: {load_name(load)}, {server.name}: "
                      f"{metrics['output_throughput']:.1f} tok/s, TPOT "
                      f"{metrics['mean_tpot_ms']:.2f} ms", flush=True)
            keep(result, options)
    finally:
        # A second Ctrl-C must not leave a server behind.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for one in (*servers, *clients.values()):
            one.stop()
    print("\n".join(tables(result)))


def keep(result, options):
    """Write what there is: a run that is cut short keeps it."""
    if options.out:
        Path(options.out).write_text(json.dumps(result, indent=1) + "\n")


def environment():
    """GPU, driver, and what doctor.py says without touching the GPU."""
    try:
        gpu = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version",
                              "--format=csv,noheader"], capture_output=True, text=True,
                             timeout=30).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        gpu = "no nvidia-smi"
    told = subprocess.run([sys.executable, str(PROJECT / "doctor.py"), "--json", "--no-gpu"],
                          capture_output=True, text=True)
    try:
        lines = json.loads(told.stdout)["lines"]
    except ValueError:
        lines = []
    return dict(gpu=gpu, python=sys.version.split()[0], doctor=lines)


def medians(result, load):
    """{variant: {metric: median over the turns}} of one load."""
    runs = [run for run in result["runs"] if run["load"] == load]
    return {name: {metric: statistics.median(run[metric] for run in runs
                                             if run["variant"] == name) for metric in METRICS}
            for name in dict.fromkeys(run["variant"] for run in runs)}


def tables(result):
    """Markdown: the first load in full, then one row a load."""
    loads = list({json.dumps(run["load"]): run["load"] for run in result["runs"]}.values())
    values = medians(result, loads[0])
    names = list(values)
    yield f"\n{load_name(loads[0])}, {loads[0]['prompts']} requests\n"
    yield "| | " + " | ".join(names) + " | " + " | ".join(f"{n} / off" for n in names[1:]) + " |"
    yield "|---" * (2 * len(names)) + "|"
    for metric in METRICS:
        row = [values[name][metric] for name in names]
        yield (f"| {metric.replace('_', ' ')} | " + " | ".join(f"{v:.2f}" for v in row) + " | "
               + " | ".join(f"{v / row[0]:.3f}" for v in row[1:]) + " |")
    if len(loads) > 1:
        yield "\n| load | " + " | ".join(f"{n} tok/s" for n in names) + " | " + " | ".join(
            f"{n} / off | TPOT off / {n} | TTFT off / {n}" for n in names[1:]) + " |"
        yield "|---" * (1 + len(names) + 3 * (len(names) - 1)) + "|"
    for load in loads if len(loads) > 1 else ():
        values = medians(result, load)
        off = values["off"]
        yield f"| {load_name(load)} | " + " | ".join(
            f"{values[n]['output_throughput']:.1f}" for n in names) + " | " + " | ".join(
            f"{values[n]['output_throughput'] / off['output_throughput']:.3f} | "
            f"{off['median_tpot_ms'] / values[n]['median_tpot_ms']:.3f} | "
            f"{off['median_ttft_ms'] / values[n]['median_ttft_ms']:.3f}"
            for n in names[1:]) + " |"


def main():
    own, serve = sys.argv[1:], []
    if "--" in own:
        own, serve = own[:own.index("--")], own[own.index("--") + 1:]
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", nargs="?", help="model folder or id")
    add("--shapes-of", metavar="CONFIG", help="random weights of this config.json")
    add("--layers", type=int, help="with --shapes-of: instead of the config's")
    add("--variant", action="append", default=[], metavar="NAME=PYTHON", help="another vLLM")
    add("--concurrency", type=int, default=10, help="requests at once (default: 10)")
    add("--input-len", type=int, default=100, help="tokens in (default: 100)")
    add("--output-len", type=int, default=100, help="tokens out (default: 100)")
    add("--prompts", type=int, help="requests a load (default: concurrency, at least 10)")
    add("--rounds", type=int, default=2, help="turns of the first load (default: 2)")
    add("--sweep", action="store_true", help="also other concurrencies and input lengths")
    add("--sweep-concurrency", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 256])
    add("--sweep-input-len", type=int, nargs="+", default=[1000, 3000])
    add("--sweep-rounds", type=int, default=2, help="turns of the other loads (default: 2)")
    add("--alone", action="store_true", help="one server at a time, started for every turn")
    add("--start-timeout", type=float, default=1800, help="seconds (default: 1800)")
    add("--logs", metavar="DIR", help="where server and load logs go (default: a new folder)")
    add("--out", help="JSON to write")
    options = parser.parse_args(own)
    options.serve_arguments = serve
    if bool(options.model) == bool(options.shapes_of):
        parser.error("give a model or --shapes-of CONFIG")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        measure(options)
    except Failure as failure:
        print(failure, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; every server was ended", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
