# SPDX-License-Identifier: Apache-2.0
"""Real vLLM files as wheels and as git checkouts, in temporary folders."""
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(PROJECT), str(PROJECT / "tests")]

from patchset.cli import main  # noqa: E402
from patchset.pins import overlay_files, read_pins  # noqa: E402

from real_vllm import sources  # noqa: E402

PINS = {pin.name: pin for pin in read_pins()}
QUANTIZATION = "vllm/model_executor/layers/quantization"
FP8_UTILS = f"{QUANTIZATION}/utils/fp8_utils.py"


def pytest_addoption(parser):
    parser.addoption("--nightly", action="store_true", help="10,000 random trees, not 200")


def touched(pin):
    return [*pin.base, "vllm/__init__.py", "vllm/_version.py"]


def fill(root, pin, version=None):
    """Copy what a pin touches out of a real wheel, with its dist-info."""
    tree = sources(version or pin.wheels[0])
    for name in touched(pin):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(tree / name, root / name)
    return tree


def git(root, *arguments):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    environment.update(HOME=str(root), GIT_CONFIG_NOSYSTEM="1")
    return subprocess.run(
        ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false",
         *arguments], cwd=root, env=environment, check=True, capture_output=True,
        text=True).stdout.strip()


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


def snapshot(root):
    """Every path below `root` with kind, mode and content."""
    found = {}
    for path in sorted(root.rglob("*")):
        if ".git" in path.relative_to(root).parts:
            continue
        info = path.lstat()
        content = (os.readlink(path) if path.is_symlink() else
                   None if path.is_dir() else path.read_bytes())
        found[path.relative_to(root).as_posix()] = (info.st_mode, content)
    return found


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
