# SPDX-License-Identifier: Apache-2.0
"""Real vLLM files as wheels and as git checkouts, in temporary folders."""
import os
import shutil
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(PROJECT), str(PROJECT / "tests")]

from patchset.cli import main  # noqa: E402
from patchset.pins import overlay_files  # noqa: E402

from real_vllm import PINS, fill, git  # noqa: E402


def pytest_addoption(parser):
    parser.addoption("--nightly", action="store_true", help="10,000 random trees, not 200")
    parser.addoption("--cases", type=int, help="this many random trees (to share them out)")


@pytest.fixture(params=list(PINS))
def pin(request):
    return PINS[request.param]


@pytest.fixture
def newest():
    return PINS["v0.9.1"]


@pytest.fixture
def wheel(tmp_path, request):
    """site-packages with the files a pin touches. Parametrised through `pin`."""
    pin = request.getfixturevalue("pin" if "pin" in request.fixturenames else "newest")
    root = tmp_path / "site-packages"
    root.mkdir()
    tree = fill(root, pin)
    info = next(tree.glob("vllm-*.dist-info"))
    shutil.copytree(info, root / info.name)
    return root


@pytest.fixture
def checkout(tmp_path, request):
    """A git checkout at the release's tag with the files a pin touches."""
    pin = request.getfixturevalue("pin" if "pin" in request.fixturenames else "newest")
    root = tmp_path / "vllm-checkout"
    root.mkdir()
    fill(root, pin)
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "release")
    git(root, "tag", pin.tags[0])
    return root


class Apply:
    """Runs apply.py's main in this process: `code`, `out` and `err` of the last run."""

    def __init__(self, capsys):
        self._capsys = capsys

    def __call__(self, root, *flags):
        self._capsys.readouterr()
        self.code = main([*(["--vllm-path", str(root)] if root else []), *flags])
        captured = self._capsys.readouterr()
        self.out, self.err = captured.out, captured.err
        return self.code


@pytest.fixture
def apply(capsys):
    return Apply(capsys)


@pytest.fixture(scope="session")
def overlay():
    return overlay_files()


@pytest.fixture
def tally():
    """Counts what was tried, for docs/reliability.md (ci/reliability.py)."""
    def count(what, number=1):
        path = os.environ.get("RELIABILITY_TALLY")
        if path:
            with open(path, "a", encoding="utf-8") as file:
                file.write(f"{number}\t{what}\n")
    return count
