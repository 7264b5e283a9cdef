#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every pin on its real wheels, and what any release of vLLM is to us.

    python ci/check_pins.py                     each pin: apply, ids, reverse
    python ci/check_pins.py --git REPOSITORY    each pin's commits, each fetched alone from
                                                a URL or a clone of vLLM
    python ci/check_pins.py 0.9.2 0.10.0        say of a release: pinned, already
                                                upstream, too old or unknown
    python ci/check_pins.py --keep FILE V ...   and write it into a data file

Decided by content. Exit codes: 0 all as it should be, 1 a pin does not hold,
2 cannot run.
"""
import argparse
import contextlib
import io
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(PROJECT), str(PROJECT / "tests")]
from patchset import pins as pinning  # noqa: E402
from patchset.cli import main as apply  # noqa: E402
from patchset.files import blob_id  # noqa: E402
from patchset.refusals import Refusal  # noqa: E402
from patchset.target import find_target, match_pin  # noqa: E402

from real_vllm import CACHE, sources  # noqa: E402


def kind_of(tree):
    """One word and a detail: what this vLLM is, by its files."""
    added = {name: blob_id(c) for name, c in pinning.overlay_files().items()}
    try:
        pin, _ = match_pin(find_target(str(tree)), pinning.read_pins(), added)
        return "pinned", pin.name
    except Refusal as refusal:
        if refusal.sentence.startswith("already upstream"):
            return "already upstream", "PR 19085, PR 19514"
        fp8 = tree / "vllm/model_executor/layers/quantization/utils/fp8_utils.py"
        if not fp8.is_file() or "apply_w8a8_block_fp8_linear" not in fp8.read_text():
            return "too old", "no apply_w8a8_block_fp8_linear to patch"
        if "direct_register_custom_op" not in fp8.read_text():
            return "too old", "its block-FP8 linear is no custom operator"
        return "unknown", "; ".join(refusal.files)[:200]


def round_trip(tree, pin, flags=()):
    """Apply and reverse on a copy; returns what is wrong, or None."""
    with tempfile.TemporaryDirectory() as folder, \
            contextlib.redirect_stdout(io.StringIO()), \
            contextlib.redirect_stderr(io.StringIO()) as said:
        copy = Path(folder) / "tree"
        shutil.copytree(tree, copy, symlinks=True)
        for wanted, more in ((pin.result, []), (pin.base, ["--reverse"])):
            if apply(["--vllm-path", str(copy), *more, *flags]):
                return said.getvalue().strip()
            for name, blob in wanted.items():
                if blob_id((copy / name).read_bytes()) != blob:
                    return f"{name} is not the pinned one after {more or 'apply'}"
    return None


def check_wheels(failed):
    for pin in pinning.read_pins():
        for version in pin.wheels:
            wrong = round_trip(sources(version), pin)
            print(f"{pin.name}: wheel {version}: {wrong or 'applies, reverses, ids as pinned'}",
                  flush=True)
            failed += [wrong] if wrong else []


def check_commits(repository, failed):
    for pin in pinning.read_pins():
        for commit in pin.commits:
            with tempfile.TemporaryDirectory() as folder:
                tree = Path(folder) / "vllm-src"
                for command in (["init", "-q"], ["fetch", "-q", "--depth", "1", repository, commit],
                                ["checkout", "-q", "FETCH_HEAD"]):
                    tree.mkdir(exist_ok=True)
                    subprocess.run(["git", "-C", str(tree), *command], check=True)
                wrong = round_trip(tree, pin)
            print(f"{pin.name}: commit {commit[:12]}: "
                  f"{wrong or 'applies, reverses, ids as pinned'}", flush=True)
            failed += [wrong] if wrong else []


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", nargs="*")
    parser.add_argument("--git", metavar="REPOSITORY")
    parser.add_argument("--keep", type=Path, metavar="FILE")
    parser.add_argument("--drop", action="store_true", help="remove each release's files again")
    options = parser.parse_args()
    failed = []
    if options.git:
        check_commits(options.git, failed)
    elif not options.version:
        check_wheels(failed)
    for version in options.version:
        try:
            kind, detail = kind_of(sources(version))
        except subprocess.CalledProcessError:
            kind, detail = "not released", "no wheel for CPython 3.12 on x86-64"
        print(f"{version}: {kind}: {detail}", flush=True)
        if options.keep:
            known = json.loads(options.keep.read_text()) if options.keep.exists() else {}
            known[version] = dict(kind=kind, detail=detail)
            options.keep.write_text(json.dumps(known, indent=1) + "\n")
        if options.drop:
            shutil.rmtree(CACHE / version, ignore_errors=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
