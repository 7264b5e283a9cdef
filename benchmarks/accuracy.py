#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Does the DeepGEMM linear path change what a model says? lm-eval, off and on, paired.

    python benchmarks/accuracy.py MODEL --tasks gsm8k --out accuracy.json
    ... --include-path FOLDER --tasks local_prose local_facts      without a network
    ... --reference MODEL-BF16                                     one more column

Both runs answer the same documents with the same seed, so the difference is taken
document by document; its standard error is far smaller than that of either score.
Then the same texts once more, token by token: greedy agreement and the difference
of log-probabilities. `off` runs twice there: what vLLM's own path differs from
itself is the measure for the rest.

Exit codes: 0 measured, 2 lm-eval is missing or a run failed, 130 interrupted.
"""
import argparse
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from serve import SWITCH, Failure, environment, keep, path_taken, run_group  # noqa: E402

TEXTS, TOKENS = 64, 64
OFF, ON, AGAIN, REFERENCE = "off", "on", "off again", "reference"


def evaluate(name, model, options, folder):
    """{task: {metric: {doc: value}}} and lm-eval's own results of one variant."""
    into, log = folder / name.replace(" ", "-"), folder / f"lm-eval-{name}.log"
    command = [sys.executable, "-m", "lm_eval", "--model", "vllm", "--model_args",
               f"pretrained={model},dtype=bfloat16,{options.model_args}".rstrip(","),
               "--tasks", ",".join(options.tasks), "--seed", str(options.seed),
               "--batch_size", "auto", "--log_samples", "--output_path", str(into)]
    if options.include_path:
        command += ["--include_path", options.include_path]
    if options.limit:
        command += ["--limit", str(options.limit)]
    print(f"lm-eval, {name}: {shlex.join(command)}", flush=True)
    with open(log, "w") as output:
        code = run_group(command, {**os.environ, SWITCH: "1" if name == ON else "0"}, output)
    if code:
        raise Failure(f"lm-eval with the path {name} ended with {code}",
                      "python -m pip install 'lm_eval[vllm]', or see the log above", log)
    samples, texts = {}, []
    for task in options.tasks:
        values = samples.setdefault(task, {})
        for path in into.rglob(f"samples_{task}_*.jsonl"):
            for line in path.read_text(encoding="utf-8").splitlines():
                sample = json.loads(line)
                for metric in sample["metrics"]:
                    key = metric if sample["filter"] == "none" else f"{metric}, {sample['filter']}"
                    values.setdefault(key, {})[sample["doc_id"]] = sample[metric]
                first = next(iter(sample["arguments"].values()))
                texts.append(first["arg_0"] or sample["target"])
        if not values:
            raise Failure(f"lm-eval kept no samples of {task}", "is it a group? name its tasks",
                          log)
    path = path_taken(log)
    if name == ON and not path:
        raise Failure("lm-eval's vLLM does not take the DeepGEMM path",
                      f"{sys.executable} doctor.py", log)
    return samples, list(dict.fromkeys(texts)), path


def paired(off, on):
    """Difference on - off over documents, with its standard error.

    `off`, `on`: {document: value}, a number, or for a perplexity the pair
    (log-likelihood, weight); then nats a unit of weight, by the ratio estimator.
    """
    documents = sorted(off.keys() & on.keys())
    one = [off[d] if isinstance(off[d], list) else (off[d], 1) for d in documents]
    two = [on[d] if isinstance(on[d], list) else (on[d], 1) for d in documents]
    n, weight = len(documents), sum(w for _, w in one)
    sign = -1 if isinstance(off[documents[0]], list) else 1
    delta = sign * sum(b - a for (a, _), (b, _) in zip(one, two)) / weight + 0.0  # no -0.0
    rest = sum((sign * (b - a) - delta * w) ** 2 for (a, w), (b, _) in zip(one, two))
    error = math.sqrt(n / max(n - 1, 1) * rest) / weight
    return dict(documents=n, off=sign * sum(a for a, _ in one) / weight,
                on=sign * sum(b for b, _ in two) / weight, delta=delta, standard_error=error,
                bound_95=abs(delta) + 1.96 * error,
                changed=sum(a != b for (a, _), (b, _) in zip(one, two)),
                unit="nats" if sign < 0 else "score")


def tell(texts, model, arguments):
    """Greedy tokens and prompt log-probabilities of each text; runs in its own process."""
    from vllm import LLM, SamplingParams
    values = {}
    for pair in filter(None, arguments.split(",")):
        key, _, value = pair.partition("=")
        values[key] = json.loads(value.lower()) if value[:1].isdigit() or value in (
            "True", "False") else value
    llm = LLM(model=model, dtype="bfloat16", enable_prefix_caching=False, **values)
    answers = llm.generate(texts, SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True,
                                                 prompt_logprobs=1))
    return [dict(tokens=list(a.outputs[0].token_ids),
                 logprobs=[at[token].logprob for token, at in
                           zip(a.prompt_token_ids[1:], a.prompt_logprobs[1:])])
            for a in answers]


def token_by_token(name, model, texts, options, folder):
    """`tell` in a process of its own, with the switch set."""
    log = folder / f"tokens-{name.replace(' ', '-')}.log"
    into = log.with_suffix(".json")
    (folder / "texts.json").write_text(json.dumps(texts))
    print(f"token by token, {name}: {len(texts)} texts", flush=True)
    with open(log, "w") as output:
        code = run_group([sys.executable, __file__, model, "--tell", str(folder / "texts.json"),
                          str(into), f"--model-args={options.model_args}"],
                         {**os.environ, SWITCH: "1" if name == ON else "0"}, output)
    if code:
        raise Failure(f"the token run with the path {name} ended with {code}",
                      "its log is above", log)
    return json.loads(into.read_text())


def compare_tokens(one, other):
    """Greedy agreement and log-probability difference of two `tell` results."""
    same = [next((i for i, (a, b) in enumerate(zip(x["tokens"], y["tokens"])) if a != b),
                 len(x["tokens"])) for x, y in zip(one, other)]
    gaps = [abs(a - b) for x, y in zip(one, other)
            for a, b in zip(x["logprobs"], y["logprobs"])]
    return dict(texts=len(one), equal_answers=sum(s == len(x["tokens"])
                                                  for s, x in zip(same, one)),
                equal_first_tokens=sum(s > 0 for s in same),
                mean_tokens_before_first_difference=statistics.mean(same),
                prompt_tokens=len(gaps), mean_abs_logprob_difference=statistics.mean(gaps))


def measure(options):
    folder = Path(options.logs or tempfile.mkdtemp(prefix="accuracy-"))
    folder.mkdir(parents=True, exist_ok=True)
    probe = subprocess.run([sys.executable, "-c", "import lm_eval, vllm"], capture_output=True,
                           text=True)
    if probe.returncode:
        raise Failure(f"lm-eval or vllm cannot be imported: {probe.stderr.splitlines()[-1]}",
                      "python -m pip install 'lm_eval[vllm]'")
    variants = [(OFF, options.model), (ON, options.model)]
    if options.reference:
        variants.append((REFERENCE, options.reference))
    samples, paths = {}, {}
    for name, model in variants:
        samples[name], texts, paths[name] = evaluate(name, model, options, folder)
    result = dict(kind="accuracy", command=shlex.join(sys.argv), model=options.model,
                  reference=options.reference, environment=environment(), path=paths[ON],
                  tasks={}, tokens={})
    for task in options.tasks:
        for metric, off in samples[OFF][task].items():
            told = paired(off, samples[ON][task][metric])
            if options.reference:
                told["reference"] = paired(off, samples[REFERENCE][task][metric])["on"]
            result["tasks"].setdefault(task, {})[metric] = told
    texts = [text for text in texts if text.strip()]
    texts = texts[::max(1, len(texts) // TEXTS)][:TEXTS]
    keep(result, options)
    said = {}
    for name, model in [*variants[:2], (AGAIN, options.model), *variants[2:]]:
        said[name] = token_by_token(name, model, texts, options, folder)
        if name != OFF:
            result["tokens"][f"{name} against off"] = compare_tokens(said[OFF], said[name])
            keep(result, options)
    print("\n".join(tables(result)))


def tables(result):
    """Markdown of a result."""
    yield "\n| task, metric | documents | off | on | reference | on - off | standard error |"
    yield "|---|---|---|---|---|---|---|"
    for task, metrics in result["tasks"].items():
        for metric, told in metrics.items():
            unit = " (nats)" if told["unit"] == "nats" else ""
            reference = f"{told['reference']:.4f}" if "reference" in told else ""
            yield (f"| {task}, {metric}{unit} | {told['documents']} | {told['off']:.4f} | "
                   f"{told['on']:.4f} | {reference} | {told['delta']:+.5f} | "
                   f"{told['standard_error']:.5f} |")
    yield ""
    for task, metrics in result["tasks"].items():
        for metric, told in metrics.items():
            yield f"- {task}, {metric}: no difference larger than {told['bound_95']:.4f} at 95 %"
    yield "\n| token by token | equal answers | tokens before the first difference | "\
          "mean difference of log-probabilities |"
    yield "|---|---|---|---|"
    for name, told in result["tokens"].items():
        yield (f"| {name} | {told['equal_answers']} of {told['texts']} | "
               f"{told['mean_tokens_before_first_difference']:.1f} of {TOKENS} | "
               f"{told['mean_abs_logprob_difference']:.5f} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", help="model folder or id")
    add("--tasks", nargs="+", default=["gsm8k"], help="lm-eval tasks (default: gsm8k)")
    add("--reference", help="another model for one more column, e.g. the bfloat16 one")
    add("--model-args", default="", help="more for vLLM, as in lm_eval (a=b,c=d)")
    add("--include-path", help="folder with task files, e.g. of local_tasks.py")
    add("--limit", type=int, help="documents a task")
    add("--seed", type=int, default=1234)
    add("--logs", metavar="DIR", help="where logs and samples go (default: a new folder)")
    add("--out", help="JSON to write")
    add("--tell", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    try:
        if options.tell:
            texts = json.loads(Path(options.tell[0]).read_text())
            Path(options.tell[1]).write_text(json.dumps(
                tell(texts, options.model, options.model_args)))
        else:
            measure(options)
    except Failure as failure:
        print(failure, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
