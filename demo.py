#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The whole story on a CPU: fetch vLLM 0.9.1, check, apply, prove, reverse."""
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PROJECT = Path(__file__).resolve().parent
sys.path.insert(0, str(PROJECT / "tests"))
from real_vllm import sources  # noqa: E402


def say(line):
    print(f"\n$ {line}", flush=True)


def apply(site, *flags):
    say(" ".join(["python apply.py --vllm-path", site.name, *flags]))
    subprocess.run([sys.executable, str(PROJECT / "apply.py"), "--vllm-path", str(site), *flags],
                   check=True)


def fingerprint(tree):
    digest = hashlib.sha256()
    for path in sorted(p for p in tree.rglob("*") if p.is_file() and p.suffix != ".pyc"):
        digest.update(path.relative_to(tree).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


def main():
    tree = sources("0.9.1")
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder) / "site-packages"
        shutil.copytree(tree, site)
        before = fingerprint(site)
        apply(site, "--check")
        apply(site)
        apply(site, "--status")
        say("the patched path against float32 (Triton's interpreter, a reference GEMM; 20 s)")
        subprocess.run([sys.executable, str(PROJECT / "tests/cpu_path.py")], check=True, cwd=folder,
                       env=dict(os.environ, PYTHONPATH=str(site), TRITON_INTERPRET="1",
                                VLLM_LOGGING_LEVEL="ERROR", PYTHONDONTWRITEBYTECODE="1"))
        apply(site, "--reverse")
        same = fingerprint(site) == before
        print("\nevery byte is vLLM's own again" if same else "\nthe tree differs from before")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
