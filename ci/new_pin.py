#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Carry a pin's series to another vLLM release by a three-way merge.

    python ci/new_pin.py v0.8.5.post1 0.8.4
    python ci/new_pin.py v0.8.5.post1 0.8.4 --edited DIR    after conflicts were edited

Writes patches/v<TO>/ when every file merges. Where one does not, the merged
files stay in a folder with the conflicts marked; edit them and name the folder.
Exit codes: 0 written, 1 conflicts, 2 cannot run.
"""
import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(PROJECT), str(PROJECT / "tests"), str(PROJECT / "ci")]
from refresh import overlay_id, refresh  # noqa: E402

from patchset.git import IsolatedGit  # noqa: E402
from patchset.pins import PATCHES, overlay_files, read_pin  # noqa: E402
from patchset.trees import plan  # noqa: E402

from real_vllm import sources  # noqa: E402


def merge(base, ours, theirs, name):
    """Git's merge of one file. Returns the text and the number of conflicts."""
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for label, content in (("theirs", theirs), ("base", base), ("ours", ours)):
            paths.append(Path(folder) / label)
            paths[-1].write_bytes(content)
        run = subprocess.run(["git", "merge-file", "-p", "-L", f"new {name}", "-L", "old",
                              "-L", "the series", *map(str, paths)], capture_output=True)
    if run.returncode < 0 or run.returncode > 127:
        raise SystemExit(f"error: git merge-file failed on {name}: {run.stderr.decode()}")
    return run.stdout, run.returncode


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", help="pin to start from, such as v0.8.5.post1")
    parser.add_argument("new", help="vLLM release, such as 0.8.4")
    parser.add_argument("--edited", type=Path, help="folder with the conflicts resolved")
    options = parser.parse_args()
    old = read_pin(PATCHES / options.old)
    tree, goal = sources(options.new), PATCHES / f"v{options.new}"
    gone = [name for name in old.base if not (tree / name).is_file()]
    if gone:
        print(f"error: vLLM {options.new} has no {', '.join(gone)}\n\nhint: drop those patches "
              "from a copy of the pin", file=sys.stderr)
        return 2
    edited = options.edited
    if edited is None:
        old_tree = sources(old.wheels[0])
        trees = plan({n: (old_tree / n).read_bytes() for n in old.base}, old, overlay_files())
        edited, conflicts = Path(tempfile.mkdtemp(prefix=f"pin-{options.new}-")), 0
        for name in old.base:
            text, count = merge(trees.base[name], trees.result[name],
                                (tree / name).read_bytes(), name)
            (edited / name).parent.mkdir(parents=True, exist_ok=True)
            (edited / name).write_bytes(text)
            print(f"{name}: {f'{count} conflicts' if count else 'merged'}")
            conflicts += count
        if conflicts:
            print(f"\nhint: resolve them under {edited}, then add --edited {edited}")
            return 1
    goal.mkdir(exist_ok=True)
    for path in (*old.patches, old.folder / "series", old.folder / "pin.toml"):
        shutil.copyfile(path, goal / path.name)
    text = (goal / "pin.toml").read_text()
    text = re.sub(r"^wheels = .*$", f'wheels = ["{options.new}"]', text, flags=re.M)
    text = re.sub(r"^tags = .*$", f'tags = ["v{options.new}"]', text, flags=re.M)
    text = re.sub(r"^commits = \[.*?^\]", "commits = [\n]", text, flags=re.M | re.S)
    (goal / "pin.toml").write_text(text)
    with IsolatedGit() as git:
        git.run("init", "-q", "--bare", "--template=", ".")
        refresh(git, goal.name, tree, edited)
        tree_id = overlay_id(git)
    text = (goal / "pin.toml").read_text()
    (goal / "pin.toml").write_text(re.sub(r'^overlay = ".*"$', f'overlay = "{tree_id}"', text,
                                          flags=re.M))
    read_pin(goal)
    print(f"wrote {goal.relative_to(PROJECT)}; add the release's commit to pin.toml if it is "
          "known, then run: python ci/check_pins.py")
    return 0


if __name__ == "__main__":
    sys.exit(main())
