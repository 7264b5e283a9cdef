# SPDX-License-Identifier: Apache-2.0
"""Runs tests/cpu inside the real, patched sources of each pin, and the demo's check."""
import os
import shutil
import subprocess
import sys

import pytest

from patchset.cli import main

from real_vllm import PROJECT, sources

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")


@pytest.fixture
def patched(tmp_path, pin):
    site = tmp_path / "site"
    shutil.copytree(sources(pin.wheels[0]), site)
    assert main(["--vllm-path", str(site)]) == 0
    return site


def test_inside(patched, tmp_path):
    environment = dict(os.environ, PYTHONPATH=str(patched), TRITON_INTERPRET="1",
                       PATCHED_VLLM="1", HOME=str(tmp_path), OMP_NUM_THREADS="1")
    run = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider",
                          str(PROJECT / "tests/cpu")], cwd=tmp_path, env=environment,
                         capture_output=True, text=True, timeout=600)
    print(run.stdout[-6000:])
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-2000:]
    run = subprocess.run([sys.executable, str(PROJECT / "tests/cpu_path.py")], cwd=tmp_path,
                         env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
