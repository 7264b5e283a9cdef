# SPDX-License-Identifier: Apache-2.0
"""The Python files of released vLLM wheels, fetched once into .cache/.

    python tests/real_vllm.py 0.9.1 ...

Only the .py files and the metadata are kept; the wheel goes. A tree that does
not have the pinned blobs is an error.
"""
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
CACHE = PROJECT / ".cache" / "vllm"
PLATFORM = ["--no-deps", "--only-binary=:all:", "--python-version", "3.12",
            "--implementation", "cp", "--abi", "cp38", "--platform", "manylinux1_x86_64"]


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


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(sources(name))
