#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""One page from what linear.py, engine.py, serve.py and accuracy.py wrote.

    python benchmarks/report.py serve.json accuracy.json linear.json --out report

Writes report.html, self-contained (plots inside), and report.md. Figures come
from the files alone; each section names the command that made it. Needs
matplotlib and markdown-it-py.
"""
import argparse
import base64
import contextlib
import io
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import accuracy  # noqa: E402
import serve  # noqa: E402

STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem;
color:#1c2430}h1{font-size:1.6rem}h2{margin-top:2.2rem;border-bottom:1px solid #d5dbe3}
table{border-collapse:collapse;margin:.8rem 0;display:block;overflow-x:auto}
td,th{border:1px solid #d5dbe3;padding:.25rem .6rem;text-align:right}td:first-child,th:first-child
{text-align:left}th{background:#f2f5f9}pre{background:#f2f5f9;padding:.6rem;white-space:pre-wrap}
img{max-width:100%}"""


def kind_of(result):
    if "kind" in result:
        return result["kind"]
    return "linear" if "cells" in result else "engine"


def section_serve(result):
    yield f"Model: {result['model']}. Start: " + ", ".join(
        f"{name} {seconds:.0f} s" for name, seconds in result["start_s"].items()) + ".\n"
    for name, line in result["path"].items():
        yield f"- log of `{name}`: {line or 'stock linear layers'}"
    yield from serve.tables(result)


def section_accuracy(result):
    yield f"Model: {result['model']}" + (
        f", reference {result['reference']}" if result["reference"] else "") + "."
    yield from accuracy.tables(result)


def section_engine(result):
    path = "stock linear layers"
    if result["at_end"]:
        path = ("{compiled} kernels compiled, calls: {deep_gemm} DeepGEMM, {stock_refused} "
                "refused, {stock_missing_kernel} without a kernel").format(**result["at_end"])
    yield (f"Switch {result['switch'] or 'unset'}, {'V1' if result['v1'] != '0' else 'V0'} engine, "
           f"{result['layers'] or 'all'} layers, start {result['start_s']} s, {path}.")
    yield "\n| prompt tokens | first, ms | again, ms |\n|---|---|---|"
    for length, first in result["first_ms"].items():
        yield f"| {length} | {first} | {result['again_ms'][length]} |"
    yield "\n| batch | TTFT ms | TPOT ms |\n|---|---|---|"
    for batch in (1, 10):
        yield f"| {batch} | {result[f'ttft_{batch}_ms']} | {result[f'tpot_{batch}_ms']} |"


def section_linear(result):
    import linear
    with contextlib.redirect_stdout(io.StringIO()) as captured:
        linear.summarize(result)
    yield f"{result['gpu']}, vLLM {result['vllm']}, reads {result['read_tb_s']:.2f} TB/s."
    yield "\n```\n" + captured.getvalue().strip() + "\n```"


def powers_of_two(axes):
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")


def plot_serve(axes, result):
    loads = list({json.dumps(r["load"]): r["load"] for r in result["runs"]}.values())
    first = loads[0]
    loads = sorted((x for x in loads if x["input_len"] == first["input_len"]),
                   key=lambda x: x["concurrency"])
    values = [serve.medians(result, load) for load in loads]
    for name in values[0]:
        axes.plot([x["concurrency"] for x in loads], [v[name]["median_tpot_ms"] for v in values],
                  marker="o", label=name)
    powers_of_two(axes)
    axes.set_ylim(bottom=0)
    axes.set(title="Time per output token", xlabel="requests at once", ylabel="median TPOT, ms")


def plot_accuracy(axes, result):
    rows = [(f"{task}\n{metric}", told) for task, metrics in result["tasks"].items()
            for metric, told in metrics.items()]
    axes.errorbar([told["delta"] for _, told in rows], range(len(rows)), fmt="o", capsize=4,
                  xerr=[1.96 * told["standard_error"] for _, told in rows])
    axes.axvline(0, color="grey", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.margins(y=0.2)
    axes.set(title="On minus off, 95 % interval", xlabel="difference of the paired means")


def plot_linear(axes, result):
    cells = [c for c in result["cells"] if "cutlass" in c["us"]
             and c["layer"] == result["cells"][0]["layer"]]
    for n, k in dict.fromkeys((c["n"], c["k"]) for c in cells):
        mine = [c for c in cells if (c["n"], c["k"]) == (n, k)]
        axes.plot([c["m"] for c in mine], [c["us"]["cutlass"] / c["us"]["ours"] for c in mine],
                  marker="o", markersize=3, label=f"[{n}, {k}]")
    axes.axhline(1, color="grey", linewidth=0.8)
    powers_of_two(axes)
    axes.set(title=f"Speed-up of one linear call over CUTLASS, {result['cells'][0]['layer']}",
             xlabel="rows (M)", ylabel="CUTLASS / ours")


SECTIONS = dict(serve=("Serving", section_serve, plot_serve),
                accuracy=("Accuracy", section_accuracy, plot_accuracy),
                engine=("One engine", section_engine, None),
                linear=("Linear layers alone", section_linear, plot_linear))


def picture(draw, result):
    """A PNG as bytes."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(figsize=(8, 4))
    draw(axes, result)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0] and draw is not plot_accuracy:
        axes.legend()
    figure.tight_layout()
    into = io.BytesIO()
    figure.savefig(into, format="png", dpi=120)
    plt.close(figure)
    return into.getvalue()


def environment_lines(result):
    told = result.get("environment")
    if not told:
        return
    yield f"- GPU: {told['gpu']}, Python {told['python']}"
    for line in told["doctor"]:
        text = line["text"].replace("__", r"\_\_")
        yield f"- {line['what']}: {text}"


def page(results):
    """Markdown text, and the pictures by their name in it."""
    lines, pictures = ["# DeepGEMM linear layers: measured", ""], {}
    for name, result in results:
        title, section, draw = SECTIONS[kind_of(result)]
        lines += [f"## {title}", "", *section(result), ""]
        if draw:
            picture_name = f"report-{Path(name).stem}.png"
            pictures[picture_name] = picture(draw, result)
            lines += [f"![{title}]({picture_name})", ""]
        lines += ["Made by:", "", "```", result.get("command", "unknown"), "```", ""]
        environment = list(environment_lines(result))
        if environment:
            lines += ["Environment:", "", *environment, ""]
    return "\n".join(lines), pictures


def to_html(text, pictures):
    """The page with its pictures inside."""
    from markdown_it import MarkdownIt
    body = MarkdownIt("commonmark").enable("table").render(text)
    for name, data in pictures.items():
        inside = "data:image/png;base64," + base64.b64encode(data).decode()
        body = body.replace(f'src="{name}"', f'src="{inside}"')
    return ("<!doctype html><html lang=en><meta charset=utf-8><title>DeepGEMM linear layers"
            f"</title><style>{STYLE}</style><body>{body}</body></html>\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", help="JSON files")
    parser.add_argument("--out", default="report", help="path without ending (default: report)")
    options = parser.parse_args()
    results = []
    for name in options.results:
        try:
            results.append((name, json.loads(Path(name).read_text())))
        except (OSError, ValueError) as error:
            print(f"error: {name} is not a result: {error}\n\nhint: give the JSON files that "
                  "serve.py, accuracy.py, engine.py or linear.py wrote", file=sys.stderr)
            return 2
    text, pictures = page(results)
    out = Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".html").write_text(to_html(text, pictures), encoding="utf-8")
    out.with_suffix(".md").write_text(text, encoding="utf-8")
    for name, data in pictures.items():
        (out.parent / name).write_bytes(data)
    print(f"{out.with_suffix('.html')} and {out.with_suffix('.md')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
