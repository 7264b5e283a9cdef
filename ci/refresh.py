#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write a pin's patches and ids anew from an edited tree.

    python ci/refresh.py                      overlay ids of all pins
    python ci/refresh.py v0.9.1 --base DIR --edited DIR
    python ci/refresh.py --freeze             keep this version under patches/history/

Both folders hold `vllm/`; each touched file belongs to one patch, whose header
is kept. The same trees always give the same files. Exit codes: 0 written,
2 cannot run.
"""
import argparse
import re
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from patchset import __version__  # noqa: E402
from patchset.files import blob_id  # noqa: E402
from patchset.git import IsolatedGit  # noqa: E402
from patchset.pins import HISTORY, PATCHES, overlay_files  # noqa: E402


def overlay_id(git: IsolatedGit) -> str:
    """Git tree id of the overlay."""
    return git.write_index(overlay_files(), "overlay")


def diff(git: IsolatedGit, name: str, base: bytes, edited: bytes) -> str:
    """One file's patch in a fixed form: full index, three lines of context."""
    ids = [git.write_index({name: content}, "one") for content in (base, edited)]
    return git.run("diff", "--full-index", "--no-color", "--no-ext-diff", "-U3", *ids).decode()


def refresh(git: IsolatedGit, pin: str, base: Path, edited: Path) -> None:
    folder = PATCHES / pin
    text = (folder / "pin.toml").read_text()
    bases, results = [], []
    for name in [line.strip() for line in (folder / "series").read_text().splitlines()
                 if line.strip() and line[0] != "#"]:
        patch = folder / name
        header = patch.read_text().split("diff --git ")[0]
        path = re.search(r"^File: (\S+)$", header, re.M)
        assert path, f"{patch} has no 'File:' line"
        old, new = (tree.joinpath(path[1]).read_bytes() for tree in (base, edited))
        patch.write_text(header + diff(git, path[1], old, new))
        bases.append(f'"{path[1]}" = "{blob_id(old)}"')
        results.append(f'"{path[1]}" = "{blob_id(new)}"')
    text = text.split("[base]")[0] + "[base]\n" + "\n".join(bases) + \
        "\n\n[result]\n" + "\n".join(results) + "\n"
    (folder / "pin.toml").write_text(text)


def freeze() -> Path:
    """Keep the present version's pins and file ids, for later versions to leave."""
    folder = HISTORY / __version__
    for path in sorted(PATCHES.glob("*/pin.toml")):
        shutil.copytree(path.parent, folder / path.parent.name, dirs_exist_ok=True)
    (folder / "added").write_text("".join(f"{blob_id(content)} {name}\n"
                                          for name, content in overlay_files().items()))
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pin", nargs="?")
    parser.add_argument("--base", type=Path)
    parser.add_argument("--edited", type=Path)
    parser.add_argument("--freeze", action="store_true")
    options = parser.parse_args()
    if options.pin and not (options.base and options.edited):
        parser.error("a pin needs --base and --edited")
    with IsolatedGit() as git:
        git.run("init", "-q", "--bare", "--template=", ".")
        if options.pin:
            refresh(git, options.pin, options.base, options.edited)
        tree = overlay_id(git)
    if options.freeze:
        print(freeze())
        return 0
    for path in sorted(PATCHES.glob("*/pin.toml")):
        text = path.read_text()
        path.write_text(re.sub(r'^overlay = ".*"$', f'overlay = "{tree}"', text, flags=re.M))
        print(f"{path.relative_to(PATCHES.parent)}: overlay {tree}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
