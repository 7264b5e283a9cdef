# SPDX-License-Identifier: Apache-2.0
"""Real vLLM trees: the Python files of released wheels, fetched once into .cache/.

    python tests/real_vllm.py 0.9.1 ...

Only the .py files and the metadata are kept; the wheel goes. A tree that does
not have the pinned blobs is an error.
"""
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT))
from patchset.pins import read_pins  # noqa: E402

PINS = {pin.name: pin for pin in read_pins()}
QUANTIZATION = "vllm/model_executor/layers/quantization"
FP8_UTILS = f"{QUANTIZATION}/utils/fp8_utils.py"
CACHE = PROJECT / ".cache" / "vllm"
PLATFORM = ["--no-deps", "--only-binary=:all:", "--python-version", "3.12",
            "--implementation", "cp", "--abi", "cp38", "--abi", "cp312", "--abi", "abi3",
            *(f"--platform=manylinux{name}_x86_64" for name in
              ("1", "2014", "_2_24", "_2_27", "_2_28", "_2_31", "_2_34", "_2_35"))]


def sources(version: str) -> Path:
    """Site-packages-like folder with `vllm/` and its dist-info for one release."""
    tree = CACHE / version
    if tree.is_dir():
        return tree
    CACHE.mkdir(parents=True, exist_ok=True)
    print(f"fetching the vLLM {version} wheel (about 380 MB) ...", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        subprocess.run([sys.executable, "-m", "pip", "download", "-q",
                        "--disable-pip-version-check", *PLATFORM, "-d", folder,
                        f"vllm=={version}"], check=True)
        wheel = next(Path(folder).glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            names = [n for n in archive.namelist()
                         if n.endswith((".py", ".json", ".typed")) or ".dist-info/" in n]
            archive.extractall(Path(folder) / "tree", names)
        shutil.move(str(Path(folder) / "tree"), str(tree))
    return tree


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


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(sources(name))
