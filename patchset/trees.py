# SPDX-License-Identifier: Apache-2.0
"""The base tree and the result tree, worked out before anything is written.

Both are built in a scratch repository from the target's own files and the pin's
series, forward for pristine files and backward for applied ones, so that no
copy of vLLM and no record of an earlier run is needed.
"""
from dataclasses import dataclass
from typing import Dict, List, Optional

from patchset.files import APPLIED, FileState, blob_id, read_file
from patchset.git import IsolatedGit
from patchset.pins import Pin, check_inside
from patchset.refusals import PatchConflict
from patchset.target import Target


@dataclass(frozen=True)
class Trees:
    """Content of every touched path before and after (None: not there)."""
    base: Dict[str, Optional[bytes]]
    result: Dict[str, Optional[bytes]]
    tree: str
    diff: bytes


def _paths_of(patch: bytes) -> List[str]:
    lines = patch.decode("utf-8", "surrogateescape").splitlines()
    return [line[6:] for line in lines if line.startswith(("--- a/", "+++ b/"))]


def plan(target: Target, pin: Pin, states: List[FileState],
         overlay: Dict[str, bytes]) -> Trees:
    """Both trees for `target`, checked against the pin's ids.

    Raises PatchConflict naming the patch and file if one does not fit or the
    outcome is not the pinned one.
    """
    base: Dict[str, Optional[bytes]] = {name: None for name in overlay}
    result: Dict[str, Optional[bytes]] = dict(overlay)
    patches = [(path.name, path.read_bytes()) for path in pin.patches]
    for name, patch in patches:
        for touched in _paths_of(patch):
            check_inside(touched, name)
            if touched not in pin.base:
                raise PatchConflict(f"patch {name} touches {touched}, which pin "
                                    f"{pin.name} has no base for",
                                    "python ci/refresh.py writes pin.toml anew")
    with IsolatedGit() as git:
        git.run("init", "-q", "--bare", "--template=", ".")
        applied = {s.path for s in states if s.state == APPLIED and not s.added}

        def stage(files: Dict[str, bytes], index: str) -> None:
            rows = []
            for name, content in files.items():
                blob = git.run("hash-object", "-w", "--stdin", stdin=content)
                rows.append(f"100644 {blob.decode().strip()}\t{name}")
            git.run("update-index", "--index-info", index=index,
                    stdin=("\n".join(rows) + "\n").encode())

        def patch_index(name: str, patch: bytes, index: str, *options: str) -> None:
            try:
                git.run("apply", "--cached", *options, "-", stdin=patch, index=index)
            except git.error as error:
                why = (error.stderr or "").replace("stderr: ", "").strip().strip("'")
                raise PatchConflict(
                    f"patch {name} of pin {pin.name} does not apply to {target.root}",
                    "nothing was written; python ci/check_pins.py tells which pin is "
                    "broken", why.strip().splitlines()) from None

        def blobs(index: str) -> Dict[str, bytes]:
            rows = git.run("ls-files", "-s", "-z", index=index).split(b"\0")[:-1]
            return {row.split(b"\t")[1].decode(): git.run("cat-file", "blob",
                                                          row.split()[1].decode())
                    for row in rows}

        current = {name: read_file(target.root, name) or b"" for name in pin.base}
        stage(current, "base")
        if applied:
            only = [f"--include={name}" for name in sorted(applied)]
            for name, patch in reversed(patches):
                if applied & set(_paths_of(patch)):
                    patch_index(name, patch, "base", "--reverse", *only)
        base.update(blobs("base"))
        stage({name: base[name] or b"" for name in pin.base}, "result")
        for name, patch in patches:
            patch_index(name, patch, "result")
        result.update(blobs("result"))
        stage(overlay, "overlay")
        added = git.run("write-tree", index="overlay").decode().strip()
        stage(overlay, "result")
        tree = git.run("write-tree", index="result").decode().strip()
        before = git.run("write-tree", index="base").decode().strip()
        diff = git.run("diff", "--no-color", "--no-ext-diff", "--no-renames", before, tree)
    for name in pin.base:
        for what, wanted, content in (("base", pin.base[name], base[name]),
                                      ("result", pin.result[name], result[name])):
            if content is None or blob_id(content) != wanted:
                raise PatchConflict(f"{what} of {name} is not the one pinned by {pin.name}",
                                    "git checkout -- patches overlay, or write the "
                                    "pins anew: python ci/refresh.py")
    if added != pin.overlay:
        raise PatchConflict(f"the overlay {added} is not the one pinned by {pin.name} "
                            f"({pin.overlay})", "git checkout -- patches overlay, or "
                            "write the pins anew: python ci/refresh.py")
    return Trees(base, result, tree, diff)
