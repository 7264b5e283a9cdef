#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write docs/reliability.md: what was tried, and times beside other tools.

    python ci/reliability.py [--nightly] [--checkout VLLM_CLONE] [--patch-package BIN]

Times need hyperfine; quilt and patch-package are left out where they are not
installed. Exit codes: 0 written, 1 a test failed, 2 cannot run.
"""
import argparse
import collections
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(PROJECT), str(PROJECT / "tests")]
from real_vllm import FP8_UTILS, PINS, sources  # noqa: E402

TESTS = ("test_faults.py", "test_hostile.py", "test_packages.py", "test_refusals.py",
         "test_random_trees.py")
FOUND = """\
| found by | what | now |
|---|---|---|
| faults | a removal whose folder clean-up failed was not undone | every started step is undone |
| kills | a tree killed in an upgrade, part old overlay and part new, was refused or left a file behind | each file is told apart by version |
| kills | a killed reverse left RECORD listing removed files, or an empty importable folder | both count as half-applied and are finished |
| kills | temporary files of a killed run stayed | the next run removes them |
| random trees | a file name with a space was refused (git ends such header lines with a tab) | paths come from `git apply --numstat -z` |
| bad patches | a non-UTF-8 name ended in a traceback; a mode change was ignored | both are refused |
"""


def run_tests(options):
    """Counts by kind of everything tried. Exits 1 if a test fails."""
    with tempfile.NamedTemporaryFile("r", suffix=".tsv") as tally:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", *(["--nightly"] if options.nightly else []),
             *(str(PROJECT / "tests" / name) for name in options.tests)], cwd=PROJECT,
            env={**os.environ, "RELIABILITY_TALLY": tally.name})
        if done.returncode:
            sys.exit(1)
        counts = collections.Counter()
        earlier = Path(options.add).read_text() if options.add else ""
        for line in (earlier + tally.read()).splitlines():
            number, what = line.split("\t")
            counts[what] += int(number)
    return counts


def change(folder):
    """The same change for every tool: the touched files and one patch of them."""
    pin, tree = PINS["v0.9.1"], sources("0.9.1")
    site = folder / "site-packages"
    shutil.copytree(tree, site)
    apply = [sys.executable, str(PROJECT / "apply.py"), "--vllm-path"]
    diff = subprocess.run([*apply, str(site), "--diff"], check=True, capture_output=True).stdout
    (folder / "change.patch").write_bytes(diff)
    return pin, site, apply


def hyperfine(rows, folder):
    """Mean milliseconds of (label, prepare, command) rows, all in one run."""
    out = folder / "times.json"
    command = ["hyperfine", "--warmup", "1", "--runs", "8", "--export-json", str(out),
               "--style", "none"]
    for label, prepare, timed in rows:
        command += ["--command-name", label, "--prepare", prepare, timed]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return {r["command"]: (r["mean"] * 1e3, (r["stddev"] or 0) * 1e3)
            for r in json.loads(out.read_text())["results"]}


def times(options, folder):
    pin, site, apply = change(folder)
    files = [*pin.base]
    tool = " ".join(apply)
    back = f"{tool} {site} --reverse"
    rows = [("apply.py on a wheel", back, f"{tool} {site}"),
            ("apply.py --reverse on a wheel", f"{tool} {site}", back),
            ("apply.py --status on a wheel", f"{tool} {site}", f"{tool} {site} --status"),
            ("apply.py --check on a wheel", back, f"{tool} {site} --check")]
    plain = folder / "plain"
    for name in files:
        (plain / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(site / name, plain / name)
    pristine = folder / "pristine"
    shutil.copytree(plain, pristine)
    reset = f"rm -rf {plain} && cp -r {pristine} {plain}"
    if shutil.which("quilt"):
        rows.append(("quilt push", f"{reset} && mkdir {plain}/patches && cp {folder}/change.patch "
                     f"{plain}/patches/ && echo change.patch > {plain}/patches/series",
                     f"cd {plain} && quilt push -aq"))
    if options.patch_package:
        node = folder / "node"
        (node / "patches").mkdir(parents=True)
        (node / "package.json").write_text('{"name": "x", "version": "1.0.0"}')
        (node / "package-lock.json").write_text('{"lockfileVersion": 3, "packages": {}}')
        text = (folder / "change.patch").read_text().replace("a/vllm/", "a/node_modules/vllm/") \
            .replace("b/vllm/", "b/node_modules/vllm/")
        (node / "patches/vllm+0.9.1.patch").write_text(text)
        rows.append(("patch-package", f"rm -rf {node}/node_modules && mkdir {node}/node_modules && "
                     f"cp -r {pristine}/vllm {node}/node_modules/vllm && echo "
                     f"'{{\"version\": \"0.9.1\"}}' > {node}/node_modules/vllm/package.json",
                     f"cd {node} && {options.patch_package} --error-on-fail"))
    if options.checkout:
        clone = folder / "vllm-src"
        subprocess.run(["git", "clone", "-q", "--shared", "--no-checkout", options.checkout,
                        str(clone)], check=True)
        subprocess.run(["git", "-C", str(clone), "checkout", "-q", pin.commits[0]], check=True)
        mail = folder / "change.mbox"
        mail.write_bytes(b"From 0 Mon Sep 17 00:00:00 2001\nFrom: x <x@x>\nSubject: [PATCH] x\n\n"
                         b"---\n" + (folder / "change.patch").read_bytes())
        undo = f"{tool} {clone} --reverse"
        rows += [("apply.py on a full checkout", undo, f"{tool} {clone}"),
                 ("apply.py --reverse on a full checkout", f"{tool} {clone}", undo),
                 ("apply.py --status on a full checkout", undo, f"{tool} {clone} --status"),
                 ("git am on a full checkout", f"{undo}; git -C {clone} reset -q --hard "
                  f"{pin.commits[0]}; git -C {clone} clean -qfd",
                  f"git -C {clone} -c user.name=x -c user.email=x@x am -q {mail}")]
    return hyperfine(rows, folder)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nightly", action="store_true")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="test files to run")
    parser.add_argument("--add", metavar="TALLY", help="counts of an earlier run "
                        "(made with RELIABILITY_TALLY=FILE) to add")
    parser.add_argument("--checkout", metavar="VLLM_CLONE")
    parser.add_argument("--patch-package", metavar="BIN")
    options = parser.parse_args()
    if not shutil.which("hyperfine"):
        print("error: hyperfine is not installed\n\nhint: apt-get install hyperfine",
              file=sys.stderr)
        return 2
    counts = run_tests(options)
    with tempfile.TemporaryDirectory() as folder:
        measured = times(options, Path(folder))
    lines = ["# Reliability of apply.py", "",
             "Written by `python ci/reliability.py" + (" --nightly" if options.nightly else "")
             + "`" + (", with the counts of an earlier nightly run added" if options.add else "")
             + ". After every fault and kill each file was old or new by content; after the "
             "next run the tree was what had been asked: no mixed tree was left.", "",
             "| tried | number |", "|---|---|",
             *(f"| {what} | {number:,} |" for what, number in sorted(counts.items())), "",
             "## Failures found on the way", "", FOUND,
             "## Times", "",
             f"One hyperfine run on {os.cpu_count()} cores ({platform.machine()}, Python "
             f"{platform.python_version()}), 8 runs each. The change is the same for all: the "
             f"patches to {len(PINS['v0.9.1'].base)} files ({FP8_UTILS} and others) and the added "
             "files. apply.py also compares content ids before, between and after; the other "
             "tools check nothing.", "", "| command | mean | deviation |", "|---|---|---|",
             *(f"| {label} | {mean:.0f} ms | {spread:.0f} ms |"
               for label, (mean, spread) in measured.items()), ""]
    (PROJECT / "docs/reliability.md").write_text("\n".join(lines))
    print(PROJECT / "docs/reliability.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
