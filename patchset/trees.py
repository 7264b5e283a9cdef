# SPDX-License-Identifier: Apache-2.0
"""The base tree and the result tree, worked out before anything is written.

Both are built in a scratch repository from the target's own files and the pin's
series, forward for pristine files and backward for applied ones, so that no
copy of vLLM and no record of an earlier run is needed.
"""
import re
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Sequence, Tuple

from patchset.files import APPLIED, OLDER, FileState, blob_id, read_file
from patchset.git import IsolatedGit
from patchset.pins import Pin, Release, check_inside
from patchset.refusals import PatchConflict
from patchset.target import Target

_MORE_THAN_LINES = re.compile(
    rb"^(GIT binary patch|(old|new|deleted file|new file) mode|(rename|copy) (from|to)) ?", re.M)
_REFRESH = "git checkout -- patches overlay, or write the pins anew: python ci/refresh.py"


@dataclass(frozen=True)
class Trees:
    """Content of every touched path before and after (None: not there)."""
    base: Dict[str, Optional[bytes]]
    result: Dict[str, Optional[bytes]]
    tree: str
    diff: bytes


class _Scratch:
    """A repository of its own in which indexes are built and patched."""

    def __init__(self, git: IsolatedGit, pin: Pin):
        self.git, self.pin = git, pin
        git.run("init", "-q", "--bare", "--template=", ".")

    def patches(self) -> List[Tuple[str, bytes, List[str]]]:
        """Name, content and touched paths of each patch of the series; none is trusted."""
        found = []
        for path in self.pin.patches:
            name, patch = path.name, path.read_bytes()
            if b"\r" in patch or _MORE_THAN_LINES.search(patch):
                raise PatchConflict(f"patch {name} does more than change lines of existing "
                                    "files, or has CRLF line ends",
                                    "git checkout -- patches, with core.autocrlf=false")
            try:
                rows = self.git.run("apply", "--numstat", "-z", "-", stdin=patch)
            except self.git.error as error:
                raise self._conflict(name, error) from None
            paths = [row.split(b"\t", 2)[2].decode("utf-8", "surrogateescape")
                     for row in rows.split(b"\0")[:-1]]
            for touched in paths:
                check_inside(touched, name)
                if touched not in self.pin.base:
                    raise PatchConflict(f"patch {name} touches {touched}, which pin "
                                        f"{self.pin.name} has no base for", _REFRESH)
            found.append((name, patch, paths))
        return found

    def _conflict(self, name: str, error: Any) -> PatchConflict:
        why = (error.stderr or "").replace("stderr: ", "").strip().strip("'")
        return PatchConflict(
            f"patch {name} of pin {self.pin.name} does not apply; nothing was written",
            "python ci/check_pins.py tells which pin is broken", why.strip().splitlines())

    def patch(self, name: str, patch: bytes, index: str, *options: str) -> None:
        try:
            self.git.run("apply", "--cached", *options, "-", stdin=patch, index=index)
        except self.git.error as error:
            raise self._conflict(name, error) from None


def _check(pin: Pin, what: str, wanted: Dict[str, str], found: Dict[str, bytes]) -> None:
    for name, blob in wanted.items():
        if blob_id(found[name]) != blob:
            raise PatchConflict(f"{what} of {name} is not the one pinned by {pin.name}", _REFRESH)


def base_files(target: Target, pin: Pin, states: List[FileState],
               history: Sequence[Release] = ()) -> Dict[str, bytes]:
    """vLLM's own content of each patched file: patched ones are patched backward.

    Raises PatchConflict if what comes out is not what the pin says.
    """
    files = {name: read_file(target.root, name) or b"" for name in pin.base}
    versions = {s.version for s in states if s.state in (APPLIED, OLDER) and not s.added}
    for version in versions:
        old = pin if version is None else next(
            p for r in history if r.version == version for p in r.pins if p.name == pin.name)
        patched = {s.path for s in states if s.version == version and not s.added
                   and s.state in (APPLIED, OLDER)}
        with IsolatedGit() as git:
            scratch = _Scratch(git, old)
            git.write_index(files, "base")
            only = [f"--include={name}" for name in sorted(patched)]
            for name, patch, touched in reversed(scratch.patches()):
                if patched & set(touched):
                    scratch.patch(name, patch, "base", "--reverse", *only)
            files = git.read_index("base")
    _check(pin, "base", pin.base, files)
    return files


def plan(base: Dict[str, bytes], pin: Pin, overlay: Dict[str, bytes]) -> Trees:
    """Both trees from vLLM's own files, checked against the pin's ids.

    Raises PatchConflict naming the patch and file if one does not fit or the
    outcome is not the pinned one.
    """
    with IsolatedGit() as git:
        scratch = _Scratch(git, pin)
        before = git.write_index(base, "base")
        _check(pin, "base", pin.base, base)
        git.write_index(base, "result")
        for name, patch, _ in scratch.patches():
            scratch.patch(name, patch, "result")
        result = git.read_index("result")
        _check(pin, "result", pin.result, result)
        added = git.write_index(overlay, "overlay")
        if added != pin.overlay:
            raise PatchConflict(f"the overlay {added} is not the one pinned by {pin.name} "
                                f"({pin.overlay})", _REFRESH)
        tree = git.write_index({**result, **overlay}, "all")
        diff = git.run("diff", "--no-color", "--no-ext-diff", "--no-renames", before, tree)
    return Trees({**base, **dict.fromkeys(overlay)}, {**result, **overlay}, tree, diff)
